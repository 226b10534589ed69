"""Importing all of ftcli changes nothing outside it: no patched library, setting, handler or environment variable."""

from __future__ import annotations

import pytest

from tests.e2e.drill import Server


@pytest.mark.slow
def test_importing_everything_changes_nothing_outside(drill_server: Server) -> None:
    found = drill_server.imported()
    assert found["changed"] == []
    assert found["lost"] == []
    assert found["settings"] == {}
    assert found["modules"] > 120
    assert found["attributes"] > 10_000
