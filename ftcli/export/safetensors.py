"""A complete model in transformers' own layout: base and adapter merged, or the full fine-tune as it was saved."""

from __future__ import annotations

import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ftcli.errors import ExitCode, Finding, FtcliError, first_line
from ftcli.export.clean.request import LOGITS
from ftcli.export.further import passed_over
from ftcli.export.images import check_seen, copy_processors, image_probe, seen_logits, sent_with
from ftcli.export.lazy import WHOLE_LAYER, computing_from
from ftcli.export.merge import AdapterUpdates, Rounding, outputs, rounded_as_merged, rounding_of
from ftcli.export.source import (
    ExportSource,
    attach,
    load_written,
    local_config,
    not_verified,
    plain_config,
    source_stops,
    source_tokenizer,
    unusable,
    unwritten,
)
from ftcli.export.tensorfile import (
    TensorFile,
    TensorToWrite,
    add_shard,
    copied,
    finite_tensors,
    in_memory,
    require_room,
    tensor_files,
    write_shards,
)
from ftcli.export.verify import (
    SENSITIVE,
    TOLERANCE,
    Probe,
    Verified,
    check_answer,
    compare_logits,
    compare_tokenizers,
    compare_written,
    continued,
    elements,
    loaded,
    logits,
    model_request,
    not_asked,
    open_written,
    probe_batch,
    reloaded,
    sent,
    shortened,
    trained_logits,
    unlike_names,
)
from ftcli.export.weights import (
    MergedWeights,
    StoredWeights,
    base_weights,
    ends,
    source_config,
    source_updates,
    stored_names,
    untied,
    with_vocabulary,
)
from ftcli.facts.device import cpu_device
from ftcli.facts.weights import FURTHER_WEIGHTS
from ftcli.model.pretrained import hollow, read_config
from ftcli.model.quantized import unreadable_weights
from ftcli.model.score_head import SCORE, row_scores
from ftcli.model.tokenizer import align_special_tokens, source_of
from ftcli.run.checkpoint import PROGRESS
from ftcli.tables import exports
from ftcli.units import gib

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

#: Size of one file; small enough for every file system and for loading file by file.
SHARD_BYTES = 4 * 10**9
#: Above this share of an adapter's effect lost in rounding, people are told.
LOST_SHARE = 0.5
_SEEN = ", logits of an image"
_SCORE = f"{SCORE}.weight"
_LAYER = re.compile(r"(.*?\.\d+)\.")
#: Bytes for each element: of a weight that is merged (as stored, s B A, that times s, rounded), of one that is read to
#: compute with (as stored, float32), of a layer (float32).
_MERGED, _READ, _COMPUTED = 14, 6, 4
#: Python, its libraries and the activations of the probe.
_BESIDE = 1 << 29


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The weights to write: base and adapter, or those of a full fine-tune in another dtype.

    Attributes:
        config: The base's, which the written one is made of.
        adapted: PEFT's adapter on a model without the base's weights; None in a full fine-tune.
        merged: How many pairs of matrices the adapter has.
    """

    config: PretrainedConfig
    base: StoredWeights
    adapter: AdapterUpdates
    rounding: Rounding
    merged: int
    stops: tuple[int, ...]
    adapted: PeftModel | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most tensors."""
        stored = (self.rounding.of(name, self.base.of(name)) for name in self.base.names)
        return Counter(dtype for dtype in stored if dtype.is_floating_point).most_common(1)[0][0]

    @property
    def added(self) -> list[tuple[str, Tensor]]:
        """A reward model's score, which stands in the head's place and which the base does not have; it keeps its
        float32.
        """
        return [(name, whole) for name, whole in self.adapter.whole.items() if name == _SCORE]

    @property
    def merged_with(self) -> str:
        """The form of the base that the adapter is merged with; empty if there is no adapter."""
        return self.base.form if self.adapter.changed else ""


def write(source: ExportSource, folder: Path, say: Callable[[str], None]) -> Verified:
    """Write a complete model into ``folder`` and verify it; ``say`` is told of what takes time.

    Raises FtcliError as :func:`write_merged` and :func:`verify_merged`, or :func:`copy_model` and :func:`verify_copy`;
    OSError where it cannot be written.
    """
    if source.kind == "model" and source.settings.dtype == "auto":
        copy_model(source, folder)
        return verify_copy(source, folder) if source.verify else not_asked()
    plan = write_merged(source, folder, say)
    if not source.verify:
        return not_asked(plan.merged_with)
    return verify_merged(source, folder, plan, say)


def write_merged(
    source: ExportSource, folder: Path, say: Callable[[str], None], named: Callable[[str], str | None] = str
) -> ModelPlan:
    """Merge tensor by tensor, round once and write; a full fine-tune is rounded alone.

    Args:
        named: The name of a tensor in the files, by that in the base's; None for one that is left out.

    Raises FtcliError FT747 for a base of random weights, FT748 for too little memory, FT769 for numbers too large for
    the dtype, FT740 as :func:`ftcli.export.weights.base_weights`, FT323, FT735, FT742, FT321, FT322; OSError where it
    cannot be written.
    """
    require_kept_base(source)
    plan = plan_model(source)
    _require_memory(plan)
    say(f"merging with {plan.merged_with}" if source.kind == "adapter" else f"rounding to {source.settings.dtype}")
    added = [in_memory(name, whole) for name, whole in plan.added]
    added += [copied(key, file) for key, file in passed_over(source).items()]
    written = [*outputs(plan.base, plan.adapter, plan.rounding), *added]
    save_model(source, plan, [replace(each, key=name) for each in written if (name := named(each.key))], folder)
    return plan


def save_model(source: ExportSource, plan: ModelPlan, tensors: Sequence[TensorToWrite], folder: Path) -> None:
    """Write weights, config, tokenizer and, of a multimodal base, processors. Raises as :func:`write_merged`."""
    require_room(folder, sum(tensor.nbytes for tensor in tensors))
    try:
        write_shards(folder, tensors, SHARD_BYTES)
    except SafetensorError as error:  # the base was cut short meanwhile
        raise unreadable_weights(first_line(error)) from error
    tokenizer = source_tokenizer(source)
    save_config(source, plan, tokenizer, folder)
    tokenizer.save_pretrained(str(folder))
    copy_processors(source.base, folder, offline=source.offline)


def plan_model(source: ExportSource) -> ModelPlan:
    """Opens what is merged. Raises FtcliError as :func:`write_merged`."""
    tokenizer = source_tokenizer(source)
    stops = source_stops(source, tokenizer)
    name, revision = _stored_at(source)
    offline = source.offline or source.kind == "model"
    config = with_vocabulary(read_config(name, revision=revision, offline=offline), source)
    adapted = None
    if source.kind == "adapter":
        finite_tensors(source.folder)
    base = base_weights(source)
    model = unwritten(config)
    if source.kind == "adapter":
        adapted = attach(model, source.folder)
    dtype = None if source.settings.dtype == "auto" else getattr(torch, source.settings.dtype)
    rounding = rounding_of(model, dtype, _plain_dtype(config, source))
    adapter = AdapterUpdates(adapted)
    return ModelPlan(config, base, adapter, rounding, len(adapter.layers), stops, adapted)


def _stored_at(source: ExportSource) -> tuple[str, str | None]:
    """Name and revision of the model whose config the written one is made of."""
    if source.kind == "model":
        return str(source.folder), None
    return source_of(source.base.name_or_path), source.base.revision


def _plain_dtype(config: PretrainedConfig, source: ExportSource) -> torch.dtype:
    """The dtype of weights that the base stores quantized: that of the others by its config.json."""
    said: Any = config.get_text_config()
    stated = getattr(config, "dtype", None) or getattr(said, "dtype", None)
    return stated if isinstance(stated, torch.dtype) else getattr(torch, source.compute)


def save_config(source: ExportSource, plan: ModelPlan, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """config.json and generation_config.json: the base's, with what merging and training have made otherwise."""
    from transformers import GenerationConfig

    model = hollow(plain_config(deepcopy(plan.config)))
    config: Any = model.config
    config.architectures = [type(model).__name__]
    told = {id(one): one for one in (config, config.get_text_config())}.values()
    for one in told:
        one.dtype = plan.dtype
        if untied(plan.base, plan.adapter.changed) or _both_ends_stored(model, plan):
            # Loading would copy one side over the other.
            one.tie_word_embeddings = False
    name, revision = _stored_at(source)
    with suppress(OSError):  # a model without one has what its config says
        model.generation_config = GenerationConfig.from_pretrained(
            name, revision=revision, local_files_only=source.offline
        )
    align_special_tokens(model, tokenizer, plan.stops)
    config.save_pretrained(str(folder))
    if model.generation_config is not None:
        model.generation_config.save_pretrained(str(folder))


def _both_ends_stored(model: PreTrainedModel, plan: ModelPlan) -> bool:
    """True if the model ties embeddings that the base stores twice, and one of them was changed."""
    embedding, head = ends(model)
    stored = {embedding, head} <= set(plan.base.names)
    return stored and bool({embedding, head} & set(plan.adapter.changed))


def verify_merged(source: ExportSource, folder: Path, plan: ModelPlan, say: Callable[[str], None]) -> Verified:
    """Compare what was written with the files of base and adapter: weights, logits, tokenizer and stop tokens.

    The files are opened anew. Weights are held against the adapter's own file, logits (of a reward model, scores)
    against PEFT's layers. A warning (FT744) tells when rounding took away most of what the adapter does.

    Raises FtcliError FT741 when anything differs.
    """
    say("verifying: comparing weights")
    written, base, adapted = open_written(folder), base_weights(source), plan.adapted
    problems = weight_problems(source, plan, written, base)
    if problems:
        raise not_verified(folder, problems)
    count: dict[str, str | int] = {"merged": plan.merged} if adapted is not None else {}
    if source.classifier:
        say("verifying: comparing scores")
        with as_stored(plan, base) as model:
            scores = _verify_scores(source, folder, model, written)
        return Verified("every weight, scores in float32, tokenizer", {**count, **scores}, merged_with=plan.merged_with)
    say("verifying: comparing logits")
    tokenizer = source_tokenizer(source)
    whole: Any = unwritten(plan.config) if adapted is None else adapted
    probe, exact = trained_logits(whole, base, probe_batch(tokenizer, base.shape(base.ends[0])[0]))
    effect = 0.0 if adapted is None else _effect(adapted, base, probe, exact)
    shown = image_probe(source.base, plan.config, tokenizer, offline=source.offline)
    with as_stored(plan, base) as model:
        wanted, seen = logits(model, probe), seen_logits(model, shown) if shown else None
    request = model_request(folder, probe, elements(written), dtype="float32")
    answer = source.reload(request, {**sent(probe), **sent_with(shown)})
    if answer.problems:
        raise not_verified(folder, list(answer.problems))
    rounding = compare_logits(wanted, exact, TOLERANCE)
    allowed = max(TOLERANCE, SENSITIVE * rounding.relative_error)
    unrounded = exact, allowed + rounding.relative_error
    problems, facts = check_answer(answer, wanted, probe, tokenizer, plan.stops, allowed, unrounded)
    unseen, of_image = check_seen(answer, seen, allowed)
    if problems or unseen:
        raise not_verified(folder, [*problems, *unseen])
    facts |= of_image
    dtype = str(plan.dtype).removeprefix("torch.")
    facts |= {"dtype": dtype, "rounding": rounding.relative_error, "adapter_effect": effect}
    facts["top1_agreement"] = rounding.top1_agreement
    return Verified(
        "every weight, logits in float32, tokenizer, stop tokens" + (_SEEN if shown else ""),
        {**count, "loaded": loaded(request), **facts, **reloaded(answer)},
        _rounding_warnings(rounding.relative_error / effect if effect > 0 else 0.0, dtype),
        plan.merged_with,
    )


def weight_problems(source: ExportSource, plan: ModelPlan, written: StoredWeights, base: StoredWeights) -> list[str]:
    """Problems of the weights that were ``written``, beside those of ``base`` and the adapter's own file."""
    changes = {} if plan.adapted is None else source_updates(source, plan.adapted)
    added = [name for name, _ in plan.added]
    problems = compare_written(written, MergedWeights(base, changes), plan.rounding, added, passed_over(source))
    for name in added:
        trained = changes[name].whole
        problems += [] if trained is not None and torch.equal(written.read(name), trained) else [f"{name} differs"]
    return problems


def _effect(adapted: PeftModel, base: StoredWeights, probe: Probe, exact: Tensor) -> float:
    """How far the adapter moves the logits ``exact`` of base and adapter."""
    with computing_from(adapted, base.read, base.names), adapted.disable_adapter():
        return compare_logits(logits(adapted, probe), exact, TOLERANCE).relative_error


@contextmanager
def as_stored(plan: ModelPlan, base: StoredWeights) -> Iterator[Any]:
    """Base and adapter, unmerged, or the full fine-tune, computing with the weights rounded as they are stored."""
    added = dict(plan.added)

    def dtype_of(name: str) -> torch.dtype:
        return added[name].dtype if name in added else plan.rounding.of(name, base.of(name))

    def read(name: str) -> Tensor:
        tensor = base.read(name)
        return tensor if name in plan.adapter.changed else tensor.to(dtype_of(name))

    model: Any = unwritten(plan.config) if plan.adapted is None else plan.adapted
    rounded = nullcontext() if plan.adapted is None else rounded_as_merged(plan.adapted, dtype_of)
    with computing_from(model, read, base.names), rounded:
        yield model


def _rounding_warnings(lost: float, dtype: str) -> tuple[Finding, ...]:
    if lost <= LOST_SHARE:
        return ()
    return (
        Finding(
            "FT744",
            f"rounding the merged weights to {dtype} changes the logits by {lost:.0%} of what the adapter does to them",
            help="this adapter changes little: serve it unmerged, or train it longer",
            severity="warning",
        ),
    )


def _require_memory(plan: ModelPlan) -> None:
    """Refuse before the system kills the process."""
    needed, free = merge_bytes(plan.base, plan.adapter.changed), cpu_device().free_bytes
    if free is None or needed <= free:
        return
    message = f"merging needs about {gib(needed)} GiB of memory, and {gib(free)} GiB are free"
    help = f"merge on a machine with more memory, or export the adapter alone: {_unmerged()}"
    raise FtcliError.single("FT748", message, exit_code=ExitCode.PREFLIGHT, help=help)


def require_kept_base(source: ExportSource) -> None:
    """Raises FtcliError FT747 (exit 2) for an adapter of random weights: they are not kept, to be merged with."""
    if source.base.init != "random" or source.kind != "adapter":
        return
    raise FtcliError.single(
        "FT747",
        "the base model has random weights (model.init: random), which are not kept, so nothing can be merged with it",
        origin=source.origins.at("model.init"),
        help=f"export the adapter alone: {_unmerged()}",
    )


def _unmerged() -> str:
    """Formats that take the adapter as it is, as a recipe says it."""
    return f"export.formats: [{', '.join(exports.names(merges=False))}]"


def copy_model(source: ExportSource, folder: Path) -> None:
    """Copy a full fine-tune, which is complete already, and write its tokenizer with the template of training.

    Raises OSError: it cannot be written.
    """
    for path in sorted(source.folder.iterdir()):
        wanted = path.is_file() and path.suffix in (".safetensors", ".json", ".jinja", ".model", ".txt")
        if wanted and path.name not in PROGRESS:
            shutil.copyfile(path, folder / path.name)
    if further := passed_over(source):
        add_shard(folder, FURTHER_WEIGHTS, [copied(key, file) for key, file in further.items()])
    source_tokenizer(source).save_pretrained(str(folder))
    copy_processors(source.base, folder, offline=source.offline)


def _verify_scores(
    source: ExportSource, folder: Path, model: Any, written: StoredWeights
) -> dict[str, str | int | float]:
    """Holds the scores of what was written, as plain transformers loads it, against those of ``model``, by the size of
    the product of a hidden state and the score's weights.

    Raises FtcliError FT741 when one differs, or the tokenizer does.
    """
    tokenizer = source_tokenizer(source)
    whole = probe_batch(tokenizer, len(tokenizer))
    probe = replace(whole, input_ids=whole.input_ids[:-1], attention_mask=whole.attention_mask[:-1])  # texts alone
    wanted, states = row_scores(model, probe.input_ids, probe.attention_mask)
    scale = states.norm(dim=-1) * written.read(f"{SCORE}.weight").float().norm()
    request = model_request(folder, probe, elements(written), dtype="float32")
    answer = source.reload(request, sent(probe))
    problems = [*answer.problems, *compare_tokenizers(answer.tokenizer, tokenizer)]
    error = math.inf
    if not answer.problems:
        error = float(((answer.tensors[LOGITS].squeeze(-1) - wanted).abs() / scale).max())
    if not error <= TOLERANCE:
        problems.append(f"scores differ by {error:.3g} of their size; {TOLERANCE:.3g} is allowed")
    if problems:
        raise not_verified(folder, problems)
    return {"relative_error": error, "tolerance": TOLERANCE, "loaded": loaded(request), **reloaded(answer)}


def verify_copy(source: ExportSource, folder: Path) -> Verified:
    """Load the copy with plain transformers; its weights must be the files', bit for bit, and its logits the source's.

    Raises FtcliError FT741 when anything differs, FT742 when the source itself is damaged.
    """
    try:
        wanted = tensor_files(source.folder) | passed_over(source)
    except (OSError, SafetensorError) as error:
        raise unusable(source.folder, f"its weights cannot be read ({error})") from error
    if source.classifier:
        stored, model = base_weights(source), unwritten(source_config(source))
        with computing_from(model, stored.read, stored.names):
            scores = _verify_scores(source, folder, model, stored)
        problems = _compare(tensor_files(folder), wanted)
        if problems:
            raise not_verified(folder, problems)
        return Verified("every weight bit for bit, scores in float32, tokenizer", {"tensors": len(wanted), **scores})
    tokenizer = source_tokenizer(source)
    rounds = getattr(local_config(source.folder), "quantization_config", None)
    shown = {} if rounds is not None else _shown(source, tokenizer)
    probe, trained, parameters = _trained(source, tokenizer, rounds=rounds is not None)
    request = model_request(folder, probe, parameters, dtype="float32" if rounds is None else "stored")
    answer = source.reload(request, {**sent(probe), **sent_with(shown)})
    if answer.problems:
        raise not_verified(folder, list(answer.problems))
    unseen, of_image = check_seen(answer, _seen(source, shown), TOLERANCE)
    problems, stops = _compare(tensor_files(folder), wanted), source_stops(source, tokenizer)
    others, facts = check_answer(answer, trained, probe, tokenizer, stops, TOLERANCE)
    if problems or others or unseen:
        raise not_verified(folder, [*problems, *others, *unseen])
    facts = {"tensors": len(wanted), **facts, **of_image, "loaded": loaded(request), **reloaded(answer)}
    return Verified("every weight bit for bit, logits, tokenizer, stop tokens" + (_SEEN if shown else ""), facts)


def _shown(source: ExportSource, tokenizer: PreTrainedTokenizerBase) -> dict[str, Tensor]:
    """A row with an image for a full fine-tune that sees; empty for others."""
    return image_probe(source.base, local_config(source.folder), tokenizer, offline=source.offline)


def _seen(source: ExportSource, shown: dict[str, Tensor]) -> Tensor | None:
    """The full fine-tune's logits."""
    if not shown:
        return None
    stored, model = base_weights(source), unwritten(local_config(source.folder))
    with computing_from(model, stored.read, stored.names):
        return seen_logits(model, shown)


def _trained(source: ExportSource, tokenizer: PreTrainedTokenizerBase, *, rounds: bool) -> tuple[Probe, Tensor, int]:
    """A probe, what the source answers to it in float32, and how many parameters it has.

    ``rounds``: its layers round in every product, so they are transformers' own.
    """
    if rounds:
        model = load_written(source.folder)
        probe = continued(model, probe_batch(tokenizer, model.get_input_embeddings().weight.shape[0]))
        return probe, logits(model, probe), sum(parameter.numel() for parameter in model.parameters())
    stored = base_weights(source)
    outline = unwritten(local_config(source.folder))
    probe = probe_batch(tokenizer, stored.shape(stored.ends[0])[0])
    return *trained_logits(outline, stored, probe), elements(stored)


def _compare(found: dict[str, TensorFile], wanted: dict[str, TensorFile]) -> list[str]:
    """Problems by the names in the files: some families' weights have others once they are loaded."""
    problems = unlike_names(found, wanted)
    for key in sorted(set(wanted) & set(found)):
        one, other = found[key].entries[key], wanted[key].entries[key]
        pieces = zip_longest(found[key].pieces(key), wanted[key].pieces(key))
        if (one.dtype, one.shape) != (other.dtype, other.shape) or any(a != b for a, b in pieces):
            problems.append(f"{key} differs")
    return shortened(problems)


def merge_bytes(base: StoredWeights, changed: Collection[str]) -> int:
    """Bytes of memory that merging and verifying take at most: they depend on the largest weight and layer alone."""
    sizes = {name: math.prod(base.shape(name)) for name in base.names}
    layers: Counter[str] = Counter()
    for name, count in sizes.items():
        found = _LAYER.match(name)
        layers[found[1] if found else name] += count
    merged = max((sizes.get(base.ties.get(name, name), 0) for name in changed), default=0)
    whole = max((count for count in layers.values() if count <= WHOLE_LAYER), default=0)
    return _BESIDE + max(_MERGED * merged, _READ * max(sizes.values(), default=0), _COMPUTED * whole)


def model_bytes(source: ExportSource) -> int:
    """Bytes on disk of a complete model in ``export.dtype``, or in the base's dtypes."""
    base = base_weights(source)
    wanted = None if source.settings.dtype == "auto" else getattr(torch, source.settings.dtype)

    def bytes_of(name: str) -> int:
        stored = base.of(name)
        dtype = getattr(torch, source.compute) if stored.packed else stored.dtype
        dtype = wanted if wanted is not None and dtype.is_floating_point else dtype
        return math.prod(base.shape(name)) * torch.empty((), dtype=dtype).element_size()

    others = [
        (file, key) for each in base.stored if not each.names for key, file in zip(each.keys, each.files, strict=True)
    ]
    others += [(file, key) for key, file in passed_over(source).items()]
    return sum(bytes_of(name) for name in stored_names(source, base)) + sum(f.entries[key].nbytes for f, key in others)
