"""Layout of generation: what fits, and which models the engine takes."""

from __future__ import annotations

import json
import math

import pytest

from ftcli.facts.config_file import bundled_configs
from ftcli.facts.generation import (
    BUCKETS,
    CacheShape,
    EngineLayout,
    bucket_of,
    cache_bytes,
    cache_shape,
    choose_layout,
    pages_of,
    slots_of,
    why_no_engine,
)
from ftcli.facts.shape import shape_of
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
        (None, 10**15, EngineLayout(8, 26, False)),
        (100, None, EngineLayout(8, 26, False)),
        (100, 60, EngineLayout(8, 26, True)),
        (100, 70, EngineLayout(8, 26, False)),
        (20, None, EngineLayout(5, 18, False)),
        (6, None, EngineLayout(1, 5, False)),
        (5, None, None),
    ],
)
def test_rows_and_copy_fit_the_room(pages: int | None, copy: int | None, expected: EngineLayout | None) -> None:
    """Sizes in pages; a tenth of the room is left alone."""
    room = None if pages is None else pages * SHAPE.page_bytes
    bytes_of_copy = None if copy is None else copy * SHAPE.page_bytes
    assert choose_layout(SHAPE, 8, 3 * 64, room_bytes=room, copy_bytes=bytes_of_copy) == expected


@pytest.mark.parametrize(
    ("pages", "copy", "expected"),
    [
        (None, None, EngineLayout(8, 2 + 3 * 28, False)),
        (100, None, EngineLayout(8, 2 + 3 * 28, False)),
        (60, None, EngineLayout(8, 54, False)),
        (100, 60, EngineLayout(8, 30, True)),
        (20, None, EngineLayout(5, 18, False)),
    ],
)
def test_pages_for_sequences_that_wait_come_last(pages: int | None, copy: int | None, expected: EngineLayout) -> None:
    room = None if pages is None else pages * SHAPE.page_bytes
    bytes_of_copy = None if copy is None else copy * SHAPE.page_bytes
    found = choose_layout(SHAPE, 8, 3 * 64, room_bytes=room, copy_bytes=bytes_of_copy, waiting=20)
    assert found == expected


#: Qwen3.5-9B's, of which every fourth layer attends.
QWEN = {
    "model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288,
    "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
}  # fmt: skip


def test_only_layers_that_attend_have_pages_and_the_others_a_state_a_row() -> None:
    described = shape_of(QWEN)
    assert described is not None
    shape = cache_shape(described, 2)
    assert shape.page_bytes == 8 * 2 * 4 * 256 * 2 * 64
    assert shape.state_bytes == 24 * 4 * (3 * 8192 + 32 * 128 * 128)
    assert shape.places[:9] == (0, 1, 2, 0, 3, 4, 5, 1, 6)
    assert [slots_of(shape, rows) for rows in (0, 64)] == [1, 65]
    pages = 64 * 10 + 2
    held = pages * shape.page_bytes + 65 * shape.state_bytes
    assert cache_bytes(shape, 64, 600) == int(held / 0.9)
    assert choose_layout(shape, 64, 600, room_bytes=None, copy_bytes=None) == EngineLayout(64, pages, False)
    for room, rows in ((held, 64), (held - 1, 63), (2 * shape.state_bytes + 12 * shape.page_bytes, 1)):
        found = choose_layout(shape, 64, 600, room_bytes=math.ceil(room / 0.9), copy_bytes=None)
        assert found is not None
        assert found.rows == rows
        assert found.pages * shape.page_bytes + slots_of(shape, rows) * shape.state_bytes <= room
    assert choose_layout(shape, 64, 600, room_bytes=2 * shape.state_bytes, copy_bytes=None) is None
    plain = cache_shape(described.by_kind[1], 2)  # its layers that attend
    assert (plain.state_bytes, plain.places, slots_of(plain, 64)) == (0, (), 0)


def test_layers_with_other_heads_have_pages_of_their_own_and_those_that_share_keys_none() -> None:
    folder, _ = bundled_configs()["google/gemma-4-E4B-it"]
    described = shape_of(json.loads((folder / "config.json").read_text()))
    assert described is not None
    shape = cache_shape(described, 2)
    assert shape.heads == ((20, 2, 256), (4, 2, 512))
    assert shape.page_bytes == 2 * (20 * 2 * 256 + 4 * 2 * 512) * 2 * 64
    assert shape.widest_head == 512
    assert (shape.pools[:6], shape.places[:6]) == ((0, 0, 0, 0, 0, 1), (0, 1, 2, 3, 4, 0))
    assert set(zip(shape.pools[24:], shape.places[24:], strict=True)) == {(0, 19), (1, 3)}


def test_a_model_without_attention_has_no_pages() -> None:
    described = shape_of({**QWEN, "layer_types": ["linear_attention"] * 32})
    assert described is not None
    shape = cache_shape(described, 2)
    assert choose_layout(shape, 4, 600, room_bytes=10 * shape.state_bytes, copy_bytes=None) == EngineLayout(
        4, 42, False
    )


def test_models_whose_rows_would_meet_are_left_to_transformers() -> None:
    llama, stablelm = families.TABLE["llama"], families.TABLE["stablelm"]
    known = {"model_type": "llama", "rope_parameters": {"rope_type": "llama3"}}
    assert why_no_engine(known, llama, on_kernels=False) is None
    assert "mamba" in str(why_no_engine({"model_type": "mamba"}, None, on_kernels=False))
    assert "no cache of ours" in str(why_no_engine({"model_type": "stablelm"}, stablelm, on_kernels=False))
    assert why_no_engine({"model_type": "stablelm"}, stablelm, on_kernels=True) is None
    qwen = families.TABLE["qwen3_5_text"]
    assert "no states of ours" in str(why_no_engine(QWEN, qwen, on_kernels=False))
    assert why_no_engine(QWEN, qwen, on_kernels=True) is None
    for rope in ({"rope_type": "dynamic"}, {"type": "longrope"}, {"full_attention": {"rope_type": "dynamic"}}):
        assert "longest row" in str(why_no_engine({"rope_parameters": rope}, llama, on_kernels=True))
    for odd in (["dynamic"], "dynamic", 3, {"rope_type": ["dynamic"]}):
        assert why_no_engine({"rope_parameters": odd}, llama, on_kernels=True) is None
