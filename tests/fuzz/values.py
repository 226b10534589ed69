"""Values that are at the edge of something, for recipes, rows and configs."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

#: Text that means something to YAML, to paths, to terminals, to regular expressions or to encodings.
WORDS = (
    "", " ", "~", "~nouser", "~root/x", ".", "..", "/", "//", "/dev/null", "/dev/zero", "/proc/self/mem", "/nonexistent/x",
    "../../..", "folder", "fifo", "loop", "dangling", "empty", "a/b", "a/b/c", "hub:a/b", "hub:", "bundled:", "bundled:x",
    "bundled:../x", "bundled:smoke-train", "bundled:tiny-gemma2", "x.jsonl", "x.jsonl.gz", "x.parquet", "x.yaml", "x.py:f",
    "x.py", ":f", "x.py:", "null", "true", "no", "1", "1e9", "-1", "0x10", "nan", ".nan", ".inf", "-.inf", "1e999", "1_000",
    "auto", "never", "none", "best", "a" * 300, "a" * 5000, "x/" * 2000, "(" * 200, "(a+)+$", "(([a-z_.0-9]+)+)+!", "[", "\\", "%s", "{}", "{{",
    "{% for %}", "$HOME", "`id`", "\t", "\n", "a\nb", "\x7f", "\x1b[31m", "\u202e", "\ufeff", "\u2028", "é", "𝔘", "名前",
    "hf_" + "a" * 34, "AKIA" + "A" * 16, "-", "--", "--set", "=", "a=b", "a.b=c", "'", '"', "#", "&a", "*a", "!!int 3", "<<",
    "CON", "C:\\x", "a b", "a,b", "a;b", "a:b", "@", "?",
)  # fmt: skip

NUMBERS = (
    0, 1, -1, 2, 3, 7, 8, 16, 31, 32, 64, 127, 128, 255, 256, 1000, 4096, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**53,
    2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**9, 10**9 + 1, 10**18, 10**23, 10**400, -(2**31), -(2**63), -(2**64),
)  # fmt: skip

FLOATS = (
    0.0, -0.0, 0.5, 1.0, -1.0, 0.999999, 1.0000001, 1e-8, 1e-30, 5e-324, 1e-4, 2.5, 10.5, 1e6, 1e15, 1e30, 1e308,
    -1e308, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip

#: Any text, halves of surrogate pairs among it.
anything = st.text(st.characters(codec=None, exclude_categories=()), max_size=20)
text = st.sampled_from(WORDS) | st.text(max_size=20)
numbers = st.sampled_from(NUMBERS) | st.sampled_from(FLOATS) | st.integers(-10, 300) | st.floats(allow_nan=False)
scalars = st.none() | st.booleans() | numbers | text


def nested(leaves: st.SearchStrategy[Any], size: int = 3) -> st.SearchStrategy[Any]:
    """Values of JSON's kinds."""
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=size) | st.dictionaries(text, inner, max_size=size), max_leaves=6
    )


json_values = nested(st.none() | st.booleans() | numbers | st.sampled_from(WORDS) | anything)


def deep(depth: int) -> Any:
    """A list in a list, ``depth`` levels."""
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value
