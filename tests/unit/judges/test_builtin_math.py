"""`math_verify`: equal expressions pass, and what hangs its package does not hang the command."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ftcli.config.evaluation import TaskConfig
from ftcli.judges import CompletionBatch, JudgeScores, builtin, open_judge
from ftcli.preflight.checks import judging

#: Completion, known answer, and whether they are equal.
CASES: list[tuple[str, str, float | None]] = [
    ("So the answer is 42.", "42", 1.0),
    ("So the answer is 43.", "42", 0.0),
    (r"\boxed{\frac{2}{4}}", "0.5", 1.0),
    ("It is $1 + x^2$", "x^2+1", 1.0),
    (r"$2\pi$", "2", 0.0),
    (r"$\sqrt{8}$", r"2\sqrt{2}", 1.0),
    ("3,000", "$3000$", 1.0),
    (r"$\{2, 1\}$", r"\{1,2\}", 1.0),
    ("I do not know", "7", 0.0),
    ("", "7", 0.0),
    ("7", "", None),
]


def scores(completions: list[str], answers: list[str], **options: Any) -> JudgeScores:
    judge = open_judge(TaskConfig.model_validate({"use": "math_verify", **options}))
    return judge.scores(CompletionBatch(completions, answers=answers))


def test_equal_expressions_pass_and_an_answer_without_one_is_a_failure() -> None:
    completions, answers, wanted = (list(each) for each in zip(*CASES, strict=True))
    found = scores(completions, answers)
    assert dict(zip(completions, found.values, strict=True)) == dict(zip(completions, wanted, strict=True))
    assert found.failed == (len(CASES) - 1,)
    assert "found no expression in the known answer" in str(found.example)


def test_what_takes_too_long_is_no_wrong_answer_and_the_rest_is_judged() -> None:
    """The package alone would call it wrong."""
    slow = "$" + "(" * 3000 + "1" + ")" * 3000 + "$"
    for seconds in (0.5, 8.0):
        found = scores(["7", slow, "7", slow, "8"], ["7"] * 5, timeout=seconds)
        if len(found.failed) == 2:
            break  # else the machine is too slow for the others
    assert (found.values, found.failed) == ([1.0, None, 1.0, None, 0.0], (1, 3))
    assert f"took more than {seconds:g} s" in str(found.example)


def test_code_that_no_alarm_ends_is_killed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(
        "import signal, time\n"
        "def equal(completion, answer):\n"
        "    if completion == 'hang':\n"
        "        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); time.sleep(600)\n"
        "    return [1.0]\n"
    )
    monkeypatch.setattr(builtin, "_SCRIPT", script)
    began = time.monotonic()
    found = scores(["a", "hang", "b", "hang", "c", "d"], [""] * 6, timeout=0.2)
    assert found.values == [1.0, None, 1.0, None, 1.0, 1.0]
    assert time.monotonic() - began < 500


def test_it_works_in_a_thread_and_leaves_alarms_alone() -> None:
    handler, found = signal.getsignal(signal.SIGALRM), []
    before = signal.getitimer(signal.ITIMER_REAL)[0]
    thread = threading.Thread(target=lambda: found.append(scores(["7"], ["7"]).values))
    thread.start()
    thread.join()
    assert found == [[1.0]]
    assert signal.getsignal(signal.SIGALRM) == handler
    assert before - 60 < signal.getitimer(signal.ITIMER_REAL)[0] <= before


def test_without_the_package_preflight_says_how_to_install_it(context: Callable[..., Any]) -> None:
    made = context("data: {train: [a.jsonl]}\n", command="grpo")
    task = TaskConfig(use="math_verify")
    (finding,) = judging.judge_findings(made, "eval.tasks.0", task, lambda package: package != "math_verify")
    assert (finding.code, finding.help) == ("FT253", "pip install 'ftcli[math]'")
    assert not list(judging.judge_findings(made, "eval.tasks.0", task, lambda _: True))
