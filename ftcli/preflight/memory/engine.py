"""``launch.engine: auto`` on several GPUs: each has the whole model where it fits one, else a part of it."""

from __future__ import annotations

from ftcli.facts.spreading import why_not_spread
from ftcli.preflight.memory.candidates import candidate, policies_by_speed
from ftcli.preflight.memory.setup import Setup
from ftcli.tables import engines


def choose_engine(setup: Setup) -> Setup:
    """The setup with an engine in place of `auto`. Weights that are trained are spread, wherever they can be: nobody
    needs all of their gradients and optimizer state.
    """
    recipe = setup.recipe
    if not setup.trains or recipe.launch.engine != engines.AUTO or recipe.launch.num_processes == 1:
        return setup
    usable = setup.method.supports.get("launch.engine")
    whole, spread = engines.by_auto(spreads=False), engines.by_auto(spreads=True)
    can_spread = (usable is None or spread in usable) and why_not_spread(recipe, setup.execution) is None
    copies = recipe.launch.dp_replicate_size > 1  # which only spread weights have: what forbids them is said later
    spreads = copies or (can_spread and (recipe.lora is None or not _fits_one(setup, whole)))
    return setup.changed({"launch.engine": spread if spreads else whole})


def _fits_one(setup: Setup, engine: str) -> bool:
    """Whether the whole model fits a GPU under some policy; also where that is not known."""
    if setup.facts.shape is None:
        return True
    whole = setup.changed({"launch.engine": engine, "train.cuda_graphs": False, "quantization.keep_dequantized": False})
    asked = whole.recipe.train.gradient_checkpointing
    policies = policies_by_speed(whole.under(False)) if asked == "auto" else (asked,)
    found = (candidate(whole.under(name)) for name in policies)
    return any(each is None or each.level != "does not fit" for each in found)
