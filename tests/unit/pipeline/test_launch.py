"""Which method a command that trains means, and what it says where the recipe names another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ftcli.pipeline.launch import train
from ftcli.reporting import Session, SilentReporter
from ftcli.tables import code_of

RECIPE = "model: {name_or_path: bundled:tiny-gemma2}\ngrpo: {rewards: [{use: length}]}\n"


class Heard(SilentReporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, message: str) -> None:
        self.lines.append(message)


@pytest.mark.parametrize(
    ("method", "command", "by"),
    [("sft", "grpo", None), ("dpo", "grpo", "GRPO"), ("dpo", "train", None), ("sft", "train", None)],
)
def test_a_method_that_the_command_does_not_train_by_is_said(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, method: str, command: str, by: str | None
) -> None:
    """It would be passed over in silence."""
    ran: list[str] = []

    def code(text: str) -> Any:
        return code_of(text) if "launch" in text else lambda *_: ran.append(text)

    monkeypatch.setattr("ftcli.pipeline.launch.code_of", code)
    heard = Heard()
    train(load(RECIPE, f"train.method={method}"), Session(reporter=heard), command)
    assert len(ran) == 1
    assert heard.lines == ([f"train.method: {method} is for `ftcli train`; `ftcli grpo` trains by {by}"] if by else [])
