"""From a preflight report to a model, a tokenizer and tokenized data on a device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from ftcli.config import Recipe
from ftcli.data.ledger import mostly_untrained
from ftcli.data.order import Epochs, epochs_of, padding_of
from ftcli.data.prepare import Prepared, prepare
from ftcli.data.template import Renderer
from ftcli.data.tokens import Tokens, TokenTable
from ftcli.labels import IGNORE_INDEX
from ftcli.model.load import align_special_tokens, load_model, load_tokenizer, stop_token_ids
from ftcli.model.lora import apply_lora, load_adapter
from ftcli.preflight.memory.held import Offloaded
from ftcli.preflight.report import PreflightReport
from ftcli.reporting import Session
from ftcli.run.inputs import Inputs, weights_fingerprint
from ftcli.tables import quantizations
from ftcli.units import gib

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


#: The self-check takes the longest of this many rows.
LOOKED_AT = 512


@dataclass(frozen=True, slots=True)
class Texts:
    """A tokenizer and the ids that end a turn: all that data needs of a model, and no weights."""

    tokenizer: PreTrainedTokenizerBase
    stops: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Built:
    """A model on its device."""

    model: PreTrainedModel | PeftModel
    device: torch.device


@dataclass(frozen=True, slots=True)
class KernelReport:
    """The manifest's table of layers, and the self-check's result when any layer is on a kernel."""

    table: list[dict[str, Any]]
    self_check: dict[str, Any] | None

    def summary(self) -> str:
        """One line for people."""
        on = sum(bool(entry["on"]) for entry in self.table)
        reasons = sorted({str(entry["reason"]) for entry in self.table if not entry["on"]})
        text = f"kernels: {on} of {len(self.table)} layers on" if self.table else "kernels: off"
        if reasons:
            text += f" ({'; '.join(reasons[:3])})"
        if self.self_check is not None:
            worst = self.self_check["worst"]
            text += f"; self-check passed (largest gradient difference {worst['gradient']:.1e} in {worst['layer']})"
        return text


def device_of(report: PreflightReport) -> torch.device:
    """The torch device that preflight looked at."""
    return torch.device("cuda", 0) if report.device.kind == "cuda" else torch.device("cpu")


def texts_of(recipe: Recipe, report: PreflightReport, session: Session) -> Texts:
    """The recipe's tokenizer and stop tokens.

    The tokenizer carries the recipe's chat template, so that whatever is saved with it renders as training did.
    """
    tokenizer = load_tokenizer(recipe.model, offline=session.offline)
    if recipe.data.chat_template is not None:
        tokenizer.chat_template = Renderer(tokenizer, recipe.data.chat_template).source
    return Texts(tokenizer, stop_token_ids(report.facts, tokenizer))


def tokenized(recipe: Recipe, session: Session, texts: Texts, name: Literal["train", "eval"]) -> Prepared:
    """Training or held-out data as token ids; what was found and done is told to the reporter."""
    sources = recipe.data.train if name == "train" else recipe.data.eval
    prepared = prepare(
        sources,
        recipe.data,
        texts.tokenizer,
        texts.stops,
        cache_dir=session.cache_dir,
        offline=session.offline,
        reporter=session.reporter,
    )
    for finding in prepared.findings:
        session.reporter.finding(finding)
    for ledger, cached in zip(prepared.ledgers, prepared.from_cache, strict=True):
        session.reporter.info(
            f"data.{name}: {ledger.name}: {ledger.layout}, {ledger.kept_rows:,} of {ledger.rows:,} rows, "
            f"{ledger.supervised_tokens:,} of {ledger.tokens:,} tokens trained"
            + (f", {ledger.dropped_rows:,} rows dropped" if ledger.dropped_rows else "")
            + (f", {ledger.truncated_rows:,} rows truncated" if ledger.truncated_rows else "")
            + (" (tokenized earlier)" if cached else "")
        )
    return prepared


def training_epochs(recipe: Recipe, session: Session, prepared: Prepared) -> Epochs:
    """What an epoch of training holds; says so where it is little of the tokens, a mixture, or packed."""
    weights = [source.weight for source in recipe.data.train]
    shares = [float(weight) for weight in weights if weight is not None]
    epochs = epochs_of(
        prepared.sequences,
        shares if len(shares) == len(weights) else None,
        packing=recipe.data.packing,
        capacity=recipe.data.max_seq_len,
        seed=recipe.run.seed,
    )
    untrained = mostly_untrained(prepared.ledgers, recipe.data.loss_on)
    if untrained is not None:
        session.reporter.finding(untrained)
    for ledger, seen in zip(prepared.ledgers, _seen(epochs, prepared.sequences), strict=True):
        if shares:
            times = seen / ledger.kept_rows
            session.reporter.info(f"data.train: {ledger.name}: {seen:,} rows an epoch, each seen {times:.2f} times")
    if epochs.packs is not None:
        real, padding = padding_of(epochs, prepared.sequences.lengths, recipe.train.per_device_train_batch_size)
        session.reporter.info(
            f"packing: {len(epochs.packs.rows):,} rows in {len(epochs.packs):,} sequences of up to "
            f"{recipe.data.max_seq_len:,} tokens, {padding / (real + padding):.1%} padding"
        )
    return epochs


def _seen(epochs: Epochs, table: TokenTable) -> list[int]:
    """Rows of each source in an epoch."""
    if epochs.packs is None:
        return list(epochs.mix.counts)
    starts = np.asarray(table.starts)
    return [int(count) for count in np.histogram(epochs.packs.rows, bins=starts)[0]]


def build_base(
    recipe: Recipe,
    report: PreflightReport,
    session: Session,
    texts: Texts,
    *,
    weights: Path | None = None,
    num_layers: int | None = None,
) -> Built:
    """The base model, or the full fine-tune saved in ``weights``."""
    device = device_of(report)
    session.reporter.info(
        f"model: {weights or recipe.model.name_or_path} ({recipe.model.init}) in {report.plan.parameter}"
        f"{_stored(recipe, report)} on {device}"
    )
    if report.memory is not None and report.memory.offloaded is not None:
        pinned = gib(report.memory.pinned_host_bytes)
        session.reporter.info(f"activations: offloaded by {report.memory.offloaded}, {pinned} GiB of host memory")
    model = load_model(
        recipe.model,
        report.facts,
        report.plan,
        device=device,
        seed=recipe.run.seed,
        offline=session.offline,
        source=str(weights) if weights is not None else None,
        num_layers=num_layers,
        quantization=recipe.quantization if weights is None else None,
        dequantized_layers=_dequantized_layers(recipe, report),
    )
    align_special_tokens(model, texts.tokenizer, texts.stops)
    return Built(model, device)


def _dequantized_layers(recipe: Recipe, report: PreflightReport) -> int:
    """Decoder layers that are held dequantised; a family without arithmetic has all of them or none."""
    if report.memory is not None:
        return report.memory.dequantized_layers
    return sys.maxsize if recipe.quantization.keep_dequantized is True else 0


def offloaded_of(report: PreflightReport) -> Offloaded:
    """What ``gradient_checkpointing: offload`` sends to the host, as preflight chose it."""
    return (report.memory.offloaded if report.memory is not None else None) or "halves"


def _stored(recipe: Recipe, report: PreflightReport) -> str:
    method, layers = recipe.quantization.method, _dequantized_layers(recipe, report)
    if quantizations.row(method).quantize is None:
        return ""
    held = "" if not layers else f" ({'all' if report.memory is None else layers} decoder layers held dequantized)"
    return f", linear layers in {method}{held}"


def quantization_table(built: Built) -> list[dict[str, Any]]:
    """The manifest's table of quantised layers; empty for a model without."""
    from ftcli.model.quantized import quantized_layers

    return quantized_layers(built.model)


def with_adapters(built: Built, recipe: Recipe, report: PreflightReport) -> Built:
    """The model to train: with fresh adapters under LoRA, as it is for full fine-tuning."""
    if recipe.lora is None:
        return built
    return Built(apply_lora(built.model, recipe.lora, report.plan, seed=recipe.run.seed), built.device)


def with_saved_adapter(built: Built, folder: Path) -> Built:
    """The model with the adapter of a finished run."""
    return Built(load_adapter(built.model, folder), built.device)


def with_kernels(built: Built, recipe: Recipe, report: PreflightReport, rows: Sequence[Tokens]) -> KernelReport:
    """Puts the model on the kernels and checks it on a few ``rows``; the model is changed in place.

    Raises FtcliError FT705 under ``kernels: triton`` when a layer cannot be fused, FT704 when the self-check fails.
    """
    from ftcli.data.collate import PaddingCollator
    from ftcli.model.patch import patch
    from ftcli.model.selfcheck import ROWS, self_check

    applied = patch(built.model, recipe.model.kernels)
    if not any(entry.on for entry in applied.table):
        return KernelReport(applied.as_dicts(), None)
    longest = sorted(rows[:LOOKED_AT], key=_trained, reverse=True)[:ROWS]
    batch = PaddingCollator(0)([{"input_ids": s.input_ids, "labels": s.labels} for s in longest])
    on_device = {name: value.to(built.device) for name, value in batch.items()}
    check, applied = self_check(built.model, applied, recipe.model.kernels, on_device, report.plan)
    return KernelReport(applied.as_dicts(), check.as_dict())


def _trained(tokens: Tokens) -> int:
    """How many tokens of a row bear loss."""
    return sum(label != IGNORE_INDEX for label in tokens.labels)


def check_packing(built: Built, report: PreflightReport, epochs: Epochs, texts: Texts) -> None:
    """Proves on a few rows that no document of a pack sees another one; the model leaves as it came.

    Raises FtcliError FT443 (exit 3) when one does.
    """
    from ftcli.trainers.isolation import check_isolation

    check_isolation(
        built.model,
        epochs.sequences[:LOOKED_AT],
        report.plan,
        built.device,
        pad_token_id=int(texts.tokenizer.pad_token_id),
    )


def inputs_of(
    recipe: Recipe, report: PreflightReport, texts: Texts, built: Built, tokens_sha256: str | None = None
) -> Inputs:
    """What a run that continues has to be given again."""
    local = report.facts.source in ("bundled model", "local folder") and recipe.model.init == "pretrained"
    return Inputs(
        chat_template=Renderer(texts.tokenizer, recipe.data.chat_template).source,
        tokens_sha256=tokens_sha256,
        weights=weights_fingerprint(report.facts.folder) if local else (),
        commit=getattr(built.model.config, "_commit_hash", None),
    )
