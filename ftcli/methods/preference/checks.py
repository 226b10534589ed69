"""The section ``preference`` before anything is built, without torch: which losses it asks for and whether they compare
with a reference; what a loss needs, what it ignores, and values that are known not to work; the memory of a step.
"""

from __future__ import annotations

import math
from typing import Literal

from ftcli.assets import BUNDLED
from ftcli.config.model import ModelConfig
from ftcli.config.recipe import Recipe
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.plan.run import MethodMemory, OtherModel, RunPlan
from ftcli.preflight.checks.context import Context, Findings
from ftcli.tables import preference_losses

#: From this learning rate on, preference training is known to end in repetition (docs/preference.md).
_HIGHEST_RATE = 1e-4
#: References that are no other model.
_WORDS = (None, "start", "none")


def losses_of(method: str, settings: PreferenceConfig) -> tuple[tuple[str, float], ...]:
    """Name and weight of each loss; the one that a method is named after where the recipe names none."""
    if settings.loss is None:
        return ((method if method in preference_losses.names() else "sigmoid", 1.0),)
    if isinstance(settings.loss, str):
        return ((settings.loss, 1.0),)
    return tuple((one.name, one.weight) for one in settings.loss)


def beta_of(name: str, settings: PreferenceConfig) -> float:
    """The recipe's beta, or the loss's default; NaN where it has none."""
    default = preference_losses.row(name).beta
    return settings.beta if settings.beta is not None else math.nan if default is None else default


def compares(method: str, settings: PreferenceConfig) -> bool:
    return settings.reference != "none" if settings.reference is not None else _needs_one(method, settings)


def _needs_one(method: str, settings: PreferenceConfig) -> bool:
    return any(preference_losses.row(name).reference for name, _ in losses_of(method, settings))


def other_model(recipe: Recipe) -> OtherModel | None:
    """The reference where that is another model. It is held as the trained one is, quantization and dtype included."""
    settings = recipe.preference
    if settings is None or settings.reference in _WORDS or not _needs_one(recipe.train.method, settings):
        return None
    named = {"name_or_path": settings.reference, "revision": settings.reference_revision}
    model: ModelConfig = recipe.model.model_copy(update={**named, "init": "pretrained", "tokenizer": None})
    return OtherModel("preference.reference", model)


def caches(recipe: Recipe, how: Literal["surely", "possibly"]) -> bool:
    """True if the recipe alone says that the reference is scored ahead of training; or leaves it possible.

    Full fine-tuning needs no second model then, and computes no more than it would in its first epoch. Another model
    always is: it is gone before the trained one is loaded.
    """
    settings = recipe.preference or PreferenceConfig()
    if other_model(recipe) is not None:
        return True
    if settings.reference_cache == "off" or not compares(recipe.train.method, settings):
        return False
    return how == "possibly" or settings.reference_cache != "auto" or recipe.lora is None


def start_adapter(recipe: Recipe) -> str | None:
    """The adapter that training goes on from, where that is what answers are compared with."""
    settings = recipe.preference or PreferenceConfig()
    if recipe.lora is None or other_model(recipe) is not None or not compares(recipe.train.method, settings):
        return None
    return recipe.lora.start_from


def needs_second_model(recipe: Recipe) -> bool:
    """True if a second model is loaded to compare with: full fine-tuning whose reference is computed in each step."""
    settings = recipe.preference or PreferenceConfig()
    return recipe.lora is None and compares(recipe.train.method, settings) and not caches(recipe, "surely")


# -- rules ---------------------------------------------------------------------------------------------------------


def check(context: Context) -> Findings:
    """FT282 for settings that contradict a loss, FT283 (a warning) for values that are known not to work."""
    recipe = context.recipe
    settings = recipe.preference or PreferenceConfig()
    names = [name for name, _ in losses_of(recipe.train.method, settings)]
    if not names:
        message = "preference.loss is empty, so nothing is compared"
        yield context.error("FT282", "preference.loss", message, "name a loss")
        return
    labelled = [name for name in names if not preference_losses.row(name).paired]
    if labelled:
        yield context.error(
            "FT282",
            "preference.loss",
            f"preference.loss {labelled[0]} is of single answers with a label, and {context.method.title} has pairs",
            help="use train.method: kto, which takes pairs as well, or another loss",
        )
        return
    yield from _beta(context, settings, names)
    yield from _ignored(context, settings, names)
    yield from _reference(context, settings, names)
    yield from another_model(context, settings)
    yield from cache(context, settings)
    yield from high_rate(context)


def high_rate(context: Context) -> Findings:
    """FT283 for a learning rate that ends in repetition."""
    rate = context.recipe.train.learning_rate
    # 2e-4 as well, the default of supervised fine-tuning: it is none here. The bundled models are a thousandth of those
    # that recipes are published for.
    if rate >= _HIGHEST_RATE and not context.recipe.model.name_or_path.startswith(BUNDLED):
        message = f"a learning rate of {rate:g} is high for {context.method.title}: answers tend to become repetitive"
        help = "1e-5 with adapters and 5e-7 for full fine-tuning are what published recipes lie around"
        yield context.warning("FT283", "train.learning_rate", message, help=help)


def _beta(context: Context, settings: PreferenceConfig, names: list[str]) -> Findings:
    for name in names:
        row, beta = preference_losses.row(name), beta_of(name, settings)
        if row.beta is None and settings.beta is None:
            suggested = "0.5, which asks for 1 nat a token" if name == "ipo" else "5"
            message = f"preference.loss {name} compares nats a token: a beta for whole answers would do nothing"
            yield context.error("FT282", "preference.loss", message, help=f"write preference.beta, such as {suggested}")
        elif row.averaged and name not in ("ipo", "orpo") and beta < 1:
            yield context.warning(
                "FT283",
                "preference.beta",
                f"preference.beta {beta:g} with {name}: it compares nats a token, so its gradient stays near that of "
                "the start",
                help="2 to 10 are usual",
            )
        elif name == "ipo" and beta < 0.25:
            message = f"preference.beta {beta:g} with ipo asks for a margin of {1 / (2 * beta):g} nats a token"
            yield context.warning("FT283", "preference.beta", message, help="0.5 or more is usual")


def _ignored(context: Context, settings: PreferenceConfig, names: list[str]) -> Findings:
    if settings.label_smoothing and not any(preference_losses.row(name).smooths for name in names):
        takes = ", ".join(name for name in preference_losses.names() if preference_losses.row(name).smooths)
        message = f"preference.label_smoothing has no meaning for {', '.join(names)}"
        yield context.error("FT282", "preference.label_smoothing", message, help=f"remove it, or use one of {takes}")
    elif settings.label_smoothing and (sharp := [one for one in names if not preference_losses.row(one).smooths]):
        message = f"preference.label_smoothing has no meaning for {', '.join(sharp)}, a part of this mixture"
        yield context.warning("FT283", "preference.label_smoothing", message, help="the other losses are smoothed")
    if context.says("preference.gamma") and "simpo" not in names:
        help = "remove it, or use loss: simpo"
        yield context.error("FT282", "preference.gamma", "preference.gamma is read by simpo only", help=help)
    for name in ("desirable_weight", "undesirable_weight", "kl_rows"):
        if context.says(f"preference.{name}"):
            message = f"preference.{name} is read under train.method: kto only"
            yield context.error("FT282", f"preference.{name}", message, help="remove it, or use train.method: kto")


def _reference(context: Context, settings: PreferenceConfig, names: list[str]) -> Findings:
    needing = [name for name in names if preference_losses.row(name).reference]
    if needing and settings.reference == "none":
        message = f"preference.loss {needing[0]} compares with a reference, and preference.reference is none"
        help = "remove preference.reference, or use simpo, cpo or orpo"
        yield context.error("FT282", "preference.reference", message, help=help)
    if not needing and settings.reference not in (None, "none"):
        yield context.error(
            "FT282",
            "preference.reference",
            f"preference.loss {', '.join(names)} compares with nothing, and preference.reference is "
            f"{settings.reference}",
            help="remove preference.reference",
        )


def another_model(context: Context, settings: PreferenceConfig) -> Findings:
    """FT282 for a reference that is no word and no model, and for settings of another model that have no effect."""
    key, name = "preference.reference", settings.reference
    if name is None or name in _WORDS:
        if settings.reference_revision is not None:
            message = "preference.reference_revision is of another model, and preference.reference names none"
            yield context.error("FT282", "preference.reference_revision", message, help="remove it, or name the model")
    elif "/" not in name and not name.startswith(BUNDLED):
        help = f"write start or none; a model is written OWNER/NAME, and a folder ./{name}"
        yield context.error("FT282", key, f"{key} {name} is no known word", help=help)
    elif settings.reference_cache == "off":
        message = f"preference.reference_cache: off would have {name} in memory beside the model that is trained"
        help = "remove it: another model is asked once, before the trained one is loaded"
        yield context.error("FT282", "preference.reference_cache", message, help=help)


def cache(context: Context, settings: PreferenceConfig) -> Findings:
    """FT282 for a cache that is no word and no folder, or of nothing; FT283 (a warning) for one that does not pay."""
    key, folder, train = "preference.reference_cache", settings.reference_cache, context.recipe.train
    unit = "row" if context.method.unit == 1 else "pair"
    if folder in ("auto", "off"):
        return
    if "/" not in folder:
        help = f"write auto, off, or ./{folder} for a folder"
        yield context.error("FT282", key, f"{key} {folder} is no known word", help=help)
    elif not compares(train.method, settings):
        yield context.error("FT282", key, f"{key}: there is no reference to keep", help=f"remove {key}")
    elif other_model(context.recipe) is not None:
        return  # it is asked ahead in any case
    elif context.recipe.lora is not None and train.max_steps is None and train.num_train_epochs <= 1:
        message = f"{key}: in one epoch each {unit} is seen once, so this run computes as much as without"
        help = "it pays from the second run or epoch on; auto does not fill a cache for one"
        yield context.warning("FT283", key, message, help=help)


def memory(plan: RunPlan) -> MethodMemory:
    """Two rows a pair, up to ``data.max_seq_len`` each, at worst with nothing in common; or this rank's part of them.
    What they are known to share is no answer's.
    The loss takes log-probabilities from hidden states, which are picked out for it where prompts are shared; the
    reference's pass keeps nothing, and is over before the policy's begins.

    """
    recipe = plan.recipe
    tokens = plan.rows * -(-(recipe.data.max_seq_len - plan.shared_tokens) // plan.shares)
    picked = 2 * tokens * plan.sizes.hidden_size * plan.dtypes.compute_bytes  # and their gradient
    return MethodMemory(
        seq_len=recipe.data.max_seq_len,
        loss_bytes=plan.log_prob_bytes(tokens) + (picked if plan.execution.batches.shares_prompts else 0),
        reference_bytes=reference_bytes(plan),
    )


def reference_bytes(plan: RunPlan) -> int:
    """Bytes of a second model, sharded like the first, where full fine-tuning computes its reference in each step; and
    of what an adapter held that is gone on from. Other adapters can be switched off.
    """
    if needs_second_model(plan.recipe):
        return plan.model_bytes
    return plan.dtypes.trained_bytes * plan.trained.elements if start_adapter(plan.recipe) is not None else 0
