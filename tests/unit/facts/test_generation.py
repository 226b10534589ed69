"""Layout of generation: what fits, and which models the engine takes."""

from __future__ import annotations

import pytest

from ftcli.facts.generation import BUCKETS, CacheShape, EngineLayout, bucket_of, choose_layout, pages_of, why_no_engine
from ftcli.tables import families

SHAPE = CacheShape(layers=2, key_heads=2, head_dim=16, element_bytes=2)


def test_a_page_holds_keys_and_values_of_all_layers() -> None:
    assert SHAPE.page_bytes == 2 * 2 * 2 * 16 * 2 * 64
    assert [pages_of(tokens) for tokens in (1, 64, 65)] == [1, 1, 2]


def test_rows_come_in_few_sizes() -> None:
    assert [bucket_of(rows) for rows in (1, 3, 9, 64, 65, 128, 129, 300)] == [1, 4, 12, 64, 80, 128, 256, 384]
    assert list(BUCKETS) == sorted(BUCKETS)


@pytest.mark.parametrize(
    ("pages", "copy", "expected"),
    [
        (None, 10**15, EngineLayout(8, 25, False)),
        (100, None, EngineLayout(8, 25, False)),
        (100, 60, EngineLayout(8, 25, True)),
        (100, 70, EngineLayout(8, 25, False)),
        (20, None, EngineLayout(5, 18, False)),
        (5, None, EngineLayout(1, 4, False)),
        (4, None, None),
    ],
)
def test_rows_and_copy_fit_the_room(pages: int | None, copy: int | None, expected: EngineLayout | None) -> None:
    """Sizes in pages; a tenth of the room is left alone."""
    room = None if pages is None else pages * SHAPE.page_bytes
    bytes_of_copy = None if copy is None else copy * SHAPE.page_bytes
    assert choose_layout(SHAPE, 8, 3 * 64, room_bytes=room, copy_bytes=bytes_of_copy) == expected


def test_models_whose_rows_would_meet_are_left_to_transformers() -> None:
    llama, stablelm = families.TABLE["llama"], families.TABLE["stablelm"]
    known = {"model_type": "llama", "rope_parameters": {"rope_type": "llama3"}}
    assert why_no_engine(known, llama, on_kernels=False) is None
    assert "mamba" in str(why_no_engine({"model_type": "mamba"}, None, on_kernels=False))
    assert "no cache of ours" in str(why_no_engine({"model_type": "stablelm"}, stablelm, on_kernels=False))
    assert why_no_engine({"model_type": "stablelm"}, stablelm, on_kernels=True) is None
    for rope in ({"rope_type": "dynamic"}, {"type": "longrope"}, {"full_attention": {"rope_type": "dynamic"}}):
        assert "longest row" in str(why_no_engine({"rope_parameters": rope}, llama, on_kernels=True))
    for odd in (["dynamic"], "dynamic", 3, {"rope_type": ["dynamic"]}):
        assert why_no_engine({"rope_parameters": odd}, llama, on_kernels=True) is None
