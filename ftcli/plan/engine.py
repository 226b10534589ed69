"""``launch.engine: auto`` on several GPUs: each has the whole model where it fits one, else a part of it. And
``launch.dp_replicate_size: auto``: each of several hosts has a copy of what is sharded, where it fits there.
"""

from __future__ import annotations

from ftcli.plan.execution import why_not_sharded
from ftcli.plan.memory.candidates import candidate, policies_by_speed
from ftcli.plan.run import RunPlan
from ftcli.tables import engines


def choose_engine(plan: RunPlan) -> RunPlan:
    """The setup with an engine, and a number of copies of what it shards, in place of `auto`. Weights that are
    trained are sharded, wherever they can be: nobody needs all of their gradients and optimizer state.
    """
    if not plan.trains or plan.recipe.launch.num_processes == 1:
        return plan
    return _with_copies(_with_engine(plan))


def _with_engine(plan: RunPlan) -> RunPlan:
    recipe = plan.recipe
    if recipe.launch.engine != engines.AUTO:
        return plan
    usable = plan.method.supports.get("launch.engine")
    whole, sharded = engines.by_auto(shards=False), engines.by_auto(shards=True)
    can_shard = (usable is None or sharded in usable) and why_not_sharded(recipe, plan.facts, plan.execution) is None
    copies = recipe.launch.copies > 1  # which only sharded weights have: what forbids them is said later
    fits_one = recipe.lora is not None and _fits(plan.changed({"launch.engine": whole}))
    return plan.changed({"launch.engine": sharded if copies or (can_shard and not fits_one) else whole})


def _with_copies(plan: RunPlan) -> RunPlan:
    launch, hosts = plan.recipe.launch, plan.hosts
    if launch.dp_replicate_size != "auto" or hosts == 1 or not plan.recipe.launch.is_sharded:
        return plan
    each = plan.changed({"launch.dp_replicate_size": hosts})
    possible = launch.num_processes % hosts == 0 and each.shard_size > 1
    return each if possible and _fits(each) else plan


def _fits(plan: RunPlan) -> bool:
    """True if a GPU has room for its part of the model under some policy, or if that is not known."""
    least = plan.changed({"train.cuda_graphs": False, "quantization.keep_dequantized": False})
    asked = least.recipe.train.gradient_checkpointing
    policies = policies_by_speed(least.under(False)) if asked == "auto" else (asked,)
    found = (candidate(least.under(name)) for name in policies)
    return any(each is None or each.level != "does not fit" for each in found)
