"""`ftcli doctor` names accelerators that are here and not used, with what runs instead."""

from __future__ import annotations

import pytest
import torch

from ftcli.cli.commands.doctor import doctor_text, examine
from ftcli.facts.device import probe_device
from ftcli.reporting import Session


@pytest.mark.parametrize(("kind", "name"), [("mps", "an Apple GPU (Metal)"), ("xpu", "an Intel GPU (XPU)")])
def test_another_accelerator_is_named(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device(kind))
    found = examine(Session())
    (said,) = found.unused
    assert (said.name, said.runs) == (name, False)
    assert f"{name}  off  not used: the CPU computes" in doctor_text(found)
    assert found.device is not None
    assert probe_device().unused == name


def test_where_there_is_none_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert "accelerators" not in doctor_text(examine(Session()))
