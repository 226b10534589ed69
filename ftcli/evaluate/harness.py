"""Tasks of lm-evaluation-harness (the extra `eval`) on a model that is loaded, patched and adapted already."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ftcli.errors import ExitCode, FtcliError, first_line
from ftcli.evaluate.batching import halved, row_too_large
from ftcli.model.backbone import compute_context
from ftcli.plain import JsonMap
from ftcli.plan.precision import DtypePlan
from ftcli.reporting import Reporter

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def run_harness(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    batch_size: int,
    limit: int | None,
    max_length: int,
    plan: DtypePlan,
    device: torch.device,
    reporter: Reporter,
) -> dict[str, dict[str, float]]:
    """The harness's own metrics of each task, and of each group of tasks, by name ("acc", "acc_norm_stderr", ...).

    Args:
        limit: Rows of each task; None for all.
        max_length: Longest input in tokens; longer ones lose their beginning, as the harness does it.

    Raises:
        FtcliError: FT766 (exit 2) for a task that it does not know or cannot prepare, FT761 (exit 5) when a single row
            does not fit into memory. A batch that does not fit is halved and the tasks begin again, with the warning
            FT764.
        ModuleNotFoundError: the package is not installed, which preflight says before (FT253).
    """
    was_training = model.training
    model.eval()
    try:
        while True:
            results = None
            try:
                with compute_context(device, plan.compute, plan.autocast):
                    results = _evaluate(model, tokenizer, tasks, batch_size, limit, max_length)
            except torch.OutOfMemoryError as error:
                if batch_size == 1:
                    raise row_too_large("lm-evaluation-harness", None) from error
            if results is not None:
                return _metrics(results)
            tried, batch_size = batch_size, batch_size // 2  # not in the except block: it holds the batch's tensors
            reporter.finding(halved("lm-evaluation-harness", tried, batch_size))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    finally:
        model.train(was_training)


def _evaluate(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    batch_size: int,
    limit: int | None,
    max_length: int,
) -> JsonMap:
    harness = importlib.import_module("lm_eval")
    adapter = importlib.import_module("lm_eval.models.huggingface")
    wrapped = adapter.HFLM(
        pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size, max_length=max_length
    )
    try:
        results: JsonMap = harness.simple_evaluate(
            model=wrapped, tasks=list(tasks), limit=limit, log_samples=False, bootstrap_iters=0
        )
    except (KeyError, ValueError, OSError) as error:
        raise FtcliError.single(
            "FT766",
            f"lm-evaluation-harness cannot run {', '.join(tasks)}: {type(error).__name__}: {first_line(error)}",
            exit_code=ExitCode.RECIPE,
            help="`lm_eval ls tasks` lists the tasks; most download their data from the Hub",
        ) from error
    return results


def _metrics(results: JsonMap) -> dict[str, dict[str, float]]:
    """Numbers only, without the harness's filter where it is the default one: "acc,none" is "acc"."""
    found: dict[str, dict[str, float]] = {}
    for table in ("results", "groups"):
        for name, values in results.get(table, {}).items():
            found[name] = {
                key.removesuffix(",none"): float(value)
                for key, value in values.items()
                if isinstance(value, int | float) and not isinstance(value, bool) and "," in key
            }
    return found
