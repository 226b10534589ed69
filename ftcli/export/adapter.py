"""Copies an adapter in PEFT's own layout, and compares the copy with its source bit for bit."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ftcli.errors import Finding
from ftcli.export.clean.request import TENSOR, ReloadRequest
from ftcli.export.embeddings import with_its_vocabulary
from ftcli.export.probe import TEXTS
from ftcli.export.source import ExportSource, attach, not_verified, read_adapter_config, source_tokenizer, unwritten
from ftcli.export.tensorfile import finite_tensors
from ftcli.export.verify import Verified, compare_tensors, compare_tokenizers, not_asked, reloaded
from ftcli.export.weights import source_config
from ftcli.plain import JsonMap
from ftcli.run.checkpoint import PROGRESS

#: What a trainer may leave beside its result and what nobody needs to load it.
_LEFT_OUT = (".bin", ".pt", ".pth", ".pkl")


def write(source: ExportSource, folder: Path, *, offline: bool, say: Callable[[str], None]) -> Verified:
    """Write the adapter into ``folder`` and verify it. ``say`` is not used: this takes no time.

    Raises:
        FtcliError: FT321, FT322 or FT424 for the tokenizer; otherwise as :func:`verify_adapter`.
        OSError: it cannot be written.
    """
    copy_adapter(source, folder, offline=offline)
    return verify_adapter(source, folder, offline=offline) if source.verify else not_asked()


def copy_adapter(source: ExportSource, folder: Path, *, offline: bool) -> None:
    """Copy the adapter and save its tokenizer, with the chat template of training, beside it.

    Raises:
        FtcliError: FT321, FT322 or FT424 for the tokenizer.
        OSError: it cannot be written.
    """
    for path in sorted(source.folder.iterdir()):
        wanted = path.is_file() and path.suffix not in _LEFT_OUT and not path.name.startswith(".")
        if wanted and path.name not in PROGRESS and not _is_blank_card(path):
            shutil.copyfile(path, folder / path.name)
    source_tokenizer(source, offline=offline).save_pretrained(str(folder))


def _is_blank_card(path: Path) -> bool:
    """PEFT leaves a model card of placeholders; one that somebody has filled in is kept."""
    return path.name == "README.md" and "[More Information Needed]" in path.read_text(
        encoding="utf-8", errors="replace"
    )


def verify_adapter(source: ExportSource, folder: Path, *, offline: bool) -> Verified:
    """Load the copy with plain PEFT into a model of the base's shape; every tensor must equal the source's file.

    Raises:
        FtcliError: FT741 when anything differs, FT742 when the source itself is damaged, FT30x when the base's
            config cannot be found, FT760 where it cannot be loaded again.
    """
    wanted = finite_tensors(source.folder)
    with with_its_vocabulary(source, offline=offline) as plain, tempfile.TemporaryDirectory(prefix="ftcli-") as config:
        based = source_config(plain, offline=offline)
        attach(unwritten(based), plain.folder)  # what does not fit its base is no fault of the copy
        based.save_pretrained(config)
        asked = ReloadRequest("adapter", str(folder), config=config, texts=TEXTS, embeddings=plain is not source)
        answer = source.reload(asked, {})
    # PEFT holds them in the base's float32, which every stored dtype fits into: going back to it loses nothing.
    loaded = {name.removeprefix(TENSOR): tensor for name, tensor in answer.tensors.items() if name.startswith(TENSOR)}
    if asked.embeddings:  # PEFT then tells the base's, too, whether the adapter brings them or not
        loaded = {name: tensor for name, tensor in loaded.items() if name in wanted}
    found = {name: tensor.to(wanted[name].dtype) if name in wanted else tensor for name, tensor in loaded.items()}
    problems = list(answer.problems) or compare_tensors(found, wanted)
    problems += compare_tokenizers(answer.tokenizer, source_tokenizer(source, offline=offline))
    stated = read_adapter_config(folder)
    if stated != read_adapter_config(source.folder):
        problems.append("adapter_config.json differs")
    if problems:
        raise not_verified(folder, problems)
    servers = (vllm(stated, wanted), llama_cpp_server(stated, wanted))
    return Verified(
        "every tensor, bit for bit, tokenizer",
        {"tensors": len(wanted), **{server.name: server.said for server in servers}, **reloaded(answer)},
        tuple(warning for server in servers for warning in server.warning),
    )


_PAIR = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")
#: What vLLM's ``--max-lora-rank`` may be, and what it is where nobody says.
_VLLM_RANKS, _VLLM_RANK = (8, 16, 32, 64, 128, 256, 320, 512), 16


@dataclass(frozen=True, slots=True)
class Server:
    """What a program makes of an adapter.

    Attributes:
        name: The program's.
        problems: Why it refuses the adapter, or computes something else.
        options: What it has to be told.
    """

    name: str
    problems: tuple[str, ...]
    options: str = ""

    @property
    def said(self) -> str:
        """For the record: what the rules say, and that they were not tried."""
        told = f"does not take it: {'; '.join(self.problems)}" if self.problems else "takes it"
        return f"{told}{f' with {self.options}' if self.options else ''} (by names and config; not run)"

    @property
    def warning(self) -> tuple[Finding, ...]:
        """FT757 where the adapter is not what it takes."""
        if not self.problems:
            return ()
        message = f"{self.name} does not take this adapter as it is: {'; '.join(self.problems)}"
        return (Finding("FT757", message, help="serve the merged model instead", severity="warning"),)


def vllm(config: JsonMap, names: Iterable[str]) -> Server:
    """vLLM's ``--lora-modules``."""
    problems = _beside_pairs(config, names)
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        problems.append("it has one scale for all layers, and alpha_pattern or rank_pattern say several")
    rank = max((int(config["r"]), *(config.get("rank_pattern") or {}).values()))
    allowed = next((size for size in _VLLM_RANKS if size >= rank), None)
    if allowed is None:
        problems.append(f"its ranks end at {_VLLM_RANKS[-1]}, and this is {rank}")
        return Server("vLLM", tuple(problems))
    return Server("vLLM", tuple(problems), f"--max-lora-rank {allowed}" if allowed > _VLLM_RANK else "")


def llama_cpp_server(config: JsonMap, names: Iterable[str]) -> Server:
    """llama.cpp's ``convert_lora_to_gguf.py``; ftcli's own file (``export.gguf.lora_adapter``) has the right scales."""
    problems = _beside_pairs(config, names)
    if config.get("use_rslora") or config.get("alpha_pattern"):
        problems.append("its converter knows one scale, alpha / rank (export.gguf.lora_adapter writes the right one)")
    return Server("llama.cpp", tuple(problems))


def _beside_pairs(config: JsonMap, names: Iterable[str]) -> list[str]:
    problems = ["it has DoRA's lengths"] if config.get("use_dora") else []
    other = [name for name in names if not _PAIR.fullmatch(name) and not name.endswith("lora_magnitude_vector")]
    if config.get("modules_to_save"):
        problems.append(f"modules were trained whole ({', '.join(config['modules_to_save'])})")
    elif other:
        problems.append(f"{other[0]} is not the pair of matrices of a linear layer")
    if config.get("target_parameters"):
        problems.append("experts are adapted as stacks")
    return problems


def adapter_bytes(source: ExportSource, *, offline: bool) -> int:
    """Bytes on disk of the format ``adapter``."""
    return sum(path.stat().st_size for path in source.folder.iterdir() if path.is_file())
