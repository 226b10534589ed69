"""Rules of the section `lora`: settings that exclude each other, and invalid expressions."""

from __future__ import annotations

from ftcli.facts.adapters import at_end, before_index
from ftcli.preflight.checks.context import Context, Findings
from ftcli.preflight.checks.judging import regex_findings
from ftcli.tables import quantizations


def check(context: Context) -> Findings:
    """FT264 and FT274."""
    lora, train = context.recipe.lora, context.recipe.train
    if lora is None:
        if train.loraplus_lr_ratio is not None:
            yield context.error(
                "FT274",
                "train.loraplus_lr_ratio",
                "train.loraplus_lr_ratio needs adapters, and there is no `lora` section",
                help="remove it, or add a `lora` section",
            )
        return
    if lora.layers_pattern and lora.layers_to_transform is None:
        yield context.error(
            "FT274",
            "lora.layers_pattern",
            "lora.layers_pattern has no effect without lora.layers_to_transform",
            help="add layers_to_transform, or remove it",
        )
    if isinstance(lora.exclude_modules, str):
        yield from regex_findings(context, "lora.exclude_modules", lora.exclude_modules)
    for index, pattern in enumerate(lora.layers_pattern):
        yield from regex_findings(context, f"lora.layers_pattern.{index}", before_index(pattern))
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(lora, key):
            yield from regex_findings(context, f"lora.{key}", at_end(pattern))
    yield from _kinds(context)


def _kinds(context: Context) -> Findings:
    """Yields conflicts of DoRA, and of initial values that take over a part of the base weights."""
    recipe, lora = context.recipe, context.recipe.lora
    assert lora is not None
    method = recipe.quantization.method
    packed = quantizations.row(method).freezes_base
    others = " | ".join(quantizations.names(freezes_base=False))
    if lora.use_dora and packed:
        yield context.error(
            "FT274",
            "lora.use_dora",
            f"use_dora does not work with quantization.method: {method}: DoRA needs the norm of each full weight",
            help=f"use quantization.method: {others}, or leave out use_dora",
        )
    if not lora.changes_base:
        return
    path, said = "lora.init_lora_weights", f"init_lora_weights: {lora.init_lora_weights}"
    if packed:
        yield context.error(
            "FT274",
            path,
            f"{said} changes the base weights, which quantization.method: {method} freezes",
            help=f"use {others}",
        )
    if lora.use_dora:
        yield context.error(
            "FT274",
            path,
            f"DoRA with {said} cannot be saved as a plain adapter of the base",
            help="leave one of the two out",
        )
