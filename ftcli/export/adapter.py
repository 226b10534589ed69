"""Copies an adapter in PEFT's own layout, and compares the copy with its source bit for bit."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
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
from ftcli.tables import exports
from ftcli.tables.exports import AdapterServer

#: What a trainer may leave beside its result and what nobody needs to load it.
_LEFT_OUT = (".bin", ".pt", ".pth", ".pkl")
_PAIR = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")


def write(source: ExportSource, folder: Path, say: Callable[[str], None]) -> Verified:
    """Write the adapter into ``folder`` and verify it. ``say`` is not used: this takes no time.

    Raises:
        FtcliError: FT321, FT322 or FT424 for the tokenizer; otherwise as :func:`verify_adapter`.
        OSError: it cannot be written.
    """
    copy_adapter(source, folder)
    return verify_adapter(source, folder) if source.verify else not_asked()


def copy_adapter(source: ExportSource, folder: Path) -> None:
    """Copy the adapter and save its tokenizer, with the chat template of training, beside it.

    Raises:
        FtcliError: FT321, FT322 or FT424 for the tokenizer.
        OSError: it cannot be written.
    """
    for path in sorted(source.folder.iterdir()):
        wanted = path.is_file() and path.suffix not in _LEFT_OUT and not path.name.startswith(".")
        if wanted and path.name not in PROGRESS and not _is_blank_card(path):
            shutil.copyfile(path, folder / path.name)
    source_tokenizer(source).save_pretrained(str(folder))


def _is_blank_card(path: Path) -> bool:
    """PEFT leaves a model card of placeholders; one that somebody has filled in is kept."""
    return path.name == "README.md" and "[More Information Needed]" in path.read_text(
        encoding="utf-8", errors="replace"
    )


def verify_adapter(source: ExportSource, folder: Path) -> Verified:
    """Load the copy with plain PEFT into a model of the base's shape; every tensor must equal the source's file.

    Raises:
        FtcliError: FT741 when anything differs, FT742 when the source itself is damaged, FT30x when the base's
            config cannot be found, FT760 where it cannot be loaded again.
    """
    wanted = finite_tensors(source.folder)
    with with_its_vocabulary(source) as plain, tempfile.TemporaryDirectory(prefix="ftcli-") as config:
        based = source_config(plain)
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
    problems += compare_tokenizers(answer.tokenizer, source_tokenizer(source))
    stated = read_adapter_config(folder)
    if stated != read_adapter_config(source.folder):
        problems.append("adapter_config.json differs")
    if problems:
        raise not_verified(folder, problems)
    said = {server.name: judged(server, stated, wanted) for server in exports.ADAPTER_SERVERS}
    return Verified(
        "every tensor, bit for bit, tokenizer",
        {"tensors": len(wanted), **{name: told for name, (told, _) in said.items()}, **reloaded(answer)},
        tuple(finding for _, findings in said.values() for finding in findings),
    )


def judged(server: AdapterServer, config: JsonMap, names: Iterable[str]) -> tuple[str, list[Finding]]:
    """The verdict of a program's rules on an adapter, for the record; and FT757 if it does not take it.

    Args:
        config, names: Of the adapter: adapter_config.json, and its tensors.
    """
    problems = _beside_pairs(config, names)
    problems += [server.scale] if any(config.get(key) for key in server.ignored) else []
    rank = max((int(config["r"]), *(config.get("rank_pattern") or {}).values()))
    room = next((size for size in server.ranks if size >= rank), 0)
    if server.ranks and not room:
        problems.append(f"its ranks end at {server.ranks[-1]}, and this is {rank}")
    option = f" with --max-lora-rank {room}" if room > server.usual_rank else ""
    reasons = "; ".join(problems)
    told = f"does not take it: {reasons}" if problems else "takes it"
    warning = f"{server.name} does not take this adapter as it is: {reasons}"
    findings = [Finding("FT757", warning, help="serve the merged model instead", severity="warning")]
    return f"{told}{option} (by names and config; not run)", findings if problems else []


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


def adapter_bytes(source: ExportSource) -> int:
    """Bytes on disk of the format ``adapter``."""
    return sum(path.stat().st_size for path in source.folder.iterdir() if path.is_file())
