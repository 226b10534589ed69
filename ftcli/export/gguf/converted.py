"""GGUF files of families without a row, and projectors of images, as llama.cpp's own converter makes them.

It is given the merged model in transformers' layout, which is held to base and adapter as the format ``safetensors``
is. Its file has the weights in the dtype of that folder, so that each is compared exactly; the types that were asked
for are made of it, and held to it tensor by tensor. Tokens, template and stop tokens are compared as in ftcli's own
files, and the logits in llama.cpp's library, where it is installed: without it nothing says whether the metadata are
right.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ftcli.errors import Finding, FtcliError
from ftcli.export.further import passed_over
from ftcli.export.gguf.convert import PLAIN_TYPES, convert, require_converter, rewrite, unlike_rows, version_of
from ftcli.export.gguf.file import Trained, file_name, provenance_of, quantize_file
from ftcli.export.gguf.verify import LEAST, compare_vocabulary, difference, in_library
from ftcli.export.gguf.vocabulary import NO_MERGE, values_of_special
from ftcli.export.safetensors import ModelPlan, as_stored, weight_problems, write_merged
from ftcli.export.source import ExportSource, not_verified, source_tokenizer, unwritten
from ftcli.export.tensorfile import TensorFile, tensor_files
from ftcli.export.verify import Verified, logits, not_asked, open_written, probe_batch, shortened, trained_logits
from ftcli.export.weights import base_weights, source_config
from ftcli.gguf import ReadFile, Value, is_other_part, no_place, require_quantizer
from ftcli.plain import JsonMap
from ftcli.tables.gguf import TYPES, unknown_architecture

#: Types that the converter writes itself; ``llama-quantize`` makes the others.
_CONVERTED = ("f32", "f16", "bf16", "q8_0")
#: A relative error of the logits that no rounding makes: two vectors of one length that have nothing in common.
_UNLIKE = 1.4
_READ_ERRORS = (OSError, ValueError, IndexError, KeyError, RuntimeError, SafetensorError)


def write_converted(source: ExportSource, folder: Path, say: Callable[[str], None]) -> Verified:
    """Write a file for each type of ``export.gguf.types`` into ``folder`` and verify it.

    Raises FtcliError FT758 where the converter or ``llama-quantize`` is not there, FT756 where the converter does not
    take the model, FT741 for a file that is not what it should be; otherwise as the format ``safetensors``.
    """
    settings, family = source.settings.gguf, source_config(source).get_text_config().model_type
    command = require_converter(settings.converter, unknown_architecture(family))
    if settings.lora_adapter or settings.imatrix or any(TYPES[kind].weighed for kind in settings.types):
        raise no_place(f"{unknown_architecture(family)}, so there are no names for lora_adapter, imatrix and I-quants")
    require_quantizer(settings.types, [kind for kind in settings.types if kind not in _CONVERTED])
    merged = folder / ".merged"
    merged.mkdir()
    plan = write_merged(source, merged, say)
    wanted = _trained(source, plan, say)
    plain = folder / f".{wanted.name}.gguf"
    first = PLAIN_TYPES[plan.dtype]
    say(f"llama.cpp's converter ({version_of(command)}) makes the file")
    _make(command, merged, plain, first, wanted)
    facts: dict[str, str | int | float] = {"converter": version_of(command)}
    warnings: list[Finding] = []
    if source.verify:
        say("verifying: comparing weights")
        problems = weight_problems(source, plan, open_written(merged), plan.base) or _compare_weights(
            source, merged, plain
        )
        told, problems = _verified(plain, first, wanted) if not problems else ({}, problems)
        if problems:
            raise not_verified(folder, problems)
        facts |= {"tensors": len(ReadFile(plain).names), **{f"{first}_{key}": value for key, value in told.items()}}
    for kind in settings.types:
        path = folder / f"{wanted.name}-{TYPES[kind].ggml}.gguf"
        say(f"writing {path.name}")
        if kind == first:
            path.hardlink_to(plain)
            continue
        if kind in _CONVERTED:
            _make(command, merged, path, kind, wanted)
        else:
            quantize_file(plain, path, kind)
        if source.verify:
            told, problems = _verified(path, kind, wanted, plain)
            if problems:
                raise not_verified(folder, [f"{path.name}: {problem}" for problem in problems])
            facts |= {f"{kind}_{key}": value for key, value in told.items()}
            warnings += _much_rounded(path, kind, told)
    plain.unlink()
    shutil.rmtree(merged)
    if not source.verify:
        return not_asked(plan.merged_with)
    ran = f"{first}_llama_cpp_error" in facts
    return Verified(
        f"every weight, {'logits in llama.cpp, ' if ran else ''}tokenizer, template, stop tokens",
        facts,
        (*warnings, *([] if ran else [_not_run()])),
        plan.merged_with,
    )


def _trained(source: ExportSource, plan: ModelPlan, say: Callable[[str], None]) -> Trained:
    """The trained model, with its weights rounded as the converter gets them."""
    tokenizer = source_tokenizer(source)
    probe = probe_batch(tokenizer, plan.base.shape(plan.base.ends[0])[0])
    base, found = base_weights(source), torch.empty(0)
    if source.verify and source.llama_cpp:
        say("computing the reference that the files are compared with")
        whole: Any = unwritten(plan.config) if plan.adapted is None else plan.adapted
        probe, _ = trained_logits(whole, base, probe)
        with as_stored(plan, base) as model:
            found = logits(model, probe)
    return Trained(
        config=plan.config,
        tokenizer=tokenizer,
        stops=plan.stops,
        probe=probe,
        logits=found,
        reload=source.reload,
        llama_cpp=source.llama_cpp,
        provenance=provenance_of(source),
        name=file_name(source),
    )


def _make(command: Sequence[str], model: Path, path: Path, kind: str, wanted: Trained) -> None:
    convert(command, model, path, "--outtype", kind)
    try:
        rewrite(path, _values(wanted, ReadFile(path).values))
    except (ValueError, KeyError, IndexError) as error:
        raise no_place(f"llama.cpp's converter wrote what cannot be read: {error}") from error


def _values(wanted: Trained, written: JsonMap) -> dict[str, Value]:
    """Metadata that the run knows better than the folder that the converter reads: where answers end, above all."""
    values: dict[str, Value] = {"general.name": wanted.name, **wanted.provenance}
    if written.get("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.merges" not in written:
        values["tokenizer.ggml.merges"] = [NO_MERGE]
    return {**values, **values_of_special(wanted.tokenizer, wanted.stops)}


def _compare_weights(source: ExportSource, merged: Path, plain: Path) -> list[str]:
    """Problems of the file's weights, by the rows of the folder that it was made of."""
    files = tensor_files(merged)
    further = passed_over(source)
    keys = [key for key in files if key not in further and not is_other_part(key)]
    try:
        return unlike_rows(ReadFile(plain), files, keys)
    except _READ_ERRORS as error:
        return [f"{plain.name} cannot be read: {type(error).__name__}: {error}"]


def _verified(
    path: Path, kind: str, wanted: Trained, plain: Path | None = None
) -> tuple[Mapping[str, str | float], list[str]]:
    """Facts of a file for the record, and problems; ``plain``: the file whose weights it has rounded."""
    try:
        file = ReadFile(path)
        values = file.values
        problems = compare_vocabulary(values, wanted)
        if plain is not None:
            problems += _compare_rounded(file, ReadFile(plain))
        most = values.get(f"{values['general.architecture']}.context_length")
    except _READ_ERRORS as error:
        return {}, [f"{path.name} cannot be read: {type(error).__name__}: {error}"]
    if problems or not wanted.llama_cpp:
        return {"llama_cpp": "not on this machine"}, shortened(problems)
    exact = max(TYPES[kind].logits, LEAST)
    report = in_library(path, exact if plain is None else max(exact, _UNLIKE), wanted, most)
    return report.told, list(report.problems)


def _compare_rounded(file: ReadFile, plain: ReadFile) -> list[str]:
    problems = [f"{name} is missing" for name in plain.names if name not in file.names]
    for name in file.names:
        if name in plain.names:
            problem = difference(file.read(name), plain.read(name), file.type_name(name))
            problems += [f"{name} {problem}"] if problem else []
    return problems


def _much_rounded(path: Path, kind: str, told: Mapping[str, str | float]) -> list[Finding]:
    error = told.get("llama_cpp_error", 0.0)
    if not isinstance(error, float) or error <= TYPES[kind].logits:
        return []
    message = f"{path.name}: rounding the weights to {kind} moves this model's logits by {error:.2g} of their size"
    return [Finding("FT772", message, help="export a type of more bits, and evaluate it", severity="warning")]


def _not_run() -> Finding:
    message = "the files are those of llama.cpp's converter, whose metadata ftcli cannot read as a model: "
    return Finding(
        "FT757",
        f"{message}their weights are the merged ones, tokens and template those of training, and what llama.cpp "
        f"computes with them was not compared",
        help="pip install llama-cpp-python, and export once more with --force",
        severity="warning",
    )


def write_projector(
    source: ExportSource, folder: Path, say: Callable[[str], None]
) -> tuple[dict[str, str | int], list[Finding]]:
    """Write towers and projectors of a model that sees as ``mmproj-…gguf``, and compare each of their tensors: what the
    record says, and FT757 where no such file can be made.

    Raises FtcliError FT741 for a file that has other weights; OSError where it cannot be written.
    """
    tower = folder / ".tower"
    tower.mkdir()
    try:
        command = require_converter(source.settings.gguf.converter, "images need towers and projectors in another file")
        named = _released if source_config(source).model_type == "gemma3" else str
        write_merged(source, tower, lambda _: None, lambda key: named(key) if is_other_part(key) else None)
        files = tensor_files(tower)
        key, file = next(iter(files.items()))
        kind = PLAIN_TYPES[file.dtype(key)]
        path = folder / f"mmproj-{file_name(source)}-{TYPES[kind].ggml}.gguf"
        say(f"writing {path.name}")
        convert(command, tower, path, "--mmproj", "--outtype", kind)
        if source.verify:
            problems = _compare_tower(path, files)
            if problems:
                raise not_verified(folder, [f"{path.name}: {problem}" for problem in problems])
    except FtcliError as error:
        finding = error.findings[0]
        if finding.code not in ("FT756", "FT758"):
            raise
        message = f"the files take no images: {finding.message}"
        return {}, [replace(finding, code="FT757", message=message, severity="warning")]
    finally:
        shutil.rmtree(tower)
    return {"projector": path.name, "projector_tensors": len(files), "converter": version_of(command)}, []


def _released(key: str) -> str:
    """The name in released files, which is all that the converter knows, of what transformers 5 saves by another."""
    return re.sub(
        r"^(model\.)?vision_tower\.(embeddings|encoder|post_layernorm)\.", r"vision_tower.vision_model.\2.", key
    )


def _compare_tower(path: Path, files: Mapping[str, TensorFile]) -> list[str]:
    try:
        return unlike_rows(ReadFile(path), files, files, by_layer=False)
    except _READ_ERRORS as error:
        return [f"it cannot be read: {type(error).__name__}: {error}"]
