"""The judge `math_verify`: a completion's expression equals the known one, by the package of that name.

Its own time limit is an alarm that works on a main thread only, does not end code in C, and makes what was not compared
in time a wrong answer. So it is switched off, and the package works in processes that are killed when they are late.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ftcli.facts.device import usable_cores
from ftcli.judges.process import FunctionSource, Worker, ask_each
from ftcli.judges.verdicts import FailedJudgement, Scorer, Verdict
from ftcli.plain import JsonObject

#: What a process may take for expressions that grow, and how many there are at most.
_ADDRESS_SPACE, _MOST_WORKERS = 4 * 2**30, 8
_SCRIPT = Path(__file__).with_name("expressions.py")


def math_verify(timeout: float = 5.0) -> Scorer:
    """Passes where an expression that is found in the completion is equal to the answer's.

    What is found is the last LaTeX (``$…$``, ``\\(…\\)``, ``\\boxed{…}``) or plain number; an answer without such marks
    is LaTeX as a whole. An answer without an expression, and a completion that takes longer than ``timeout`` seconds,
    is a failure.
    """
    return _MathVerify(timeout)


class _MathVerify:
    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._workers: list[Worker] = []

    def __call__(self, completions: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        wanted = min(usable_cores(), _MOST_WORKERS, len(completions))
        source = FunctionSource(_SCRIPT, "equal", _ADDRESS_SPACE)
        self._workers += [Worker(source) for _ in range(wanted - len(self._workers))]
        calls = [{"completion": text, "answer": answer} for text, answer in zip(completions, answers, strict=True)]
        return [self._verdict(answer) for answer in ask_each(self._workers, calls, self._timeout)]

    def _verdict(self, answer: JsonObject) -> Verdict:
        if "late" in answer:
            return FailedJudgement(f"took more than {self._timeout:g} s")
        if "raised" in answer:
            return FailedJudgement(str(answer["raised"]))
        score: float | None = answer["scores"][0]
        return FailedJudgement("found no expression in the known answer") if score is None else score
