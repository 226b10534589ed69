"""Ranks that look for a rank 0 which is not there."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from ftcli.errors import ExitCode, FtcliError
from ftcli.ranks import ENDED_NAME, PORT_NAME, Place
from ftcli.run import process_group

NOBODY = "1"  # a port where nobody listens


def test_a_rank_0_that_ends_while_it_is_being_reached_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch itself would try to reach it for as long as it may."""
    monkeypatch.setattr(process_group, "_FIRST_SECONDS", 0.1)
    (tmp_path / PORT_NAME).write_text(NOBODY, encoding="utf-8")
    ends = threading.Timer(0.05, (tmp_path / ENDED_NAME).touch)
    begun = time.monotonic()
    ends.start()
    with pytest.raises(FtcliError, match="rank 0 has ended") as caught:
        process_group.meeting_point(Place(1, 2, folder=tmp_path), seconds=600.0)
    ends.join()
    assert (caught.value.findings[0].code, caught.value.exit_code) == ("FT712", ExitCode.PREFLIGHT)
    assert time.monotonic() - begun < 500


def test_a_port_that_cannot_be_reached_is_told_with_torchs_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "_FIRST_SECONDS", 0.1)
    (tmp_path / PORT_NAME).write_text(NOBODY, encoding="utf-8")
    with pytest.raises(FtcliError, match="FT712: rank 1 of 2 finds no other rank") as caught:
        process_group.meeting_point(Place(1, 2, folder=tmp_path), seconds=0.2)
    assert "rank 0 has not said" not in str(caught.value)  # it has: that port cannot be reached
