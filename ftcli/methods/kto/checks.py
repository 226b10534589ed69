"""Rules of the section ``preference`` under KTO, what its losses need and do not read; and the memory of a step."""

from __future__ import annotations

from ftcli.config.recipe import Recipe
from ftcli.methods.preference.checks import another_model, cache, high_rate, losses_of, reference_bytes
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.plan.run import MethodMemory, RunPlan
from ftcli.preflight.checks.context import Context, Findings
from ftcli.tables import preference_losses

#: Rows of a step below which the KL is little more than noise; the paper's steps have 8 to 128.
_FEW_ROWS = 8
#: Settings of pairs.
_OF_PAIRS = ("label_smoothing", "gamma", "ld_alpha", "share_prompts", "use_weighting")


def check(context: Context) -> Findings:
    """FT282 for settings that contradict the loss, FT283 (a warning) for values that are known not to work."""
    settings = context.recipe.preference or PreferenceConfig()
    names = losses_of("kto", settings)
    if len(names) != 1 or names[0][1] != 1 or preference_losses.row(names[0][0]).paired:
        yield context.error(
            "FT282",
            "preference.loss",
            f"preference.loss {' + '.join(name for name, _ in names) or 'without a name'} is not one loss of labelled "
            "answers",
            help=f"use one of {', '.join(preference_losses.names(paired=False))}",
        )
        return
    yield from _ignored(context)
    if preference_losses.row(names[0][0]).estimates_kl:
        yield from _rows(context)
    elif context.says("preference.kl_rows"):
        message = f"preference.kl_rows has no meaning for {names[0][0]}, which needs no KL"
        yield context.error("FT282", "preference.kl_rows", message, help="remove it, or use loss: kto")
    yield from cache(context, settings)
    yield from high_rate(context)


def _ignored(context: Context) -> Findings:
    for name in _OF_PAIRS:
        if context.says(f"preference.{name}"):
            message = f"preference.{name} is about pairs of answers, and train.method kto has none"
            yield context.error("FT282", f"preference.{name}", message, help="remove it")
    settings = context.recipe.preference
    if settings is not None and settings.reference == "none":
        message = "train.method kto compares with a reference, and preference.reference is none"
        yield context.error("FT282", "preference.reference", message, help="remove preference.reference")
    yield from another_model(context, settings or PreferenceConfig())


def _rows(context: Context) -> Findings:
    rows = rows_a_step(context.recipe)
    remedy = "raise train.per_device_train_batch_size or train.gradient_accumulation_steps"
    if rows == 1:
        message = "a step of one row: its KL is estimated from the answers to other prompts, and there are none"
        help = f"{remedy}, or use preference.loss: apo_zero_unpaired, which needs none"
        yield context.error("FT282", "train.per_device_train_batch_size", message, help)
    elif rows < _FEW_ROWS:
        message = f"a step of {rows} rows: its KL, estimated from them, is little more than noise"
        yield context.warning("FT283", "train.per_device_train_batch_size", message, f"{remedy}; 8 to 128 are usual")


def rows_a_step(recipe: Recipe) -> int:
    """Rows of an optimizer step, over all processes."""
    train = recipe.train
    return train.per_device_train_batch_size * train.gradient_accumulation_steps * recipe.launch.row_shares


def memory(plan: RunPlan) -> MethodMemory:
    """Rows of up to ``data.max_seq_len`` tokens, or this rank's part of them. The loss takes log-probabilities from
    hidden states. The passes of the reference and of mismatched rows keep nothing, and are over before the policy's
    begins.
    """
    recipe = plan.recipe
    return MethodMemory(
        seq_len=recipe.data.max_seq_len,
        loss_bytes=plan.log_prob_bytes(plan.rows * -(-recipe.data.max_seq_len // plan.shares)),
        reference_bytes=reference_bytes(plan),
    )
