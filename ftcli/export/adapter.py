"""Adapters in PEFT's own layout: copied, and compared with their source bit for bit.

Some bring embeddings of their own: a vocabulary with added tokens, or single rows that were trained. PEFT has several
forms of them, and stores them unasked where the vocabulary has another size than the base's. All are read as what they
amount to, embedding and head trained whole, which every format that merges can do.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from ftcli.errors import Finding
from ftcli.export.clean.request import TENSOR, ReloadRequest
from ftcli.export.source import (
    ADAPTER_WEIGHTS,
    ExportSource,
    attach,
    base_facts,
    not_verified,
    read_adapter_config,
    source_tokenizer,
    unusable,
    unwritten,
)
from ftcli.export.tensorfile import finite_tensors
from ftcli.export.verify import TEXTS, Verified, compare_tensors, compare_tokenizers, not_asked, reloaded
from ftcli.export.weights import StoredWeights, base_weights, ends, source_config
from ftcli.facts.layers import means
from ftcli.facts.weights import ADAPTER_CONFIG
from ftcli.model.pretrained import IMPOSSIBLE, hollow
from ftcli.plain import JsonMap, JsonObject
from ftcli.run.atomic import writing_into
from ftcli.run.checkpoint import PROGRESS
from ftcli.tables import exports
from ftcli.tables.exports import AdapterServer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: What a trainer may leave beside its result and what nobody needs to load it.
_LEFT_OUT = (".bin", ".pt", ".pth", ".pkl")
_PAIR = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")


def write(source: ExportSource, folder: Path, say: Callable[[str], None]) -> Verified:
    """Write the adapter into ``folder`` and verify it. ``say`` is not used: this takes no time. Raises FtcliError
    FT321, FT322 or FT424 for the tokenizer; otherwise as :func:`verify_adapter`; OSError where it cannot be written.
    """
    copy_adapter(source, folder)
    return verify_adapter(source, folder) if source.verify else not_asked()


def copy_adapter(source: ExportSource, folder: Path) -> None:
    """Copy the adapter and save its tokenizer, with the chat template of training, beside it.

    Raises FtcliError FT321, FT322 or FT424 for the tokenizer; OSError where it cannot be written.
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

    Raises FtcliError FT741 when anything differs, FT742 when the source itself is damaged, FT30x when the base's config
    cannot be found, FT760 where it cannot be loaded again.
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
    modules, left_out = _in_served_class(source, wanted)
    said = {server.name: judged(server, stated, wanted, left_out) for server in exports.ADAPTER_SERVERS}
    return Verified(
        "every tensor, bit for bit, tokenizer",
        {
            "tensors": len(wanted),
            "modules": modules,
            **{name: told for name, (told, _) in said.items()},
            **reloaded(answer),
        },
        tuple(finding for _, findings in said.values() for finding in findings),
    )


def _in_served_class(source: ExportSource, tensors: Mapping[str, Tensor]) -> tuple[str, list[str]]:
    """How many linear layers of the adapter are those of the class that servers load, for the record; and what they
    leave out. They load the class that the base's config.json names, and vLLM passes over what this one lacks.

    Raises FtcliError FT742 where none is: the base would be served.
    """
    shapes = {
        found[1]: {tensor.shape[1], tensors[f"{_PREFIX}{found[1]}.lora_B.weight"].shape[0]}
        for name, tensor in tensors.items()
        if name.endswith(".lora_A.weight") and (found := _PAIR.fullmatch(name))
    }
    model = _served_class(source)
    if model is None or not shapes:
        return f"{len(shapes)}, not compared with a server's class", []
    theirs = dict(model.named_modules())
    weights = {name: getattr(theirs.get(name.removesuffix(".base_layer")), "weight", None) for name in shapes}
    # Of stacks of experts, which are modules without a weight of their own, it is said elsewhere.
    stacks = [name for name, weight in weights.items() if weight is None and name.removesuffix(".base_layer") in theirs]
    shapes = {name: shape for name, shape in shapes.items() if name not in stacks}
    other = [name for name, shape in shapes.items() if {*getattr(weights[name], "shape", ())} != shape]
    told = f"{len(shapes) - len(other)} of {len(shapes)} are those of {type(model).__name__}"
    if other and len(other) == len(shapes):
        reason = f"{told}, which servers load by the base's config.json: they would answer as the base"
        raise unusable(source.folder, f"{reason}; it has {other[0]}")
    left_out = (
        [f"{len(other)} of {len(shapes)} modules ({other[0]}) are none of {type(model).__name__}"] if other else []
    )
    plain = model.config.get_text_config() is model.config
    towers = [name for name in shapes if not plain and not name.startswith(("model.language_model.", "lm_head"))]
    if towers:
        left_out.append(f"it adapts language models, and {len(towers)} modules ({towers[0]}) belong to others")
    return told, left_out


def _served_class(source: ExportSource) -> PreTrainedModel | None:
    """The model of the class that the base's config.json names, without memory; None where transformers has none."""
    config, names = source_config(source), base_facts(source).raw.get("architectures") or [""]
    try:
        built: Any = getattr(transformers, str(names[0]))
        if source.classifier or not issubclass(built, transformers.PreTrainedModel):
            return None
        with torch.device("meta"):
            model: PreTrainedModel = built._from_config(
                config if isinstance(config, built.config_class) else config.get_text_config()
            )
    except (*IMPOSSIBLE, ImportError):
        return None
    return model


def judged(
    server: AdapterServer, config: JsonMap, names: Iterable[str], left_out: Sequence[str] = ()
) -> tuple[str, list[Finding]]:
    """The verdict of a program's rules on an adapter, for the record; and FT757 if it does not take it."""
    problems = [*left_out, *_beside_pairs(config, names)]
    if not server.expressions and isinstance(config.get("target_modules"), str):
        problems.append("target_modules is an expression, and it reads names")
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
        problems.append("experts are adapted as stacks (PEFT's target_parameters), and it reads a pair for each expert")
    return problems


def adapter_bytes(source: ExportSource) -> int:
    """Bytes on disk of the format ``adapter``."""
    return sum(path.stat().st_size for path in source.folder.iterdir() if path.is_file())


_PREFIX = "base_model.model."
_ROWS, _ROWS_BASE = ".token_adapter.trainable_tokens_delta", ".token_adapter.base_layer.weight"
_INDICES = "trainable_token_indices"


@contextmanager
def with_its_vocabulary(source: ExportSource) -> Iterator[ExportSource]:
    """``source``; where its adapter brings embeddings of its own, one in a temporary folder that trained them whole.

    Raises FtcliError FT742 where a part of the resized model is nowhere stored, or PEFT's form is another; and as
    :func:`ftcli.export.weights.base_weights` for rows that are put into the base's; FT723 and FT724 where the temporary
    folder cannot be written.
    """
    if source.kind != "adapter" or not _brings_embeddings(source):
        yield source
        return
    with TemporaryDirectory(prefix="ftcli-adapter-") as place:
        folder = Path(place, source.folder.resolve().name)
        folder.mkdir()
        with writing_into(folder, folder):
            made = _written(source, folder)
        yield made


def _outline(source: ExportSource) -> PreTrainedModel:
    return hollow(source_config(source))


def _brings_embeddings(source: ExportSource) -> bool:
    """True if the adapter's file holds more than pairs of matrices and modules of the base's shapes."""
    config = read_adapter_config(source.folder)
    if config.get(_INDICES) or config.get("ensure_weight_tying"):
        return True
    tensors = finite_tensors(source.folder)
    if any(".lora_embedding_" in key for key in tensors):  # alone they can be copied
        return any(key.endswith(".base_layer.weight") for key in tensors)
    wholes = {key.removeprefix(_PREFIX): tensor for key, tensor in tensors.items() if ".lora_" not in key}
    named = config.get("modules_to_save") or ()
    if not wholes:
        return False
    model = _outline(source)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    vocabulary = [name for name in ends(model) if name in wholes]
    resized = any(wholes[name].shape != shapes[name] for name in vocabulary)
    unnamed = any(not _covers(named, name) for name in vocabulary)
    return resized or unnamed or any(".modules_to_save." in name for name in wholes)


def _covers(modules: Any, weight: str) -> bool:
    """True if ``modules_to_save`` names the module of a weight, as PEFT matches them."""
    module = weight.removesuffix(".weight")
    return any(means(each, module) for each in modules)


def _written(source: ExportSource, folder: Path) -> ExportSource:
    """The same adapter in ``folder``, embedding and head in it as modules that were trained whole."""
    config, model = read_adapter_config(source.folder), _outline(source)
    pairs, wholes, rows = _parts(source, finite_tensors(source.folder))
    wholes = _with_rows(source, config, model, wholes, rows)
    size = _require_both_ends(source, model, wholes)
    saved = list(config.get("modules_to_save") or ())
    saved += [name.removesuffix(".weight") for name in wholes if not _covers(saved, name)]
    written = {**config, "modules_to_save": saved, _INDICES: None, "ensure_weight_tying": False}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(written), encoding="utf-8")
    tensors = {**pairs, **{f"{_PREFIX}{name}": tensor.contiguous() for name, tensor in wholes.items()}}
    # A head that is the embedding is stored twice: they are two modules here.
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    for path in source.folder.iterdir():
        if path.is_file() and not path.name.startswith(("adapter_model", ADAPTER_CONFIG)):
            (folder / path.name).symlink_to(path.resolve())
    return replace(source, folder=folder, vocabulary=size)


def _parts(
    source: ExportSource, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Splits the file into pairs of matrices by key, whole weights by name, and trained rows by their weight's name."""
    pairs: dict[str, Tensor] = {}
    wholes: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(_PREFIX)
        if ".lora_embedding_" in name:
            raise unusable(source.folder, f"{name} adapts the embeddings, which ftcli does not export")
        if ".lora_" in name:
            pairs[key] = tensor
        elif name.endswith(_ROWS):
            rows[f"{name.removesuffix(_ROWS)}.weight"] = tensor
        elif name.endswith(_ROWS_BASE):
            wholes[f"{name.removesuffix(_ROWS_BASE)}.weight"] = tensor
        elif ".modules_to_save." in name:
            wholes[name.replace(".modules_to_save", "")] = tensor
        elif ".original_module." not in name and ".modules_to_save.".join(key.rpartition(".")[::2]) not in tensors:
            wholes[name] = tensor
    return pairs, wholes, rows


def _with_rows(
    source: ExportSource,
    config: JsonObject,
    model: PreTrainedModel,
    wholes: Mapping[str, Tensor],
    rows: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """``wholes``, and each weight of which rows were trained, with those rows in it."""
    made = dict(wholes)
    base: StoredWeights | None = None
    for name, trained in rows.items():
        if name not in made:
            base = base or base_weights(source)
            made[name] = base.read(name)
        ids = torch.tensor(_indices(config, name), dtype=torch.long)
        size, last = len(made[name]), int(ids.max()) + 1 if len(ids) else 0
        if last > size and set(range(size, last)) <= set(ids.tolist()):  # a vocabulary that was trained with more rows
            made[name] = torch.cat([made[name], made[name].new_zeros((last - size, *made[name].shape[1:]))])
        if len(ids) != len(trained) or bool((ids < 0).any() | (ids >= len(made[name])).any()):
            raise unusable(source.folder, f"{_INDICES} and the rows that are stored of {name} do not fit together")
        made[name] = made[name].float().index_copy(0, ids, trained.float())
    embedding, head = ends(model)
    # PEFT trains a tied head with the embedding, and stores it once.
    tied = model.get_parameter(head) is model.get_parameter(embedding) if head else False
    follows = bool(config.get("ensure_weight_tying")) or embedding in rows
    if tied and follows and embedding in made and head not in made:
        made[head] = made[embedding]
    return made


def _indices(config: JsonObject, name: str) -> list[int]:
    """The ids whose rows of a weight were trained: a list is the embedding's; a table names modules."""
    said: Any = config.get(_INDICES) or []
    if isinstance(said, dict):
        return next((list(ids) for module, ids in said.items() if _covers([module], name)), [])
    return list(said)


def _require_both_ends(source: ExportSource, model: PreTrainedModel, wholes: Mapping[str, Tensor]) -> int | None:
    """The new size of the vocabulary, None where it is the base's.

    Raises FtcliError FT742 where one side of the resized model is not in the adapter: its new rows are nowhere stored.
    """
    embedding, head = ends(model)
    size = model.get_parameter(embedding).shape[0]
    found = {name: wholes[name].shape[0] for name in (embedding, head) if name in wholes}
    if all(rows == size for rows in found.values()):
        return None
    if head and set(found) != {embedding, head}:
        (missing,) = {embedding, head} - set(found)
        reason = f"its vocabulary has {next(iter(found.values()))} tokens and the base's {size}, and the rows that "
        raise unusable(source.folder, f"{reason}{missing} has for them are not in it")
    if len(set(found.values())) > 1:
        raise unusable(source.folder, f"{embedding} has {found[embedding]} rows and {head} {found[head]}")
    return next(iter(found.values()))
