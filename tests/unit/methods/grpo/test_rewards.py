"""Rewards: built-in ones score right, and whatever a user's function returns is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftcli.config.evaluation import RewardConfig
from ftcli.errors import Finding, FtcliError, Origin
from ftcli.methods.grpo.rewards import Reward, RewardFailures, build_rewards
from ftcli.reporting import SilentReporter


def build(*configs: dict[str, Any], columns: tuple[str, ...] = ("answer",)) -> list[Reward]:
    return build_rewards([RewardConfig.model_validate(c) for c in configs], columns)


def score(reward: Reward, completions: list[str], **columns: Any) -> list[float | None]:
    return reward.scores(["p"] * len(completions), completions, columns).values


def user_file(folder: Path, body: str) -> str:
    path = folder / "mine.py"
    path.write_text(body, encoding="utf-8")
    return f"{path}:score"


def test_exact_match_ignores_outer_space_only() -> None:
    reward = build({"use": "exact_match"})[0]
    assert score(reward, [" 7\n", "77", "", "7 7"], answer=["7", "7", "7", "77"]) == [1.0, 0.0, 0.0, 0.0]
    assert score(reward, ["7"], answer=[7]) == [1.0]


def test_exact_match_extracts_a_group() -> None:
    reward = build({"use": "exact_match", "answer": "gold", "extract": "<a>(.*?)</a>"}, columns=("gold",))[0]
    assert score(reward, ["so <a> 7 </a>", "7", "<a>8</a>"], gold=["7", "7", "7"]) == [1.0, 0.0, 0.0]


def test_regex_spans_lines() -> None:
    assert score(build({"use": "regex", "pattern": "^<t>.*</t>"})[0], ["<t>a\nb</t>", "x"]) == [1.0, 0.0]


def test_the_judges_of_tasks_are_rewards_too() -> None:
    contains, valid = build({"use": "contains", "answer": "gold"}, {"use": "json_valid"}, columns=("gold",))
    assert score(contains, ["it is 7", "8"], gold=[7, 7]) == [1.0, 0.0]
    assert score(valid, ['{"a": 1}', "{"], gold=[7, 7]) == [1.0, 0.0]


def test_equal_names_are_made_unique_for_the_log() -> None:
    names = [r.name for r in build({"use": "regex", "pattern": "a"}, {"use": "regex", "pattern": "b"})]
    assert names == ["regex", "regex#2"]


def test_user_function_gets_columns_and_args(tmp_path: Path) -> None:
    spec = user_file(
        tmp_path,
        "def score(completions, prompts, answer, k, **kw):\n"
        "    return [k * (c == a) if c else None for c, a in zip(completions, answer)]\n",
    )
    reward = build({"file": spec, "args": {"k": 3}, "weight": 0.5})[0]
    assert (reward.name, reward.weight) == ("score", 0.5)
    assert score(reward, ["x", "y", ""], answer=["x", "x", "x"]) == [3.0, 0.0, None]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("def score(**kw): return [1.0]", "returned a list of 1 value, a list of 2"),
        ("def score(**kw): return 1.0", "returned float"),
        ("def score(**kw): return [1.0, float('nan')]", "for completion 2"),
        ("def score(**kw): return ['1', 1]", "for completion 1"),
        ("def score(**kw): raise KeyError('gold')", "raised KeyError"),
        ("def score(completions): return [1.0]", "raised TypeError"),
    ],
)
def test_bad_results_are_named(tmp_path: Path, body: str, words: str) -> None:
    reward = build({"file": user_file(tmp_path, body)})[0]
    with pytest.raises(FtcliError, match="FT455") as caught:
        score(reward, ["a", "b"], answer=["a", "b"])
    assert words in caught.value.findings[0].message


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("def other(**kw): ...", "FT451", "it has: other"),
        ("1/0", "FT452", "ZeroDivisionError"),
        ("score = (", "FT452", "SyntaxError"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, body: str, code: str, words: str) -> None:
    with pytest.raises(FtcliError, match=code) as caught:
        build({"file": user_file(tmp_path, body)})
    assert words in caught.value.findings[0].message


def test_missing_file_column_and_reserved_names(tmp_path: Path) -> None:
    with pytest.raises(FtcliError, match="FT451"):
        build({"file": f"{tmp_path}/none.py:score"})
    with pytest.raises(FtcliError, match="FT453"):
        build({"use": "exact_match", "answer": "gold"})
    with pytest.raises(FtcliError, match="FT454"):
        build({"use": "exact_match"}, columns=("answer", "prompts"))


def test_failures_are_counted_over_the_newest_completions() -> None:
    failures = RewardFailures(0.05, SilentReporter())
    for _ in range(20):
        failures.add("score", 64, 2)  # 3.1%
    failures.add("score", 64, 21)
    with pytest.raises(FtcliError, match="could not judge 70 of the last 1,024 completions") as caught:
        failures.add("score", 64, 21)
    assert (caught.value.findings[0].code, caught.value.exit_code) == ("FT456", 4)


def test_a_few_failures_at_the_beginning_do_not_stop_a_run_and_failing_always_does() -> None:
    failures = RewardFailures(0.05, SilentReporter())
    failures.add("score", 8, 5)
    failures.add("other", 8, 5)
    again = RewardFailures(0.05, SilentReporter())
    again.restore(failures.state())
    with pytest.raises(FtcliError, match="FT456"):
        again.add("score", 8, 1)
    with pytest.raises(FtcliError, match="could not judge 1 of the last 8"):
        RewardFailures(0.0, SilentReporter()).add("score", 8, 1)
    never = RewardFailures(1.0, SilentReporter())
    for _ in range(50):
        never.add("score", 64, 64)


def test_the_first_failure_is_told_with_its_row_and_once(tmp_path: Path) -> None:
    told: list[Finding] = []

    class Told(SilentReporter):
        def finding(self, finding: Finding) -> None:
            told.append(finding)

    body = "def score(completions, **kw): return [float('nan') if c == 'x' else 1.0 for c in completions]"
    (reward,) = build({"file": user_file(tmp_path, body), "on_error": -1})
    failures = RewardFailures(0.9, Told())
    for _ in range(2):
        scores = reward.scores(["p"] * 3, ["a", "x", "x"], {}, [Origin("d.jsonl", row) for row in (4, 4, 5)])
        assert scores.values == [1.0, -1.0, -1.0]
        failures.note(reward, scores)
        (noted,) = failures.newest().values()
        assert noted[:2] == (3, 2)
        failures.add("score", *noted[:3])
    (finding,) = told
    assert (finding.code, finding.severity) == ("FT457", "warning")
    assert "for completion 2 to d.jsonl:4: 'x'; the completion gets the score -1" in finding.message
