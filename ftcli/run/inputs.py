"""Inputs of a run: fingerprints of training and held-out files, judges, chat template, token ids and base weights.

A run that continued on other inputs would give a model that neither the old nor the new inputs describe, so it is
refused, and the message says what differs. Everything is compared by content, never by date or path. Weight files may
be large: of them the SHA-256 of samples is taken, and a CRC-32 of every byte.
"""

from __future__ import annotations

import difflib
import hashlib
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from ftcli.config.model import ModelConfig
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.facts.adapters import start_folder
from ftcli.facts.device import free_host_bytes, usable_cores
from ftcli.facts.model import ModelFacts
from ftcli.facts.weights import WEIGHTS_INDEX
from ftcli.paths import samples_sha256
from ftcli.plain import JsonMap, JsonObject, map_in, maps, plain_fields

#: What a thread reads at a time, and what one CRC-32 is of.
_READ_BYTES, _PIECE_BYTES = 1 << 20, 1 << 26
_MOST_THREADS = 8


#: Answers with what has been read, or raises its error, once that is done.
WeightIdentities = Callable[[], "tuple[WeightFile, ...]"]


@dataclass(frozen=True, slots=True)
class WeightFile:
    """Identity of one weight file. ``samples_sha256``: of 64 samples of 64 KiB, spread over it (all of a file of 4 MiB
    and less); ``crc32``: of every byte, empty where it was not read whole, which tells accidents and no forgery.
    """

    name: str
    bytes: int
    samples_sha256: str
    crc32: str = ""


def weight_identities(folder: Path) -> tuple[WeightFile, ...]:
    """Identities of the weight files in a model's folder (:func:`begin`)."""
    return begin(folder)()


def begin(folder: Path) -> WeightIdentities:
    """Begins to read the weight files in a model's folder, by threads that work beside the caller.

    All bytes are read where the files fit into free memory: they come from it where they were just read, and stay in it
    for whoever reads them next. Else samples alone. The first sample holds the header, which lists every tensor with
    its shape. A process that ends does not wait for the threads. Raises OSError: there is a file that cannot be looked
    at; of one that cannot be read, the answer raises it.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))
    sizes = [file.stat().st_size for file in files]
    free = free_host_bytes()
    whole = files if free is not None and sum(sizes) <= free else []
    spans = [(file, range(0, max(size, 1), _PIECE_BYTES)) for file, size in zip(whole, sizes, strict=False)]
    pieces = [(file, offset) for file, offsets in spans for offset in offsets]
    threads = ThreadPool(min(_MOST_THREADS, usable_cores()))
    samples = threads.starmap_async(samples_sha256, zip(files, sizes, strict=True), 1)
    checksums = threads.map_async(_crc32, pieces, 1)
    threads.close()

    def answer() -> tuple[WeightFile, ...]:
        of_file: dict[Path, bytes] = {}
        for (file, _), value in zip(pieces, checksums.get(), strict=True):
            of_file[file] = of_file.get(file, b"") + value.to_bytes(4, "big")
        return tuple(
            WeightFile(file.name, size, digest, f"{zlib.crc32(of_file[file]):08x}" if file in of_file else "")
            for file, size, digest in zip(files, sizes, samples.get(), strict=True)
        )

    return answer


def _crc32(piece: tuple[Path, int]) -> int:
    """CRC-32 of the piece of a file that begins at an offset; reading and counting leave Python's lock to others."""
    path, offset = piece
    value, buffer = 0, bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        left = _PIECE_BYTES
        while left and (count := file.readinto(view[: min(left, _READ_BYTES)])):
            value = zlib.crc32(view[:count], value)
            left -= count
    return value


#: A data file is also hashed in about this many blocks, so that a change can be placed.
_BLOCKS = 256
_SMALLEST_BLOCK = 4096
#: Bytes of a block's digest that are kept: enough to place a change; the whole file's digest proves it.
_KEPT_DIGEST = 4
_DIFF_LINES = 12
#: What is read of a model beside its weights, and of a tokenizer.
_OF_MODEL = ("config.json", "generation_config.json", WEIGHTS_INDEX)
_OF_TOKENIZER = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model"),
    *("tekken.json", "*.tiktoken", "chat_template.*", "additional_chat_templates/*", "*processor_config.json"),
)
_REMEDY = "restore it to continue; or start over with --resume never, which keeps the old run beside it"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of one file: its name as the recipe gives it, its size, its content's SHA-256.

    ``blocks`` are the beginnings of the SHA-256 of each ``block_bytes`` bytes, in hexadecimal, one after another.
    """

    name: str
    bytes: int
    sha256: str
    block_bytes: int = 0
    blocks: str = ""


def fingerprint(name: str, path: Path, block_bytes: int = 0) -> Fingerprint:
    """The fingerprint of a file, which is read once, in blocks of ``block_bytes`` (0: as many as there are to be in a
    file of this size). Raises OSError: it cannot be read.
    """
    whole, blocks = hashlib.sha256(), []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        block_bytes = block_bytes or max(_SMALLEST_BLOCK, -(-size // _BLOCKS))
        while block := file.read(block_bytes):
            whole.update(block)
            blocks.append(hashlib.sha256(block).digest()[:_KEPT_DIGEST].hex())
    return Fingerprint(name, size, whole.hexdigest(), block_bytes, "".join(blocks))


def start_files(start: str) -> list[Fingerprint]:
    """Fingerprints of the adapter that ``lora.start_from`` names."""
    return [fingerprint(f"{start}/{path.name}", path) for path in sorted(start_folder(start).glob("adapter_*.*"))]


@dataclass(frozen=True, slots=True)
class Inputs:
    """A run's inputs, known once its data is tokenized; None or empty where there is nothing to compare.

    Attributes:
        tokens_sha256: SHA-256 over the token ids and labels of all training rows, in order.
        weights: Of a local model, :func:`ftcli.run.inputs.weight_identities` of its folder.
        asked: Weights, commit and files of another model that was asked before training.
    """

    chat_template: str | None = None
    tokens_sha256: str | None = None
    weights: tuple[WeightFile, ...] = ()
    commit: str | None = None
    files: tuple[Fingerprint, ...] = ()
    asked: Inputs | None = None


def stored_weights(facts: ModelFacts, model: ModelConfig) -> Path | None:
    """The folder of a local model whose weight files are read; None for the Hub's and for random ones."""
    return facts.folder if facts.is_local and model.init == "pretrained" else None


def base_inputs(
    facts: ModelFacts, model: ModelConfig, commit: str | None, weights: Sequence[WeightFile] | None = None
) -> Inputs:
    """Inputs of a base model: its folder's content, or the Hub's ``commit``; and those of a tokenizer of another place.
    The identities of its weight files are read here where ``weights`` is None. Raises OSError: a file cannot be read.
    """
    found = [path for name in _OF_MODEL if facts.is_local for path in facts.folder.glob(name)]
    tokenizer = _cached(model.tokenizer) if facts.tokenizer is None else facts.tokenizer.folder
    if tokenizer is not None:
        found += [path for name in _OF_TOKENIZER for path in sorted(tokenizer.glob(name))]
    files = tuple(_whole(path) for path in dict.fromkeys(found) if path.is_file())
    folder = stored_weights(facts, model)
    if weights is None:
        weights = () if folder is None else weight_identities(folder)
    return Inputs(weights=tuple(weights), commit=commit, files=files)


def _cached(tokenizer: str | None) -> Path | None:
    """Folder of a tokenizer that the recipe names in the Hub's cache; the model's own is told by the commit."""
    if tokenizer is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(tokenizer, "tokenizer_config.json")
    return Path(path).parent if isinstance(path, str) else None


def _whole(path: Path) -> Fingerprint:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return Fingerprint(path.name, file.tell(), digest.hexdigest())


def require_same_inputs(previous: JsonMap, now: Inputs) -> None:
    """Refuse to continue a run whose template, token ids or base model are not what they were; what the manifest
    ``previous`` does not know is accepted.

    Raises FtcliError (exit 2) FT734 with the template's difference, FT735 with each changed file of the base, FT731
    when only the token ids differ.
    """
    known = previous.get("inputs")
    if not isinstance(known, Mapping):
        return
    findings = [*_template_findings(known.get("chat_template"), now.chat_template), *_base_findings(known, now)]
    findings += _base_findings(map_in(known, "asked"), now.asked or Inputs(), "the reference")
    before = known.get("tokens_sha256")
    if not findings and isinstance(before, str) and before and now.tokens_sha256 and before != now.tokens_sha256:
        findings.append(
            Finding(
                "FT731",
                "the training rows give different token ids or labels than when this run began, though no file, "
                f"setting or template has changed (sha256 {before[:12]} -> {now.tokens_sha256[:12]}): the "
                "tokenizer, a library or an image must have changed",
                help=f"restore the tokenizer, the library versions of manifest.json and the images: {_REMEDY}",
            )
        )
    if findings:
        raise FtcliError(findings, ExitCode.RECIPE)


def _template_findings(before: Any, now: str | None) -> list[Finding]:
    if not isinstance(before, str) or now is None or before == now:
        return []
    lines = list(
        difflib.unified_diff(before.splitlines(), now.splitlines(), "when the run began", "now", "", "", 0, "")
    )
    shown = "\n".join(f"    {line}" for line in lines[:_DIFF_LINES])
    more = f"\n    … {len(lines) - _DIFF_LINES} more lines" if len(lines) > _DIFF_LINES else ""
    return [Finding("FT734", f"the chat template has changed since this run began:\n{shown}{more}", help=_REMEDY)]


def _base_findings(known: JsonMap, now: Inputs, what: str = "the base model") -> list[Finding]:
    changed = changed_base(known, now)
    if not changed:
        return []
    return [Finding("FT735", f"{what} has changed since this run began: {', '.join(changed)}", help=_REMEDY)]


def changed_base(known: JsonMap, now: Inputs, *, weights: bool = True) -> list[str]:
    """Every file of the base that differs from a manifest's ``inputs``, with both identities, and the Hub's commit;
    nothing where none is known. ``weights``: weights and commit are compared, too.
    """
    changed = _changed_files(known.get("files"), now.files)
    if not weights:
        return changed
    changed += _changed_files(known.get("weights"), now.weights, always=bool(known.get("commit")))
    commit = known.get("commit")
    if commit and now.commit and commit != now.commit:
        changed.append(f"commit {commit} -> {now.commit}")
    return changed


def _changed_files(known: Any, now: Sequence[Fingerprint | WeightFile], *, always: bool = False) -> list[str]:
    before, found = noted_files(known), {each.name: plain_fields(each) for each in now}
    return _differing(before, found, {*before, *found} if before or always else ())


def _differing(before: Mapping[str, JsonObject], now: Mapping[str, JsonObject], names: Collection[str]) -> list[str]:
    """Those of ``names`` that are not the same on both sides, in words."""
    return [
        f"{name} ({_identity(before.get(name))} -> {_identity(now.get(name))})"
        for name in sorted(names)
        if not _is_same(before.get(name), now.get(name))
    ]


def noted_files(listed: object) -> dict[str, JsonObject]:
    """The files of a manifest's list by name. None of a damaged one: what is left of it proves nothing."""
    entries = maps(listed)
    whole = isinstance(listed, list) and len(entries) == len(listed) and all(_tells_a_file(each) for each in entries)
    return {entry["name"]: entry for entry in entries} if whole else {}


def _tells_a_file(entry: JsonMap) -> bool:
    count = entry.get("bytes")
    return isinstance(entry.get("name"), str) and isinstance(_digest_in(entry), str) and type(count) is int


def _is_same(before: JsonMap | None, now: JsonMap | None) -> bool:
    """True if all is the same that both entries tell of a file."""
    if before is None or now is None:
        return before is now
    checksums = {entry["crc32"] for entry in (before, now) if entry.get("crc32")}
    return _digest_in(before) == _digest_in(now) and len(checksums) < 2


def _digest_in(entry: JsonMap | None) -> str | None:
    """The digest of an entry of either kind; ftcli 0.1 called that of the samples sha256."""
    return None if entry is None else entry.get("samples_sha256") or entry.get("sha256")


def _identity(entry: JsonMap | None) -> str:
    if entry is None:
        return "absent"
    kind = "samples' sha256" if entry.get("samples_sha256") else "sha256"
    checksum = f", crc32 {entry['crc32']}" if entry.get("crc32") else ""
    return f"{entry['bytes']:,} bytes, {kind} {str(_digest_in(entry))[:12]}{checksum}"


def require_same_data(previous: JsonMap, data: Sequence[Fingerprint], paths: Mapping[str, Path] | None = None) -> None:
    """Refuse to continue a run on data whose content has changed since it began; ``paths`` are the files by name, to
    say in which rows. A manifest without fingerprints proves nothing and is accepted.

    Raises FtcliError FT731 (exit 2) with each changed, new and missing file.
    """
    known = noted_files(previous.get("data"))
    if not known:
        return
    now = {f.name: f for f in data}
    findings = []
    for name in sorted({*known, *now}):
        before, found = known.get(name), now.get(name)
        if before is not None and found is not None and before["sha256"] == found.sha256:
            continue
        old, new = _identity(before), _identity(None if found is None else plain_fields(found))
        place = "" if before is None or found is None else _place(before, found, (paths or {}).get(name))
        message = f"{name} has changed since this run began: {old} -> {new}{place}"
        findings.append(Finding("FT731", message, help=_REMEDY))
    if findings:
        raise FtcliError(findings, ExitCode.RECIPE)


def changed_held_out(previous: JsonMap, held_out: Sequence[Fingerprint], sources: Collection[str]) -> list[str]:
    """Held-out files of ``sources`` that are not what they were when a run began, in words; in a folder, those that
    have come or gone.

    Results before and after training are of the same rows then. Sources that only one recipe names are none of them; a
    manifest without fingerprints proves nothing.
    """
    known, changed = noted_files(previous.get("held_out")), []
    now = {one.name: plain_fields(one) for one in held_out}
    for source in dict.fromkeys(sources):
        inside = f"{source.rstrip('/')}/"
        of_source = ({n: e for n, e in side.items() if n == source or n.startswith(inside)} for side in (known, now))
        before, found = of_source
        changed += _differing(before, found, {*before, *found} if before else ())
    return list(dict.fromkeys(changed))


def changed_judges(previous: JsonMap, judges: Sequence[Fingerprint]) -> list[str]:
    """Files of rewards and judges that are not what they were when a run began, in words. Those that only one side has
    are none of them: the recipe names them, and is compared itself.
    """
    known, now = noted_files(previous.get("judges")), {one.name: plain_fields(one) for one in judges}
    return _differing(known, now, known.keys() & now.keys())


def require_same_measures(
    previous: JsonMap, held_out: Sequence[Fingerprint], sources: Collection[str], judges: Sequence[Fingerprint]
) -> None:
    """Refuse to continue a run that would be measured on other rows, or judged by other code, than before.

    Raises FtcliError (exit 2) FT731 with each held-out file, FT721 with each of judges.
    """
    changed = {
        ("FT731", "held-out data"): changed_held_out(previous, held_out, sources),
        ("FT721", "a reward or judge"): changed_judges(previous, judges),
    }
    findings = [
        Finding(code, f"{what} has changed since this run began: {each}", help=_REMEDY)
        for (code, what), said in changed.items()
        for each in said
    ]
    if findings:
        raise FtcliError(findings, ExitCode.RECIPE)


def _place(before: JsonMap, now: Fingerprint, path: Path | None) -> str:
    """In which rows of a text file the first difference lies, from the blocks of both fingerprints."""
    size, blocks = before.get("block_bytes"), before.get("blocks")
    if path is None or path.suffix != ".jsonl" or type(size) is not int or size < 1 or not isinstance(blocks, str):
        return ""
    if size != now.block_bytes:  # the sizes differ too much for equal blocks: hash again as it was done then
        now = fingerprint(now.name, path, size)
    width = 2 * _KEPT_DIGEST
    old, new = ([b[i : i + width] for i in range(0, len(b), width)] for b in (blocks, now.blocks))
    first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    with path.open("rb") as file:
        start = sum(file.read(size).count(b"\n") for _ in range(first)) + 1
        last = start + file.read(size).count(b"\n")
    return f"; the first difference is in line {start:,}" + (f" to {last:,}" if last > start else "")
