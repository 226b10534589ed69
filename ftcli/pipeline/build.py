"""From a preflight report to a model, a tokenizer and tokenized data on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ftcli.config import Recipe
from ftcli.data.prepare import Prepared, Tokens, prepare
from ftcli.model.load import align_special_tokens, load_model, load_tokenizer, stop_token_ids
from ftcli.model.lora import apply_lora, load_adapter
from ftcli.preflight.report import PreflightReport
from ftcli.reporting import Session

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
    """The recipe's tokenizer and stop tokens."""
    tokenizer = load_tokenizer(recipe.model, offline=session.offline)
    return Texts(tokenizer, stop_token_ids(report.facts, tokenizer))


def tokenized(recipe: Recipe, session: Session, texts: Texts, name: Literal["train", "eval"]) -> Prepared:
    """Training or held-out data as token ids; what was found and done is told to the reporter."""
    sources = recipe.data.train if name == "train" else recipe.data.eval
    prepared = prepare(sources, recipe.data, texts.tokenizer, texts.stops)
    for ledger in prepared.ledgers:
        session.reporter.info(
            f"data.{name}: {ledger.name}: {ledger.layout}, {ledger.kept_rows} of {ledger.rows} rows, "
            f"{ledger.supervised_tokens:,} of {ledger.tokens:,} tokens trained"
            + (f", {ledger.dropped_rows} rows dropped" if ledger.dropped_rows else "")
            + (f", {ledger.truncated_rows} rows truncated" if ledger.truncated_rows else "")
        )
    return prepared


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
        f"model: {weights or recipe.model.name_or_path} ({recipe.model.init}) in {report.plan.parameter} on {device}"
    )
    model = load_model(
        recipe.model,
        report.facts,
        report.plan,
        device=device,
        seed=recipe.run.seed,
        offline=session.offline,
        source=str(weights) if weights is not None else None,
        num_layers=num_layers,
    )
    align_special_tokens(model, texts.tokenizer, texts.stops)
    return Built(model, device)


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
    longest = sorted(rows, key=lambda s: sum(label != -100 for label in s.labels), reverse=True)[:ROWS]
    batch = PaddingCollator(0)([{"input_ids": s.input_ids, "labels": s.labels} for s in longest])
    on_device = {name: value.to(built.device) for name, value in batch.items()}
    check, applied = self_check(built.model, applied, recipe.model.kernels, on_device, report.plan)
    return KernelReport(applied.as_dicts(), check.as_dict())
