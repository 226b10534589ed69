"""A judge means the same as a reward of GRPO and as a task of evaluation: one engine, the same flags and bounds."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from ftcli.config.evaluation import RewardConfig, TaskConfig
from ftcli.data.reasoning import Answer
from ftcli.evaluate.suite import AnsweredTask, judge
from ftcli.judges import builtin, open_judge
from ftcli.methods.grpo import checks as grpo
from ftcli.methods.grpo.rewards import build_rewards
from ftcli.preflight.checks import crossfield, judging
from ftcli.rows.prompts import Prompt
from ftcli.rows.row import Row

COMPLETIONS = [
    "7", " 7\n", "seven", "", "A\nb", "a" * 20_001 + "7", "answer: 7.", "answer: 8\nanswer: 7", '{"a": 7}', "７", "AB",
]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"use": "exact_match"},
        {"use": "exact_match", "extract": r"answer: (\d)"},
        {"use": "exact_match", "extract": r"^(\d)?"},
        {"use": "contains"},
        {"use": "json_valid"},
        {"use": "json_valid", "json_schema": {"required": ["a"]}},
        {"use": "math_verify"},
        *({"use": "regex", "pattern": p} for p in ("7", "^7$", "A.b", "(?i)ab", r"\d", r"(?a)\d", "(?m)7$", "7.*7")),
    ],
)
def test_a_reward_and_a_task_say_the_same(options: dict[str, Any]) -> None:
    (reward,) = build_rewards([RewardConfig.model_validate(options)], ["answer"])
    count = len(COMPLETIONS)
    rewarded = reward.scores(["p"] * count, COMPLETIONS, {"answer": ["7"] * count}).values
    prompt, task = Prompt(Row("d", 1, {}), None, "p", "7"), TaskConfig.model_validate(options)
    opened = open_judge(task)
    judged = [judge(task, AnsweredTask([prompt], ["p"], [Answer(c)]), opened).score for c in COMPLETIONS]
    assert rewarded == judged
    assert 0 < sum(judged) < count or options == {"use": "regex", "pattern": "7.*7"}


@pytest.mark.parametrize("expression", ["(a+)+$", "(x+x+)+y", "(a|aa)+$"])
def test_an_expression_that_never_ends_is_given_up_in_both(expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "SECONDS", 0.1)
    handler = signal.getsignal(signal.SIGALRM)
    evil = ("x" if "x" in expression else "a") * 5000 + "!"
    for options in ({"use": "regex", "pattern": expression}, {"use": "exact_match", "extract": expression}):
        (reward,) = build_rewards([RewardConfig.model_validate(options)], ["answer"])
        assert reward.scores(["p"], [evil], {"answer": ["7"]}).failed == (0,)
        task = TaskConfig.model_validate(options)
        result = judge(
            task, AnsweredTask([Prompt(Row("d", 1, {}), None, "p", "7")], ["p"], [Answer(evil)]), open_judge(task)
        )
        assert (result.rows, result.failed, result.samples[0].score) == (0, 1, None), "it is not judged, and that shows"
    assert signal.getsignal(signal.SIGALRM) == handler


def test_another_alarm_comes_in_its_time() -> None:
    before = signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        assert builtin.Pattern("a").search("a") is not None
        assert 400 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"extract": "7"}, "FT264"),
        ({"extract": "("}, "FT264"),
        ({"extract": "(7)"}, None),
    ],
)
def test_preflight_says_the_same_of_both(
    context: Callable[..., Any], options: dict[str, str], code: str | None
) -> None:
    judge_ = f"{{use: exact_match, extract: '{options['extract']}'}}"
    asked = context(f"data: {{train: [d.jsonl], eval: [e.jsonl]}}\neval: {{tasks: [{judge_}]}}\n", command="eval")
    rewarded = context(f"data: {{train: [d.jsonl]}}\ngrpo: {{rewards: [{judge_}]}}\n", command="grpo")
    expected = [code] if code else []
    assert [f.code for f in crossfield.check(asked)] == expected
    assert [f.code for f in grpo.check(rewarded) if f.code != "FT261"] == expected


def test_a_task_that_does_not_read_extract_is_refused(context: Callable[..., Any]) -> None:
    ready = context("data: {eval: [e.jsonl]}\neval: {tasks: [{use: contains, extract: '(a)'}]}\n", command="eval")
    assert [f.code for f in crossfield.check(ready)] == ["FT767"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use": "length"}, "`use: length` needs max_chars"),
        ({"use": "contains", "max_chars": 3}, "`max_chars` is only read by `use: length`"),
        (
            {"use": "json_valid", "timeout": 3},
            "`timeout` is only read by `use: math_verify` and `use: python_tests` and `file`",
        ),
        ({"file": "a.py:f", "json_schema": {}}, "`json_schema` is only read by `use: json_valid`"),
        (
            {"use": "length", "max_chars": 3, "on_error": "skip"},
            "`on_error` is only read by `use: exact_match` and `use: regex` and `use: json_valid` and "
            "`use: math_verify` and `use: reward_model` and `use: llm_judge` and `file`",
        ),
    ],
)
def test_options_belong_to_their_judges(options: dict[str, Any], said: str, context: Callable[..., Any]) -> None:
    made = context("data: {train: [a.jsonl]}\n", command="grpo")
    for kind in (RewardConfig, TaskConfig):
        (finding,) = judging.judge_findings(made, "eval.tasks.0", kind.model_validate(options))
        assert (finding.code, finding.message) == ("FT265", said)


def test_length_is_that_of_the_text_without_space_around() -> None:
    options = {"use": "length", "min_chars": 2, "max_chars": 3}
    (reward,) = build_rewards([RewardConfig.model_validate(options)], [])
    texts = ["", " a ", "ab\n", "abc", "abcd", "ä🙂"]
    assert reward.scores(["p"] * 6, texts, {}).values == [0.0, 0.0, 1.0, 1.0, 0.0, 1.0]
