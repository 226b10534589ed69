"""Recognises, by config.json alone, packed weights that are read into full precision. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from ftcli.plain import JsonMap
from ftcli.tables import code_of
from ftcli.tables.families import family_of
from ftcli.tables.released import TABLE, ReleasedForm

#: Rows and columns that share a scale; None: all of the matrix.
Block: TypeAlias = tuple[int | None, int | None]

_FLOAT_FORMATS = ("float-quantized", "naive-quantized")
_BLOCKS: Mapping[str, Block] = {"tensor": (None, None), "channel": (1, None)}


def released_form(config: JsonMap) -> tuple[ReleasedForm, str] | None:
    """The form that a config.json says its weights are stored in, and that in words; None for weights in full
    precision, and for forms without an exact reading.
    """
    form = TABLE.get(str(_stated(config).get("quant_method")))
    if form is None:
        return None
    words: Callable[[JsonMap], str | None] = code_of(form.words)
    found = words(config)
    return None if found is None else (form, found)


def mxfp4(config: JsonMap) -> str | None:
    """Experts in MXFP4, in stacks of a known layout (gpt-oss)."""
    family = family_of(str(config.get("model_type")))
    known = family is not None and family.experts is not None and family.experts.transposed
    return "MXFP4 (experts)" if known else None


def fp8(config: JsonMap) -> str | None:
    """Matrices in eight bits with a scale for each block, or for the whole (Qwen's, DeepSeek's, Mistral's files); not
    those that hold other matrices in four bits (``expert_dtype``).
    """
    if _stated(config).get("expert_dtype", "fp8") != "fp8":
        return None
    return _in_words(block_of(config))


def compressed_fp8(config: JsonMap) -> str | None:
    """The same in the layout of compressed-tensors, as vLLM's tools and ``export.formats: [fp8]`` write it; not
    rotated, sparse or of other types, nor where groups of layers differ.
    """
    stated = _stated(config)
    sparsity = stated.get("sparsity_config")
    sparse = isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense"
    if sparse or stated.get("transform_config") or stated.get("quantization_status", "compressed") != "compressed":
        return None
    return _in_words(block_of(config)) if stated.get("format") in _FLOAT_FORMATS else None


def block_of(config: JsonMap) -> Block | None:
    """The block that shares a scale in files in eight bits; None where config.json does not say it in a way that is
    known.
    """
    stated = _stated(config)
    if stated.get("quant_method") == "fp8":
        return _block(stated.get("weight_block_size", (128, 128)), whole=True)
    groups = stated.get("config_groups")
    found = {_of_group(group) for group in groups.values()} if isinstance(groups, Mapping) else set()
    return found.pop() if len(found) == 1 else None


def _of_group(group: Any) -> Block | None:
    """The same of a group of compressed-tensors' layers."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or group.get("format") not in (None, *_FLOAT_FORMATS):
        return None
    if (weights.get("type"), weights.get("num_bits"), weights.get("symmetric", True)) != ("float", 8, True):
        return None
    if weights.get("strategy") == "block":
        return _block(weights.get("block_structure"))
    return _BLOCKS.get(str(weights.get("strategy")))


def _block(value: Any, *, whole: bool = False) -> Block | None:
    if value is None and whole:
        return (None, None)
    sizes = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | Mapping) else ()
    if len(sizes) != 2 or not all(type(each) is int and each > 0 for each in sizes):
        return None
    return sizes


def _in_words(block: Block | None) -> str | None:
    if block is None:
        return None
    rows, columns = block
    if rows is None:
        return "fp8 (a scale for each matrix)"
    return "fp8 (a scale for each row)" if columns is None else f"fp8 (a scale for each {rows} x {columns})"


def _stated(config: JsonMap) -> JsonMap:
    """The quantization that a config.json states."""
    stated = config.get("quantization_config")
    return stated if isinstance(stated, Mapping) else {}
