"""Reward files: whatever they define, raise or return, they are used or refused."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcli.config import RewardConfig
from ftcli.errors import FtcliError
from ftcli.judges import CompletionBatch, open_judge
from tests.fuzz.budget import examples
from tests.fuzz.contract import hold_refusal

_RAISED = st.sampled_from(
    ["ValueError('x')", "SystemExit(0)", "SystemExit('x')", "GeneratorExit()", "MemoryError()", "RecursionError()", "StopIteration()",
     "BaseException('x')", "type('E', (Exception,), {'__str__': lambda s: 1 / 0})()", "UnicodeDecodeError('a', b'', 0, 1, 'x')",
     "OSError(28, 'x')", "ExceptionGroup('x', [ValueError()])", "KeyError(float('nan'))", "3"]
)  # fmt: skip
_VALUES = st.sampled_from(
    ["1", "1.0", "None", "True", "float('nan')", "float('inf')", "10**400", "-10**400", "'1'", "[1]", "{}", "b'1'", "1j", "object()",
     "type('R', (), {'__repr__': lambda s: 1 / 0})()", "type('F', (float,), {'__float__': lambda s: 1 / 0})(1)",
     "__import__('decimal').Decimal('nan')", "__import__('fractions').Fraction(1, 3)", "__import__('numpy').float32(1)"]
)  # fmt: skip
_ENDS = st.sampled_from(
    ["__import__('sys').exit(0)", "__import__('os')._exit(0)", "exit()", "__import__('os').chdir('/')", "f()", "1/0"]
)
_bodies = st.one_of(
    st.builds("return [{}, {}]".format, _VALUES, _VALUES),
    st.builds("return [{}] * 10".format, _VALUES),
    st.builds("return {}".format, _VALUES),
    st.builds("return ({} for _ in range(2))".format, _VALUES),
    st.builds("raise {}".format, _RAISED),
    st.builds("{}; return [1, 2]".format, _ENDS),
    st.just("completions.clear(); return [1, 2]"),
    st.just("yield 1"),
    st.just("pass"),
)
_heads = st.sampled_from(
    ["def f(completions, **k):", "def f(**k):", "def f():", "def f(completions, prompts, nothing):", "async def f(**k):", "class f:\n def __call__(s, **k):",
     "f = 3\ndef g():", "import no_such_module\ndef f(**k):", "def f(**k)", "if True:\n def f(**k):", "\0", "é = 1\ndef f(**k):"]
)  # fmt: skip
_files = st.builds("{}\n    {}\n".format, _heads, _bodies) | st.builds(
    "{}\ndef f(**k): return [1, 2]\n".format, _ENDS | _RAISED.map("raise {}".format)
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """An empty folder."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@examples(60, 200)
@given(source=_files)
def test_reward_files(folder: Path, source: str) -> None:
    spec = f"{folder}/mine.py:f"
    (folder / "mine.py").write_text(source, encoding="utf-8")
    try:
        judge = open_judge(RewardConfig(file=spec))
        scores = judge.scores(CompletionBatch(["a", "b"], ["p", "q"], columns={"answer": [1, "x"]})).values
    except FtcliError as error:
        hold_refusal(error)
    else:
        assert len(scores) == 2
        assert all(score is None or type(score) is float for score in scores)
