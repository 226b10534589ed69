"""``launch.engine: auto`` on several GPUs: each has the whole model where it fits one, else a part of it. And
``launch.dp_replicate_size: auto``: each of several hosts has a copy of what is spread, where it fits there.
"""

from __future__ import annotations

from ftcli.facts.spreading import spreads, why_not_spread
from ftcli.preflight.memory.candidates import candidate, policies_by_speed
from ftcli.preflight.memory.setup import Setup
from ftcli.tables import engines


def choose_engine(setup: Setup) -> Setup:
    """The setup with an engine, and a number of copies of what that spreads, in place of `auto`. Weights that are
    trained are spread, wherever they can be: nobody needs all of their gradients and optimizer state.
    """
    if not setup.trains or setup.recipe.launch.num_processes == 1:
        return setup
    return _with_copies(_with_engine(setup))


def _with_engine(setup: Setup) -> Setup:
    recipe = setup.recipe
    if recipe.launch.engine != engines.AUTO:
        return setup
    usable = setup.method.supports.get("launch.engine")
    whole, spread = engines.by_auto(spreads=False), engines.by_auto(spreads=True)
    can_spread = (usable is None or spread in usable) and why_not_spread(recipe, setup.execution) is None
    copies = recipe.launch.copies > 1  # which only spread weights have: what forbids them is said later
    fits_one = recipe.lora is not None and _fits(setup.changed({"launch.engine": whole}))
    return setup.changed({"launch.engine": spread if copies or (can_spread and not fits_one) else whole})


def _with_copies(setup: Setup) -> Setup:
    launch, hosts = setup.recipe.launch, setup.hosts
    if launch.dp_replicate_size != "auto" or hosts == 1 or not spreads(setup.recipe):
        return setup
    each = setup.changed({"launch.dp_replicate_size": hosts})
    possible = launch.num_processes % hosts == 0 and each.spread_over > 1
    return each if possible and _fits(each) else setup


def _fits(setup: Setup) -> bool:
    """Whether a GPU has room for what it has of the model, under some policy; also where that is not known."""
    if setup.facts.shape is None:
        return True
    least = setup.changed({"train.cuda_graphs": False, "quantization.keep_dequantized": False})
    asked = least.recipe.train.gradient_checkpointing
    policies = policies_by_speed(least.under(False)) if asked == "auto" else (asked,)
    found = (candidate(least.under(name)) for name in policies)
    return any(each is None or each.level != "does not fit" for each in found)
