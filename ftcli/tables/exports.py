"""Export formats: what ``export.formats`` may name, and the code that writes each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ftcli.tables import Package


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """One export format.

    Attributes:
        write: Code (``ftcli.export.writing.WriteFormat``) that writes an export and loads it again to verify it.
        needs_adapter: It holds an adapter, so a full fine-tune has nothing for it.
        merges: It adds a run's adapter to the base model, which must be there in full precision.
        whole: It holds the whole model in memory; others hold a weight or a layer at a time.
        llama_cpp: llama.cpp serves it, which does not build every family.
        scores: It can hold a model that scores rows in place of answering.
        masters: It can hold a model whose weights are rounded in every product: as masters that say so, or rounded.
            Others would hold the masters as plain weights, which are another model.
        linear_only: It rounds linear layers, and has no place for stacks of experts.
        further: It holds what transformers passes over in the base's files, for programs that look for it.
        of_quantized: Methods of ``quantization`` that it is for alone; empty: it is for every model.
        size: Code: a function of the :class:`ftcli.export.source.ExportSource` that answers how many bytes it takes on
            disk; None where that is not known before it is written.
        serves: Code: a function of the tokenizer, its stop tokens and the size of the vocabulary that raises FtcliError
            where the format cannot hold them; None where it holds all.
    """

    write: str
    needs_adapter: bool = False
    merges: bool = False
    whole: bool = False
    llama_cpp: bool = False
    masters: bool = False
    scores: bool = False
    linear_only: bool = False
    further: bool = False
    of_quantized: tuple[str, ...] = ()
    package: Package | None = None
    size: str | None = None
    serves: str | None = None


_COMPRESSED = Package("compressed_tensors", "ftcli[fp8]", "export to a few bits")
_GGUF = Package("gguf", "ftcli[gguf]", "export to GGUF")


def _rounded(write: str) -> ExportFormat:
    """A format of compressed-tensors' layout, by the function of ``ftcli.export`` that writes it."""
    return ExportFormat(
        f"ftcli.export.{write}",
        merges=True,
        linear_only=True,
        further=True,
        package=_COMPRESSED,
        size="ftcli.export.safetensors:model_bytes",
    )


TABLE: Mapping[str, ExportFormat] = {
    "adapter": ExportFormat(
        "ftcli.export.adapter:write",
        needs_adapter=True,
        masters=True,
        scores=True,
        size="ftcli.export.adapter:adapter_bytes",
    ),
    "safetensors": ExportFormat(
        "ftcli.export.safetensors:write",
        merges=True,
        masters=True,
        scores=True,
        further=True,
        size="ftcli.export.safetensors:model_bytes",
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
    "fp8": _rounded("floats:write_fp8"),
    "fp8_static": _rounded("floats:write_fp8_static"),
    "w8a8": _rounded("integers:write_w8a8"),
    "w4a16": _rounded("integers:write_w4a16"),
    "gptq": _rounded("integers:write_gptq"),
    "awq": _rounded("integers:write_awq"),
    "nvfp4": _rounded("floats:write_nvfp4"),
    "mxfp4": _rounded("floats:write_mxfp4"),
}


@dataclass(frozen=True, slots=True)
class AdapterServer:
    """A program that serves adapters beside their base, by its rules of names and config.

    Attributes:
        ignored: Keys of adapter_config.json that it passes over, though they say other scales.
        scale: Which scale it takes then.
        ranks: What it can be told to make room for; empty: any.
        usual_rank: Up to which rank it need not be told.
        expressions: It reads ``target_modules`` that are an expression, too.
    """

    name: str
    ignored: tuple[str, ...]
    scale: str
    ranks: tuple[int, ...] = ()
    usual_rank: int = 0
    expressions: bool = True


#: vLLM's rules are those of ``PEFTHelper`` and ``parse_fine_tuned_lora_name`` in its ``vllm/lora``, SGLang's those of
#: ``LoRAConfig`` and ``LoRAAdapter`` in its ``srt/lora``, llama.cpp's those of ``convert_lora_to_gguf.py``; all read in
#: 2026.
ADAPTER_SERVERS = (
    AdapterServer(
        "vLLM",
        ("rank_pattern", "alpha_pattern"),
        "it has one scale for all layers, and alpha_pattern or rank_pattern say several",
        ranks=(8, 16, 32, 64, 128, 256, 320, 512),
        usual_rank=16,
    ),
    AdapterServer(
        "SGLang",
        ("use_rslora", "rank_pattern", "alpha_pattern"),
        "it knows one scale, alpha / rank",
        expressions=False,
    ),
    AdapterServer(
        "llama.cpp",
        ("use_rslora", "alpha_pattern"),
        "its converter knows one scale, alpha / rank (export.gguf.lora_adapter writes the right one)",
    ),
)


def row(name: str) -> ExportFormat:
    return TABLE[name]


def names(*, needs_adapter: bool | None = None, merges: bool | None = None) -> tuple[str, ...]:
    """Values of ``export.formats``; with an argument only formats whose attribute has this value."""
    return tuple(
        name
        for name, each in TABLE.items()
        if needs_adapter in (None, each.needs_adapter) and merges in (None, each.merges)
    )


def of_masters() -> tuple[str, ...]:
    """Formats for a whole model whose weights are rounded in every product."""
    return tuple(name for name in names(needs_adapter=False) if TABLE[name].masters)


def gguf_types(formats: Collection[str], types: Sequence[str]) -> Sequence[str]:
    """The types of the GGUF files that formats are made of: Ollama's is the first."""
    return types if "gguf" in formats else types[: int("ollama" in formats)]
