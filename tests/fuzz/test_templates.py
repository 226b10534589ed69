"""Chat templates that somebody else has written: rendered, or refused by row, in bounded time and memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcli.assets import asset
from tests.fuzz import recipes, rows
from tests.fuzz.budget import examples
from tests.fuzz.contract import hold, run

_NAMES = st.sampled_from(
    ["messages", "message", "m", "n.x", "tools", "bos_token", "add_generation_prompt", "loop", "nothing"]
)
_LITERALS = st.sampled_from(
    ["0", "1", "-1", "7", "99999", "9" * 9, "9" * 20, "1.5", "1e308", "'a'", "''", "[]", "[1]", "{}", "none", "true"]
)
_BINARY = st.sampled_from(["+", "-", "*", "/", "//", "%", "**", "~", "and", "or", "==", "<", "in", "is sameas"])
_FILTERS = st.sampled_from(
    ["length", "tojson", "join('x')", "center(999999999)", "indent(9999)", "list", "sort", "string", "trim", "upper", "first", "last", "int", "float", "abs", "batch(0)", "batch(999999999)", "slice(0)", "replace('','aa')", "format(1)", "map('upper')", "selectattr('role')", "groupby('role')", "random", "round", "wordwrap(0)", "urlize", "tojson(indent=99999999)", "pprint", "sum", "unique", "xmlattr", "items", "dictsort", "truncate(-5)", "attr('__class__')"]
)  # fmt: skip
_TAILS = st.sampled_from(
    [".role", ".content", "['content']", "[0]", "[-1]", "[1:]", "[::0]", ".__class__", ".format(1)", ".split('')", ".items()", "()",
     ".encode('x')", ".ljust(999999999)", ".zfill(99999999)", ".expandtabs(99999999)", ".replace('', 'aaaa')", "['x']"]
)  # fmt: skip
_CALLS = st.sampled_from(
    ["range(99999)", "range(9999999999)", "range(0, 9, 0)", "lipsum(n=999)", "raise_exception('no')", "strftime_now('%Y')",
     "strftime_now(1)", "namespace(x=1)", "dict(a=1)", "cycler()", "joiner()", "m()", "caller()"]
)  # fmt: skip

_expressions = st.recursive(
    _NAMES | _LITERALS | _CALLS,
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, _BINARY, inner),
        st.builds("{} | {}".format, inner, _FILTERS),
        st.builds("{}{}".format, inner, _TAILS),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("not {}".format, inner),
    ),
    max_leaves=6,
)
_statements = st.recursive(
    st.builds("{{{{ {} }}}}".format, _expressions)
    | st.builds("{{% set n.x = {} %}}".format, _expressions)
    | st.builds("{{% set m = {} %}}".format, _expressions)
    | st.sampled_from(
        ["text", "<end_of_turn>", "{{", "{% endfor %}", "{# x", "{% break %}", "{% include 'x' %}", "{% raw %}"]
    )
    | st.just("{% set n.x = n.x ~ n.x %}")
    | st.just("{{ m.role }}: {{ m.content }}"),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("{{% for m in {} %}}{}{{% endfor %}}".format, _expressions, inner),
        st.builds("{{% for m in messages %}}{}{{% endfor %}}".format, inner),
        st.builds("{{% for m in range(99999) %}}{}{{% endfor %}}".format, inner),
        st.builds("{{% if {} %}}{}{{% endif %}}".format, _expressions, inner),
        st.builds("{{% macro m() %}}{}{{% endmacro %}}{{{{ m() }}}}".format, inner),
        st.builds("{{% generation %}}{}{{% endgeneration %}}".format, inner),
    ),
    max_leaves=5,
)
_templates = _statements.map("{{% set n = namespace(x='ab') %}}{}".format)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A working directory with rows, once everything is imported."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "rows.jsonl").write_bytes(rows.lines([{"messages": rows.GOOD[1]["messages"]}, rows.GOOD[2]]))
        data = {"train": ["rows.jsonl"], "max_seq_len": 512, "chat_template": "t.jinja"}
        (root / "r.yaml").write_bytes(recipes.written({**recipes.TRAINS, "data": data}))
        (root / "t.jinja").write_text("{{ messages }}")
        assert run(root, "check", "r.yaml", "--offline", "--show-sample", "1").status in (0, 4)
        yield root


@examples(8)
@given(template=_templates)
def test_templates(folder: Path, template: str) -> None:
    (folder / "t.jinja").write_text(template, encoding="utf-8", errors="surrogatepass")
    hold(run(folder, "check", "r.yaml", "--json", "--offline", "--show-sample", "3"))


_BUNDLED = tuple(path.read_bytes() for path in sorted(asset("templates").glob("*.jinja")))


@examples(8)
@given(data=st.data(), template=st.sampled_from(_BUNDLED))
def test_templates_with_something_done_to_them(folder: Path, data: st.DataObject, template: bytes) -> None:
    (folder / "t.jinja").write_bytes(data.draw(rows.damaged(template), label="template"))
    hold(run(folder, "check", "r.yaml", "--json", "--offline", "--show-sample", "3"))
