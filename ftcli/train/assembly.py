"""Builds a job's model: the base on its device, adapters, kernels, and the checks before a run is spent on it.

One is by trial: whether packed documents, and answers that share a prompt, see each other depends on the model's own
code, the attention backend and the kernels together. So this runs the model that will be trained, instead of asking a
list of model names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from ftcli.data.collate import Pair, lengths_once, packed_batch, padded_batch, shared_batch, shared_beginning
from ftcli.data.template import Renderer
from ftcli.data.tokens import TokenizedRow
from ftcli.errors import ExitCode, FtcliError
from ftcli.facts.adapters import start_folder
from ftcli.facts.config_file import missing_bytes
from ftcli.job import Job
from ftcli.labels import IGNORE_INDEX
from ftcli.model.backbone import base_of, compute_context, hidden_states, rotation_kept, stream_in
from ftcli.model.fsdp import RankShards, rank_shards_of, shard, unsharded_layers
from ftcli.model.initial_adapters import as_base
from ftcli.model.load import load_model
from ftcli.model.lora import apply_lora, take_adapter
from ftcli.model.lora_targets import freeze_other_parts, summary_of_targets
from ftcli.model.patch import patch
from ftcli.model.quantized import has_coarse_products
from ftcli.model.routing import Routing, same_routing
from ftcli.model.score_head import add_score_head
from ftcli.model.selfcheck import ROWS, check_head, relative_difference, rounded_otherwise, self_check
from ftcli.model.token_rows import draw_rows
from ftcli.model.tokenizer import align_special_tokens, pad_apart
from ftcli.model.trained_weights import load_weights
from ftcli.model.vision import attend_in_tower
from ftcli.plan.batches import Batches
from ftcli.plan.precision import DtypePlan
from ftcli.plan.quantization import trains_rounded
from ftcli.run.directory import RunDirectory
from ftcli.run.inputs import Inputs, WeightIdentities, base_inputs, begin, stored_weights
from ftcli.run.integrity import hold_base
from ftcli.tables import engines, quantizations
from ftcli.units import gib

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.model.patch import LayerKernel
    from ftcli.model.selfcheck import SelfCheck
    from ftcli.run.process_group import RankGroup

Model: TypeAlias = "PreTrainedModel | PeftModel"

#: What the head is checked on.
_TEXT = "Rivers rise in the mountains and end in the sea."
#: The self-check looks for long rows among this many.
LOOKED_AT = 512


@dataclass(frozen=True, slots=True)
class KernelReport:
    """The manifest's table of layers, and the self-check's result when any layer is on a kernel."""

    table: list[LayerKernel]
    self_check: SelfCheck | None

    def summary(self) -> str:
        """One line for people."""
        on = sum(entry.on for entry in self.table)
        reasons = sorted({entry.reason for entry in self.table if not entry.on})
        text = f"kernels: {on} of {len(self.table)} layers on" if on else "kernels: off"
        if reasons:
            text += f" ({'; '.join(reasons[:3])})"
        if self.self_check is not None:
            worst = self.self_check.worst
            text += f"; self-check passed (largest gradient difference {worst.gradient:.1e} in {worst.layer})"
        return text


def build_base(job: Job, *, weights: Path | None = None, num_layers: int | None = None) -> PreTrainedModel:
    """The base model, or the full fine-tune saved in ``weights``.

    Args:
        num_layers: Build only this many layers (benchmarks of random weights).

    Raises:
        FtcliError: FT335 when the loss would not stand for the model's own logits; whatever loading raises.
    """
    recipe, memory, classifier = job.recipe, job.report.memory, job.plan.method.classifier
    job.reporter.info(
        f"model: {weights or recipe.model.name_or_path} ({recipe.model.init}) in {job.dtypes.parameter}"
        f"{_stored(job)} on {job.device}"
    )
    if memory is not None and memory.offloaded is not None:
        pinned = gib(memory.pinned_host_bytes)
        job.reporter.info(f"activations: offloaded by {memory.offloaded}, {pinned} GiB of host memory")
    if weights is None:
        tell_download(job)
    parts = None if weights is not None else _parts(job)
    model = load_model(
        recipe.model,
        job.facts,
        job.dtypes,
        device=job.device,
        seed=recipe.run.seed,
        offline=job.session.offline,
        # A saved classifier has no head: the base is loaded, and then what was trained.
        source=str(weights) if weights is not None and not classifier else None,
        num_layers=num_layers,
        # A full fine-tune was never stored by a method that freezes the base.
        quantization=recipe.quantization if weights is None or trains_rounded(job.recipe) else None,
        dequantized_layers=_dequantized_layers(job),
        trained=trains_rounded(job.recipe) or (parts is not None and not parts.joins),
        shards=parts,
    )
    if job.new_tokens and weights is None:
        draw_rows(model, job.new_tokens)
    if classifier:
        pad_apart(job.tokenizer, job.stops)
    align_special_tokens(model, job.tokenizer, job.stops)
    with unsharded_layers(model):
        check_head(model, job.tokenizer(_TEXT, add_special_tokens=False)["input_ids"], job.dtypes, job.device)
    if classifier:
        add_score_head(model, recipe.run.seed)
        if weights is not None:
            load_weights(model, weights)
    return model


def to_download(job: Job) -> int:
    """Bytes of the base that loading it will download."""
    facts, model = job.facts, job.recipe.model
    if facts.is_local or model.init != "pretrained" or job.session.offline:
        return 0
    return missing_bytes(facts.name, model.revision)


def tell_download(job: Job) -> None:
    """Reports what loading the base will download, before it takes its time."""
    if missing := to_download(job):
        job.reporter.info(f"download: {gib(missing)} GiB of weights from {job.facts.name}")


def _dequantized_layers(job: Job) -> int:
    """Decoder layers that are held dequantized; a family without arithmetic has all of them or none."""
    if job.report.memory is not None:
        return job.report.memory.dequantized_layers
    return sys.maxsize if job.recipe.quantization.keep_dequantized is True else 0


def _stored(job: Job) -> str:
    method, layers = job.recipe.quantization.method, _dequantized_layers(job)
    if quantizations.row(method).quantize is None:
        return ""
    if trains_rounded(job.recipe):
        return f", linear layers trained in {method}"
    count = "all" if job.report.memory is None else layers
    held = "" if not layers else f" ({count} decoder layers held dequantized)"
    return f", linear layers in {method}{held}"


def build_trainable(job: Job, *, num_layers: int | None = None) -> Model:
    """The model to train: with fresh adapters under LoRA, as it is for full fine-tuning."""
    base = build_base(job, num_layers=num_layers)
    lora, parts = job.recipe.lora, job.recipe.model.train
    if "vision" in parts:
        attend_in_tower(base)
    if lora is None:
        freeze_other_parts(base, parts)
        return base
    model, targets = apply_lora(base, lora, job.dtypes, seed=job.recipe.run.seed, parts=parts, tokens=job.new_tokens)
    job.reporter.info(summary_of_targets(model, targets))
    if lora.start_from is not None:
        folder = start_folder(lora.start_from)
        take_adapter(model, folder)
        job.reporter.info(f"adapters go on from {folder}")
    return model


def build_reference(job: Job, rows: Sequence[TokenizedRow]) -> PreTrainedModel:
    """The model that full fine-tuning starts from, on the same kernels, frozen; a resumed run has it from its base,
    too.
    """
    job.reporter.info("reference: a second copy of the model as it starts")
    reference = build_base(job)
    freeze_other_parts(reference)
    put_on_kernels(job, reference, rows)
    reference.requires_grad_(False)
    return reference.eval()


def put_on_kernels(job: Job, model: Model, rows: Sequence[TokenizedRow]) -> KernelReport:
    """Puts the model on the kernels, in place, checks it on a few ``rows``, and tells what came of it.

    Raises FtcliError FT705 under ``kernels: triton`` when a layer cannot be fused, FT704 when the self-check fails.
    """
    kernels = job.recipe.model.kernels
    stream = job.plan.stream
    if stream != job.dtypes.parameter:
        stream_in(model, getattr(torch, stream))
    check = None
    with unsharded_layers(model):
        applied = patch(model, kernels)
        if any(entry.on for entry in applied.table):
            longest = sorted(rows[:LOOKED_AT], key=_trained, reverse=True)[:ROWS]
            batch = padded_batch(longest, 0)
            on_device = {name: value.to(job.device) for name, value in batch.items()}
            check, applied = self_check(model, applied, kernels, on_device, job.dtypes)
        if rank_shards_of(base_of(model)) is not None:
            applied.undo()
    if rank_shards_of(base_of(model)) is not None:
        applied = patch(model, kernels, joins=False)
    report = KernelReport(applied.table, check)
    job.reporter.info(report.summary())
    return report


def form_group(job: Job, group: RankGroup) -> None:
    """The ranks meet, once, ready to exchange what a step of this recipe says. All of them call it."""
    from ftcli.train.parallel import numbers_agreed

    if group.is_formed:
        return
    train = job.recipe.train
    group.form(job.device, numbers_agreed(train.gradient_accumulation_steps, train.per_device_train_batch_size))


def shard_weights(job: Job, model: Model, group: RankGroup, reference: PreTrainedModel | None = None) -> None:
    """Shards the weights of the model, which is on the kernels, over the ranks where the engine does that; and those
    of the reference that it is compared with, where that is a second model.
    """
    parts = _parts(job)
    if parts is None:
        return
    launch = job.recipe.launch
    copies = f", {launch.copies} copies of them" if launch.copies > 1 else ""
    job.reporter.info(f"weights: sharded over {launch.shard_size} processes{copies}")
    mesh = group.mesh(job.device, launch.copies)
    with group.exchanging():
        for each in (model,) if reference is None else (model, reference):
            shard(each, mesh, rank_shards_of(base_of(each)) or parts, job.dtypes)


def _parts(job: Job) -> RankShards | None:
    """The shards that this process keeps of the weights; None if it keeps all."""
    place, launch = job.session.place, job.recipe.launch
    if place is None or place.size == 1 or not engines.row(launch.engine).shards:
        return None
    mixture = job.facts.shape is not None and job.facts.shape.has_experts
    frozen = job.recipe.lora is not None or quantizations.row(job.recipe.quantization.method).quantize is not None
    return RankShards(place.rank % launch.shard_size, launch.shard_size, joins=frozen, mixture=mixture)


def _trained(tokens: TokenizedRow) -> int:
    """Number of a row's tokens that bear loss."""
    return sum(label != IGNORE_INDEX for label in tokens.labels)


def laid_out(job: Job, model: Model, rows: Sequence[TokenizedRow]) -> Batches:
    """The layout of micro-batches of ``rows``. If documents share a row, a few are put to the model, which is not
    changed, to see that none of them attends to another one; and a pair if pairs share their prompt.

    Raises FtcliError FT443 (exit 3) when one does.
    """
    batches = job.batches(model)
    if len(rows) and (job.recipe.data.packing or batches.layout == "unpadded"):
        with unsharded_layers(model):
            check_isolation(model, rows[:LOOKED_AT], job.dtypes, job.device, pad_token_id=job.pad_token_id)
            if batches.shares_prompts:
                check_branches(model, (rows[0], rows[1]), job.dtypes, job.device, pad_token_id=job.pad_token_id)
    return batches


def begin_reading(job: Job) -> WeightIdentities:
    """Begins to read the base's weight files for their identities, beside what loads them."""
    folder = stored_weights(job.facts, job.recipe.model)
    return tuple if folder is None else begin(folder)


def inputs_of(job: Job, model: Model, weights: WeightIdentities, tokens_sha256: str | None = None) -> Inputs:
    """The inputs that must be the same when the run is continued; ``weights`` from :func:`begin_reading`."""
    template = Renderer(job.tokenizer, job.recipe.data.chat_template).source
    return replace(loaded_base(job, model, weights), chat_template=template, tokens_sha256=tokens_sha256)


def loaded_base(job: Job, model: Model, weights: WeightIdentities) -> Inputs:
    """The fingerprint of the job's base model."""
    return base_inputs(job.facts, job.recipe.model, getattr(model.config, "_commit_hash", None), weights())


def hold(job: Job, model: Model, run: RunDirectory, weights: WeightIdentities | None) -> None:
    """Holds the base that was loaded against the one that a run was trained on, and tells what cannot be.

    ``weights`` from :func:`begin_reading`; None where those of the base are not used.

    Raises FtcliError FT735 (exit 2) with what differs.
    """
    recipe, now = job.recipe, loaded_base(job, model, weights or tuple)
    for finding in hold_base(run.path, recipe.model, recipe.run.seed, now, weights=weights is not None):
        job.reporter.finding(finding)


def of_reference(reference: PreTrainedModel | None, model: PreTrainedModel | PeftModel) -> AbstractContextManager[None]:
    """A block in which the reference can be computed: of adapters it is the model without them."""
    return nullcontext() if reference is not None else as_base(model)


_LONGEST = 128
#: Largest relative difference (Frobenius norm) of a document's hidden states in a pack and alone, by compute dtype:
#: other shapes round differently. A document that sees another, or has wrong positions, differs by tens of percent.
_ALONE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
#: Each layer enlarges what rounding left in the one before it: 80 layers of random weights in bfloat16 come to 0.1. So
#: a document may differ by this many times what it differs by at the head of a row, where nothing stands before it,
_ROUNDINGS = 2.0
#: if that, in turn, is at most this many times the number above: the filler behind it must not be seen, either.
#: Products coarser than the compute dtype enlarge a last place, and none may differ at the head of a row: a delta net's
#: chunks begin there as they do alone. So as much is allowed, up to this, as one more rounding of the embeddings makes.
#: In random Qwen3.5 and Llama on fp8 a document differed by 0.093 at most, 0.28 of such a rounding (2 to 24 layers),
#: one whose boundary is wrong by 0.44 at least, 1.35 of it (4 and 8 layers; torch on a CPU, 2026-11-27).
_FILLER = 5.0
#: With the same shapes and other neighbours, nothing but atomics could differ.
_NEIGHBOURS = 1e-6


@torch.no_grad()
def check_isolation(
    model: PreTrainedModel | PeftModel,
    rows: Sequence[TokenizedRow],
    plan: DtypePlan,
    device: torch.device,
    *,
    pad_token_id: int,
) -> None:
    """Compares a document's hidden states in a pack with those beside another neighbour, and with those alone.

    Raises FtcliError FT443 (exit 3) when a document's hidden states depend on its neighbours, or are NaN.
    """
    first, second = _documents(rows)
    changed = TokenizedRow(first.row, first.input_ids[::-1], first.labels)
    start, length = len(first.input_ids), len(second.input_ids)
    usual = _ALONE[plan.compute]
    was_training = model.training
    model.eval()
    with (
        rotation_kept(model),
        compute_context(device, plan.compute, plan.autocast),
        same_routing(model) as routers,
    ):
        packed = _hidden(model, [[first, second], [second]], device, pad_token_id)
        neighbour = _hidden(model, [[changed, second], [second]], device, pad_token_id)
        inside, at_head = packed[0, start : start + length], packed[1, :length]
        among_others = relative_difference(neighbour[0, start : start + length], inside)
        chosen = [router.first for router in routers]
        _to_experts_of(routers, chosen, slice(packed.shape[1], packed.shape[1] + length))
        ahead = relative_difference(at_head, _hidden(model, [[second]], device, pad_token_id)[0])
        _to_experts_of(routers, chosen, slice(start, start + length))
        alone = _hidden(model, [[second]], device, pad_token_id)[0]
        behind = relative_difference(inside, alone)
        allowed = max(usual, _ROUNDINGS * ahead)
        if behind > allowed and has_coarse_products(model):
            with rounded_otherwise(model, getattr(torch, plan.compute)):
                again = _hidden(model, [[second]], device, pad_token_id)[0]
            allowed = max(allowed, min(relative_difference(again, alone), _FILLER * usual))
    model.train(was_training)
    if not (among_others <= _NEIGHBOURS and behind <= allowed and ahead <= _FILLER * usual):  # NaN fails
        raise FtcliError.single(
            "FT443",
            "this model does not keep packed documents apart: a document's hidden states differ by "
            f"{among_others:.2g} with another neighbour, by {max(behind, ahead):.2g} without one (relative)",
            exit_code=ExitCode.PREFLIGHT,
            help="train with data.packing: false and data.padding_free: false, or try model.attention: eager and "
            "model.kernels: off",
        )


@torch.no_grad()
def check_branches(
    model: PreTrainedModel | PeftModel, pair: Pair, plan: DtypePlan, device: torch.device, *, pad_token_id: int
) -> None:
    """Compares the hidden states of a pair's second answer behind the first with those behind another one, and with
    those of its row alone.

    Raises FtcliError FT443 (exit 3) when they depend on the first answer, or are NaN.
    """
    first, second = _short(pair)
    shared = shared_beginning((first, second))
    turned = [*first.input_ids[:shared], *first.input_ids[shared:][::-1]]
    turned[shared] = first.input_ids[shared]  # what they share stays what it is
    length = len(second.input_ids)
    was_training = model.training
    model.eval()
    with (
        rotation_kept(model),
        compute_context(device, plan.compute, plan.autocast),
        same_routing(model) as routers,
    ):
        behind, start = _branch(model, (first, second), device, pad_token_id)
        other, _ = _branch(model, (TokenizedRow(first.row, turned, turned), second), device, pad_token_id)
        _to_experts_of(
            routers, [router.first for router in routers], slice(shared), slice(start, start + length - shared)
        )
        alone = _hidden(model, [[second]], device, pad_token_id)[0]
    model.train(was_training)
    among_others = relative_difference(other[start:], behind[start:])
    by_itself = relative_difference(torch.cat([behind[:shared], behind[start:]]), alone)
    if not (among_others <= _NEIGHBOURS and by_itself <= _FILLER * _ALONE[plan.compute]):
        raise FtcliError.single(
            "FT443",
            "this model does not keep the answers of a pair apart that share their prompt: the second one's hidden "
            f"states differ by {among_others:.2g} behind another first one, by {by_itself:.2g} without one (relative)",
            exit_code=ExitCode.PREFLIGHT,
            help="train with preference.share_prompts: off; train.method: reward with data.padding_free: false",
        )


def _to_experts_of(routers: Sequence[Routing], chosen: Sequence[Tensor | None], *tokens: slice) -> None:
    """Sends the next pass to the experts of these tokens of the first, which it is compared with."""
    for router, of_all in zip(routers, chosen, strict=True):
        router.first = None if of_all is None else torch.cat([of_all[some] for some in tokens])


def _short(pair: Pair) -> Pair:
    """The last tokens of what both rows begin with, and the first of what they go on with."""
    shared, half = shared_beginning(pair), _LONGEST // 2
    first, second = (
        TokenizedRow(row.row, ids := row.input_ids[max(0, shared - half) : shared + half], ids) for row in pair
    )
    return first, second


def _branch(
    model: PreTrainedModel | PeftModel, pair: Pair, device: torch.device, pad_token_id: int
) -> tuple[Tensor, int]:
    """(S, H) of a pair as it is laid out, without filler, and where its second branch begins."""
    batch, _, _ = shared_batch([pair], Batches("unpadded", "a trial", shares_prompts=True), pad_token_id)
    states = hidden_states(model, {name: value.to(device) for name, value in batch.items()}).tensor.float()
    return states[0, : int(lengths_once(pair).sum())], len(pair[0].input_ids)


def _documents(rows: Sequence[TokenizedRow]) -> tuple[TokenizedRow, TokenizedRow]:
    """Two short documents of different lengths, the second the longer one where there are two."""
    short = [TokenizedRow(row.row, row.input_ids[:_LONGEST], row.labels[:_LONGEST]) for row in rows]
    by_length = sorted(short, key=lambda row: len(row.input_ids))
    first, second = by_length[len(by_length) // 2], by_length[-1]
    if len(set(first.input_ids)) < 2:  # reversed, it would be the same
        first = TokenizedRow(
            first.row, [*second.input_ids, *second.input_ids[:1]], [*second.labels, *second.labels[:1]]
        )
    return first, second


def _hidden(
    model: PreTrainedModel | PeftModel, packs: Sequence[Sequence[TokenizedRow]], device: torch.device, pad_token_id: int
) -> Tensor:
    batch = packed_batch(packs, pad_token_id)
    inputs = {name: batch[name].to(device) for name in ("input_ids", "position_ids", "document_starts")}
    return hidden_states(model, inputs).tensor.float()
