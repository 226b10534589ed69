"""Export formats: what ``export.formats`` may name, and the code that writes each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ftcli.tables import Package


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """What the rest of the program has to know of a format.

    Attributes:
        write: Code (``ftcli.export.writing.WriteFormat``) that writes an export and loads it again to verify it; None
            for a format that recipes may name and that is not supported yet.
        needs_adapter: It holds an adapter, so a full fine-tune has nothing for it.
        merges: It adds a run's adapter to the base model, which must be there in full precision.
        whole: It holds the whole model in memory; others hold a weight or a layer at a time.
        llama_cpp: llama.cpp serves it, which does not build every family.
        masters: It can hold a model whose weights are rounded in every product: as masters that say so, or rounded.
            Others would hold the masters as plain weights, which are another model.
        of_quantized: Methods of ``quantization`` that it is for alone; empty: it is for every model.
        package: What it needs beside ftcli.
        size: Code: a function of the :class:`ftcli.export.source.ExportSource` and of ``offline`` that answers how
            many bytes it takes on disk; None where that is not known before it is written.
        serves: Code: a function of the tokenizer, its stop tokens and the size of the vocabulary that raises FtcliError
            where the format cannot hold them; None where it holds all.
    """

    write: str | None = None
    needs_adapter: bool = False
    merges: bool = False
    whole: bool = False
    llama_cpp: bool = False
    masters: bool = False
    of_quantized: tuple[str, ...] = ()
    package: Package | None = None
    size: str | None = None
    serves: str | None = None

    @property
    def supported(self) -> bool:
        """Whether this version writes it."""
        return self.write is not None


_FP8 = Package("compressed_tensors", "ftcli[fp8]", "export to fp8")
_GGUF = Package("gguf", "ftcli[gguf]", "export to GGUF")

TABLE: Mapping[str, ExportFormat] = MappingProxyType(
    {
        "adapter": ExportFormat(
            "ftcli.export.adapter:write", needs_adapter=True, masters=True, size="ftcli.export.adapter:adapter_bytes"
        ),
        "safetensors": ExportFormat(
            "ftcli.export.safetensors:write", merges=True, masters=True, size="ftcli.export.safetensors:model_bytes"
        ),
        "gguf": ExportFormat(
            "ftcli.export.gguf.write:write",
            merges=True,
            llama_cpp=True,
            masters=True,
            package=_GGUF,
            size="ftcli.export.gguf.write:gguf_bytes",
            serves="ftcli.export.gguf.vocabulary:vocabulary_of",
        ),
        "ollama": ExportFormat(
            "ftcli.export.ollama:write",
            merges=True,
            llama_cpp=True,
            masters=True,
            package=_GGUF,
            size="ftcli.export.gguf.write:ollama_bytes",
            serves="ftcli.export.ollama:require_served",
        ),
        "bitnet": ExportFormat(
            "ftcli.export.bitnet:write",
            merges=True,
            whole=True,
            masters=True,
            of_quantized=("bitnet",),
            size="ftcli.export.bitnet:bitnet_bytes",
        ),
        "fp8": ExportFormat(
            "ftcli.export.fp8:write", merges=True, package=_FP8, size="ftcli.export.safetensors:model_bytes"
        ),
    }
)


def names() -> tuple[str, ...]:
    """What a recipe may say."""
    return tuple(TABLE)


def row(name: str) -> ExportFormat:
    """The row of a format that a recipe names."""
    return TABLE[name]


def of_masters() -> tuple[str, ...]:
    """Formats of this version for a whole model whose weights are rounded in every product."""
    return tuple(name for name in supported(needs_adapter=False) if TABLE[name].masters)


def supported(*, needs_adapter: bool | None = None, merges: bool | None = None) -> tuple[str, ...]:
    """Formats that this version writes; with an argument only those whose attribute has this value."""
    return tuple(
        name
        for name, each in TABLE.items()
        if each.supported and needs_adapter in (None, each.needs_adapter) and merges in (None, each.merges)
    )
