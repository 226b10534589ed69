"""How many bytes GGUF files will take."""

from __future__ import annotations

from collections.abc import Sequence

from ftcli.export.gguf.file import stored_bytes, type_of
from ftcli.export.resolve import ExportSource
from ftcli.export.room import stored_names
from ftcli.export.weights import base_weights
from ftcli.tables.gguf import TYPES

#: llama-quantize mixes K-quants: none of its files has more bits for a weight than this.
_MOST = "Q6_K"
#: The vocabulary and the header.
_BESIDE = 16 << 20


def gguf_bytes(source: ExportSource, *, offline: bool) -> int:
    """Bytes of all types of ``export.gguf.types``, and of the file that the K-quants are made of."""
    return _bytes(source, source.settings.gguf.types, offline=offline)


def ollama_bytes(source: ExportSource, *, offline: bool) -> int:
    """Bytes of the first type."""
    return _bytes(source, source.settings.gguf.types[:1], offline=offline)


def _bytes(source: ExportSource, types: Sequence[str], *, offline: bool) -> int:
    base = base_weights(source, offline=offline)
    embedding, head = base.ends
    places = {embedding: "token_embd.weight", head: "output.weight"}
    shapes = [(places.get(name, ""), base.shape(name)) for name in stored_names(source, base)]

    def plain(kind: str) -> int:
        return _BESIDE + sum(stored_bytes(shape, type_of(stored, shape, kind)) for stored, shape in shapes)

    mixed = _BESIDE + sum(stored_bytes(shape, _MOST if len(shape) > 1 else "F32") for _, shape in shapes)
    files = sum(mixed if TYPES[kind].quantized_by else plain(kind) for kind in types)
    return files + max(
        (plain(TYPES[kind].quantized_by or kind) for kind in types if TYPES[kind].quantized_by), default=0
    )
