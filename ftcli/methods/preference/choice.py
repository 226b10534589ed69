"""Which losses a recipe asks for, on which scale, and whether they compare with a reference; without torch."""

from __future__ import annotations

import math
from typing import Literal

from ftcli.config.recipe import Recipe
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.tables import preference_losses


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
    """Whether there is a reference."""
    if settings.reference is not None:
        return settings.reference == "start"
    return any(preference_losses.row(name).reference for name, _ in losses_of(method, settings))


def caches(recipe: Recipe, how: Literal["surely", "possibly"]) -> bool:
    """Whether the recipe alone says that the reference is scored ahead of training; or leaves it possible.

    Full fine-tuning needs no second model then, and computes no more than it would in its first epoch.
    """
    settings = recipe.preference or PreferenceConfig()
    if settings.reference_cache == "off" or not compares(recipe.train.method, settings):
        return False
    return how == "possibly" or settings.reference_cache != "auto" or recipe.lora is None


def needs_second_model(recipe: Recipe) -> bool:
    """Whether a second model is loaded to compare with: full fine-tuning whose reference is computed in each step."""
    settings = recipe.preference or PreferenceConfig()
    return recipe.lora is None and compares(recipe.train.method, settings) and not caches(recipe, "surely")
