"""Prompts of tasks and of GRPO are held to the recipe as rows to train on are: broken, long, or with reasoning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ftcli.config.data import DataConfig
from ftcli.config.evaluation import GenerateConfig
from ftcli.data.asked import PromptLimit, RenderedPrompt, asked_rows, room_of_task, uncut
from ftcli.errors import Finding, FtcliError
from ftcli.methods.grpo.settings import GrpoConfig

Ask = Callable[..., tuple[list[RenderedPrompt], list[Finding]]]
GOOD = {"prompt": "q", "answer": "a"}


@pytest.fixture
def ask(bytes_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Ask:
    """``ask(rows, room=..., max_rows=..., data options)``."""

    def _ask(*files: list[Any], room: PromptLimit | None = None, max_rows: int | None = None, **options: Any) -> Any:
        paths = []
        for number, rows in enumerate(files):
            paths.append(str(tmp_path / f"t{number}.jsonl"))
            lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
            Path(paths[-1]).write_text("\n".join(lines) + "\n")
        data = DataConfig.model_validate({"eval": paths, "max_seq_len": 100, **options})
        room = room or room_of_task(data, GenerateConfig(max_new_tokens=10))
        return asked_rows(data.eval, data, bytes_tokenizer, room, offline=True, max_rows=max_rows)

    return _ask


def length(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def long(count: int) -> dict[str, str]:
    return {"prompt": f"begin {'x' * count} end", "answer": "a"}


BROKEN = [GOOD, "{", {"prompt": 3, "answer": "a"}, '{"prompt": "\\ud800", "answer": "a"}', GOOD]


@pytest.mark.parametrize(("allowed", "skipped"), [(0, False), (2, False), (3, True), (0.5, False), (0.61, True)])
def test_broken_rows_are_skipped_and_counted_as_in_training(ask: Ask, allowed: float, skipped: bool) -> None:
    if skipped:
        asked, warnings = ask(BROKEN, max_bad_rows=allowed)
        assert [one.prompt.row.number for one in asked] == [1, 5]
        assert [finding.code for finding in warnings] == ["FT441"]
        assert "3 of 5 rows are broken and skipped (1 of FT403, 2 of FT412)" in warnings[0].message
        return
    with pytest.raises(FtcliError) as caught:
        ask(BROKEN, max_bad_rows=allowed)
    assert [(f.code, f.origin.line) for f in caught.value.findings if f.origin] == [
        ("FT403", 2), ("FT412", 3), ("FT412", 4),
    ]  # fmt: skip


def test_prompts_that_the_template_refuses_are_broken_rows(ask: Ask) -> None:
    system = {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "answer": "a"}
    asked, _ = ask([system, GOOD], max_bad_rows=1)
    assert len(asked) == 1
    with pytest.raises(FtcliError, match="FT425"):
        ask([system, GOOD])


def test_a_long_prompt_is_refused_left_out_or_loses_its_beginning(
    ask: Ask, bytes_tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [GOOD, long(100), GOOD, long(200)]
    with pytest.raises(FtcliError) as caught:
        ask(rows)
    assert [(f.code, f.origin.line) for f in caught.value.findings if f.origin] == [("FT431", 2), ("FT431", 4)]
    assert "no room for an answer in data.max_seq_len 100" in caught.value.findings[0].message
    asked, warnings = ask(rows, overlong="drop")
    assert [one.prompt.row.number for one in asked] == [1, 3]
    assert "2 of 4 prompts are too long and left out" in warnings[0].message
    asked, warnings = ask(rows, overlong="truncate")
    assert "2 of 4 prompts are too long and asked without their beginning" in warnings[0].message
    cut = asked[1].text
    assert length(bytes_tokenizer, cut) == 90, "what max_new_tokens leaves"
    assert cut.startswith("<bos>x")
    assert cut.endswith("x end<end_of_turn>\n<start_of_turn>model\n")
    assert asked[0].text == ask([GOOD])[0][0].text


def test_grpo_never_cuts_a_prompt(ask: Ask) -> None:
    grpo = GrpoConfig.model_validate({"max_prompt_length": 60, "rewards": [{"use": "json_valid"}]})
    for overlong in ("error", "truncate"):
        with pytest.raises(FtcliError, match="FT781"):
            ask([GOOD, long(50)], room=uncut("grpo", grpo.max_prompt_length), overlong=overlong)
    assert len(ask([GOOD, long(50)], room=uncut("grpo", grpo.max_prompt_length), overlong="drop")[0]) == 1


def test_faults_of_all_sources_come_together_and_nothing_left_is_an_error(ask: Ask) -> None:
    with pytest.raises(FtcliError) as caught:
        ask(["{"], [long(200), GOOD], [{"other": 1}])
    assert [finding.code for finding in caught.value.findings] == ["FT403", "FT431", "FT411"]
    with pytest.raises(FtcliError, match="FT404"):
        ask([long(200)], overlong="drop")
    with pytest.raises(FtcliError, match="FT404"):
        ask([])


@pytest.mark.parametrize(("reasoning", "reference"), [("keep", "<think>t</think>\n\nA"), ("drop", "A")])
def test_the_known_answer_has_the_reasoning_that_the_recipe_wants(ask: Ask, reasoning: str, reference: str) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>t</think>\n\nA"}]
    for row in ({"messages": chat}, {"prompt": "q", "answer": chat[1]["content"]}):
        assert ask([row], reasoning=reasoning)[0][0].prompt.reference == reference
        with pytest.raises(FtcliError, match="FT427"):
            ask([row], reasoning="refuse")


def test_only_the_rows_that_are_judged_are_read(ask: Ask) -> None:
    asked, _ = ask([GOOD, GOOD, "{"], ["{"], max_rows=2)
    assert len(asked) == 2
