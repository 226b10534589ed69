"""Reward files: whatever they define, raise, return or do to their process, they are used or refused, and in time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcli.config.evaluation import RewardConfig
from ftcli.errors import FtcliError
from ftcli.judges import CompletionBatch, open_judge
from ftcli.judges.environment import EnvironmentPool
from ftcli.judges.verdicts import FailedJudgement
from tests.fuzz.budget import examples
from tests.fuzz.contract import hold_refusal
from tests.fuzz.values import FLOATS, NUMBERS, anything

_RAISED = st.sampled_from(
    ["ValueError('x')", "SystemExit(0)", "SystemExit('x')", "GeneratorExit()", "MemoryError()", "RecursionError()", "StopIteration()",
     "BaseException('x')", "type('E', (Exception,), {'__str__': lambda s: 1 / 0})()", "UnicodeDecodeError('a', b'', 0, 1, 'x')",
     "OSError(28, 'x')", "ExceptionGroup('x', [ValueError()])", "KeyError(float('nan'))", "3", "KeyboardInterrupt()",
     "ValueError('\\ud800')", "ValueError('\\x1b[31m' * 9999)", "type('\\ud800', (Exception,), {})()"]
)  # fmt: skip
_VALUES = st.sampled_from(
    ["1", "1.0", "None", "True", "float('nan')", "float('inf')", "10**400", "-10**400", "10**5000", "3.5e38", "-1e39", "1e308", "5e-324",
     "1e12", "1.0000001e12", "'1'", "[1]", "{}", "b'1'", "1j", "object()", "'\\ud800'", "type('I', (int,), {})(3)",
     "type('R', (), {'__repr__': lambda s: 1 / 0})()", "type('F', (float,), {'__float__': lambda s: 1 / 0})(1)",
     "type('T', (), {'item': lambda s: 1 / 0})()", "type('T', (), {'item': lambda s: s})()", "type('T', (), {'item': 3})()",
     "__import__('decimal').Decimal('nan')", "__import__('fractions').Fraction(1, 3)", "np.float32(1)", "np.float16('inf')",
     "np.int8(-1)", "np.bool_(True)", "np.array(2.5)", "np.array([1.0])", "np.array([1, 2])", "np.array('x')", "np.datetime64('NaT')",
     "np.float64('nan')", "np.ma.masked", "np.complex64(1)", "np.longdouble('1e4000')"]
) | st.sampled_from([*FLOATS, *NUMBERS]).map("float('{0}') if '{0}'[:3] != '100' else {0}".format)  # fmt: skip
_WHOLES = st.sampled_from(
    ["np.array([1, 2])", "np.array([1.5, None], dtype=object)", "np.array([[1, 2]])", "np.array([[1], [2]])", "np.array(1)", "np.array([])",
     "np.array(['a', 'b'])", "np.array([np.nan, np.inf])", "np.ma.array([1, 2], mask=[0, 1])", "np.array([(1, 2)], dtype='i,i')",
     "np.array([1, 2], dtype=bool)", "np.array([1, 2], dtype='>f2')", "np.arange(2)[::-1]", "np.array([1e39, -1e300])", "memoryview(b'ab')",
     "type('A', (), {'tolist': lambda s: 1 / 0})()", "type('A', (), {'tolist': lambda s: 'ab', 'shape': 3})()",
     "type('A', (), {'tolist': lambda s: [1, 2], 'shape': property(lambda s: 1 / 0)})()", "type('L', (list,), {'__len__': lambda s: -1})()",
     "type('L', (list,), {'__len__': lambda s: 2, '__iter__': lambda s: iter(())})()", "type('L', (list,), {'__iter__': lambda s: 1 / 0})([1, 2])",
     "{0: 1, 1: 2}", "'ab'", "range(2)", "map(float, (1, 2))", "{1, 2}", "type('T', (tuple,), {})((1, 2))"]
)  # fmt: skip
#: What is written into each descriptor that the process has beyond its own three.
_WRITTEN = st.one_of(
    st.binary(max_size=40).map(repr),
    st.integers(0, 2**64 - 1).map("b'ftcli-judge:' + ({}).to_bytes(8)".format),
    st.sampled_from(["b'[' * 99", "b'[' * 99999", "b'{}'", '\'{"scores": 3}\'.encode()', '\'{"scores": [1e999, "x"], "bad": []}\'.encode()', "b'\\xff'"]).map(
        "(lambda t: b'ftcli-judge:' + len(t).to_bytes(8) + t)({})".format
    ),
)  # fmt: skip
_TO_EACH = (
    "import os, stat\n    for at in range(3, 64):\n        try:\n            {}\n        except OSError: pass\n    {}"
)
_ON = st.sampled_from(
    ["return [1, 2]", "__import__('time').sleep(9)", "raise ValueError('x')", "__import__('os')._exit(0)"]
)
_descriptors = st.one_of(
    st.builds(
        lambda written, on: _TO_EACH.format(f"stat.S_ISSOCK(os.fstat(at).st_mode) and os.write(at, {written})", on),
        _WRITTEN,
        _ON,
    ),
    st.builds(
        _TO_EACH.format,
        st.sampled_from(["os.close(at)", "os.dup2(1, at)", "os.read(at, 0)", "os.set_blocking(at, False)"]),
        _ON,
    ),
)
_ENDS = st.sampled_from(
    ["__import__('sys').exit(0)", "__import__('os')._exit(0)", "exit()", "__import__('os').chdir('/')", "f()", "1/0",
     "__import__('os').fork()", "__import__('os').kill(__import__('os').getpid(), 37)", "__import__('os').abort()",
     "__import__('os').system('sleep 30 &')", "__import__('os').kill(__import__('os').getpid(), 19)", "__import__('os').setsid()",
     "__import__('signal').alarm(1)", "__import__('sys').setrecursionlimit(9)", "__import__('sys').modules.clear()",
     "__import__('builtins').__dict__.pop('len')", "__import__('json').dumps = None", "__import__('sys').stdout.close()",
     "__import__('threading').Thread(target=lambda: 1 / 0).start()", "__import__('os').closerange(0, 3)"]
)  # fmt: skip
_bodies = st.one_of(
    st.builds("return [{}, {}]".format, _VALUES, _VALUES),
    st.builds("return [{}] * 10".format, _VALUES),
    st.builds("return {}".format, _VALUES | _WHOLES),
    st.builds("return ({} for _ in range(2))".format, _VALUES),
    st.builds("raise {}".format, _RAISED),
    st.builds("{}; return [1, 2]".format, _ENDS),
    _descriptors,
    st.just("completions.clear(); return [1, 2]"),
    st.just("yield 1"),
    st.just("pass"),
)
_heads = st.sampled_from(
    ["def f(completions, **k):", "def f(**k):", "def f():", "def f(completions, prompts, nothing):", "async def f(**k):", "class f:\n def __call__(s, **k):",
     "f = 3\ndef g():", "import no_such_module\ndef f(**k):", "def f(**k)", "if True:\n def f(**k):", "\0", "é = 1\ndef f(**k):",
     "def f(completions, prompts, answer):", "def f(completions, prompts, answer, completion_reasoning):", "def f(*a, **k):", "def f(completions, /, **k):",
     "import functools\n@functools.cache\ndef f(**k):", "import functools\n@functools.partial(functools.partial, completions=[])\ndef f(completions, **k):"]
)  # fmt: skip
_files = st.builds("np = __import__('numpy')\n{}\n    {}\n".format, _heads, _bodies) | st.builds(
    "{}\ndef f(**k): return [1, 2]\n".format, _ENDS | _RAISED.map("raise {}".format)
)
#: Of one call; four of them, and as much again for starting processes, are the most that a batch may take.
_TIMEOUT = 1.0
_columns = st.fixed_dictionaries(
    {"answer": st.just([1, "x"])},
    optional={"deep": st.just([[[[["x"]]]], None]), "said": st.lists(anything, min_size=2, max_size=2)},
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """An empty folder; a file may take seconds to load there, not ten minutes."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ftcli.judges.process.LOAD_SECONDS", 4.0)
        yield Path(name)


@examples(12, 200)
@given(
    source=_files,
    columns=_columns,
    on_error=st.sampled_from(["stop", "skip", -1.0]),
    reasoning=st.sampled_from([(), (None, "so")]),
)
def test_reward_files(folder: Path, source: str, columns: dict[str, Any], on_error: Any, reasoning: Any) -> None:
    spec = f"{folder}/mine.py:f"
    (folder / "mine.py").write_text(source, encoding="utf-8", errors="backslashreplace")
    began = time.monotonic()
    try:
        judge = open_judge(RewardConfig(file=spec, timeout=_TIMEOUT, on_error=on_error))
        batch = CompletionBatch(["a", "b"], ["p", "q"], columns=columns, reasoning=reasoning)
        scores = [judge.scores(batch).values for _ in range(2)]
    except FtcliError as error:
        hold_refusal(error)
    else:
        assert all(len(values) == 2 for values in scores)
        assert all(
            score is None or (type(score) is float and abs(score) <= 1e12) for values in scores for score in values
        )
    assert time.monotonic() - began < 120, "it hangs"


_CLASS = """np = __import__('numpy')
class Box:
    {} reset({}):
        {}
    {} put({}):
        '''Puts.

        Args:
            text: What.
        '''
        {}
    {} get_reward({}):
        {}
"""
_DEFS = st.sampled_from(["def", "def", "def", "async def", "@staticmethod\n    def", "@property\n    def"])
_does = st.one_of(
    _VALUES.map("return {}".format),
    _RAISED.map("raise {}".format),
    st.builds("{}; return 'x'".format, _ENDS),
    _WHOLES.map("return {}".format),
    st.sampled_from(["return None", "return 'x'", "return 'x' * 10**7", "print('x' * 10**6); return 'x'", "yield 1", "return b'\\xff'",
                     "__import__('time').sleep(9)", "return '\\ud800'", "return [{'type': 'image'}]", "self.x = self; return str(vars(self))"]),
)  # fmt: skip
_environments = st.builds(
    _CLASS.format, _DEFS, st.sampled_from(["self, **row", "self, **row", "self", "self, answer", "**row", "self, *, answer"]), _does,
    _DEFS, st.sampled_from(["self, text: str", "self, text: str", "self, text: 'list[dict[str, int]]' = ()", "self, text", "text: str"]), _does,
    _DEFS, st.sampled_from(["self", "self", "self, x", ""]), _does,
)  # fmt: skip


@pytest.mark.long
@examples(2, 60)
@given(
    source=_environments,
    columns=_columns,
    arguments=st.dictionaries(st.sampled_from(["text", "self", "x", ""]), anything),
)
def test_environment_files(folder: Path, source: str, columns: dict[str, Any], arguments: dict[str, Any]) -> None:
    (folder / "box.py").write_text(source, encoding="utf-8", errors="backslashreplace")
    row = {name: values[0] for name, values in columns.items()}
    began = time.monotonic()
    try:
        pool = EnvironmentPool(f"{folder}/box.py:Box", _TIMEOUT)
        (one, _), said = pool.begin([row, row], ["a", "b"])
        assert all(text is None or text.encode() is not None for text in said)
        for result in one.call([("put", arguments), ("none", {})], 100):
            assert len(result.content.encode()) < 1000
        verdict = one.reward()
    except FtcliError as error:
        hold_refusal(error)
    else:
        assert verdict is None or isinstance(verdict, FailedJudgement) or abs(verdict) <= 1e12
    assert time.monotonic() - began < 120, "it hangs"
