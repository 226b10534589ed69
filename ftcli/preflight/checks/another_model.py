"""Checks of another model that a method asks before the trained one is loaded: what it is, its tokens, its memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ftcli.facts.device import DeviceFacts
from ftcli.facts.model import ModelFacts, read_facts
from ftcli.facts.tokenizer import foreign_tokens, foreign_tokens_finding, vocabulary
from ftcli.plain import JsonObject
from ftcli.plan.memory.candidates import level_of
from ftcli.plan.memory.estimate import estimate_memory
from ftcli.plan.memory.terms import EVALUATION
from ftcli.plan.run import OtherModel, RunPlan
from ftcli.preflight.checks import model as of_model
from ftcli.preflight.checks.context import Context, Found, NotMade
from ftcli.tables import code_of
from ftcli.units import gib

#: Terms of a training run that a model which is only asked has as well.
_OF_ASKING = ("weights", "gathered weights", "cuBLAS workspaces", "NCCL", EVALUATION, "runtime")


@dataclass(frozen=True, slots=True)
class AskedModel:
    """Another model by the recipe's key that names it, the run's plan with it in the trained one's place, and its
    memory while it is asked (None where that is not known). ``quantized_by`` is the key that would quantize it.
    """

    key: str
    plan: RunPlan
    needed_bytes: int | None
    quantized_by: str

    @property
    def facts(self) -> ModelFacts:
        return self.plan.facts

    def as_dict(self) -> JsonObject:
        facts = self.facts
        return {
            "key": self.key,
            "name": facts.name,
            "source": facts.source,
            "model_type": facts.model_type,
            "parameters": facts.parameters,
            "needed_bytes": self.needed_bytes,
        }


def asked_for(context: Context) -> OtherModel | None:
    """The model that the recipe's method asks under this command; None for none."""
    if context.method.asks is None or not context.reads_data or context.command == "sample":
        return None
    if context.work == "eval" and context.method.scores is None:  # held-out rows are not compared with it
        return None
    found: OtherModel | None = code_of(context.method.asks)(context.recipe)
    return found


def facts_of(context: Context, other: OtherModel, *, offline: bool) -> ModelFacts:
    """Its facts. Raises FtcliError as :func:`read_facts`, with the place of the key that names it."""
    return read_facts(other.model, offline=offline, origins=context.origins.standing_in("model", other.key))


def check(context: Context, other: OtherModel, theirs: ModelFacts, ours: ModelFacts) -> Found:
    """The errors of a base model that is only asked, and FT326 where an id is another token."""
    recipe = context.recipe  # of a model that is only asked: no adapters, nothing written
    asked = other.in_place(recipe).changed({"lora": None, "export.formats": ()})
    mine = Context(asked, context.origins.standing_in("model", other.key), "eval")
    yield from (finding for finding in of_model.check(mine, theirs) if finding.severity == "error")
    yield from (each for each in of_model.not_made(mine, theirs) if each.check == "weights")
    if theirs.is_local and other.model.revision is not None:
        yield of_model.without_revision(context, f"{other.key}_revision", theirs)
    unread = [facts.name for facts in (ours, theirs) if facts.tokenizer is None or facts.tokenizer.size is None]
    if unread:
        yield NotMade(f"tokens of {theirs.name}", f"the tokenizer of {unread[0]} was not read")
    if ours.tokenizer is None or theirs.tokenizer is None:
        return
    origin = context.origins.at(other.key)
    here, there = (
        vocabulary(facts.tokenizer.folder / "tokenizer.json", origin) for facts in (ours, theirs) if facts.tokenizer
    )
    # Of tokens that only one of them has, the run sees whether rows have them.
    said = foreign_tokens(here, there, here.keys() & there.keys())
    if said:
        yield foreign_tokens_finding(theirs.name, said, origin)


def planned(plan: RunPlan, other: OtherModel, facts: ModelFacts) -> AskedModel:
    """The plan of asking it, with its memory."""
    mine = replace(plan, recipe=other.in_place(plan.recipe), facts=facts, other=None)
    own = f"{other.key}_quantization: nf4" if other.quantization is not None else "quantization.method (for both)"
    return AskedModel(other.key, mine, _needed(mine), own)


def memory_findings(context: Context, asked: AskedModel, device: DeviceFacts) -> Found:
    """FT601 where it does not fit the device, FT602 where it only just does."""
    if asked.needed_bytes is None:
        yield NotMade(f"memory of {asked.facts.name}", asked.plan.measured.unknown)
        return
    if (level := level_of(asked.needed_bytes, device)) in ("fits", "unknown"):
        return
    said = f"asking {asked.facts.name} takes about {gib(asked.needed_bytes)} GiB, {device.name} has "
    said += f"{gib(device.available_bytes or 0)} GiB" + (" free" if device.free_bytes is not None else "")
    help = f"name a smaller model in its place, quantize it with {asked.quantized_by}, or share it over GPUs with "
    help += "launch.engine: fsdp"
    if level == "tight":
        yield context.warning("FT602", asked.key, f"tight: {said}", help=help)
    else:
        yield context.error("FT601", asked.key, f"does not fit: {said}", help=help)


def _needed(plan: RunPlan) -> int | None:
    """Bytes at once: its weights, or this rank's shard of them, and a forward pass over a training batch."""
    settings = {"eval.per_device_eval_batch_size": plan.rows, "eval.tasks": ()}
    if plan.shard_size > 1:
        held_out = plan.recipe.data.eval or plan.recipe.data.train
        found = estimate_memory(plan.changed({**settings, "data.eval": held_out}))
        asking = () if found is None else (name for name in found.phases[EVALUATION] if name in _OF_ASKING)
        return None if found is None else sum(found.parts[name] for name in asking)
    found = estimate_memory(replace(plan, work="eval").changed(settings))
    return None if found is None else found.total_bytes
