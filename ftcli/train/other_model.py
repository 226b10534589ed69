"""Another model that a method asks: loaded as the trained one is, asked before that is there, and gone; or kept beside
it, where it is asked in each step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from ftcli.data.tokens import TokenizedRow
from ftcli.errors import ExitCode, FtcliError
from ftcli.facts.tokenizer import foreign_tokens, foreign_tokens_finding
from ftcli.job import Job
from ftcli.model.tokenizer import load_tokenizer
from ftcli.plan.batches import Batches
from ftcli.run.inputs import Inputs
from ftcli.train import assembly

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ftcli.run.process_group import RankGroup

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Answered(Generic[_T]):
    """What another model has answered, and the identity of its files."""

    found: _T
    inputs: Inputs


def answered(
    job: Job,
    ask: Callable[[Job, PreTrainedModel], _T],
    rows: Sequence[TokenizedRow],
    held_out: Sequence[TokenizedRow],
    group: RankGroup | None,
) -> Answered[_T] | None:
    """What the model that the method asks answers; None where it asks none, or nothing. All ranks call this; they are
    connected then.

    Args:
        ask: Gets a job of that model, and the model, frozen.
        rows, held_out: What it is asked about; the self-check looks at the first of them.

    Raises:
        FtcliError: FT326 (exit 3) where a row has a token that is another one there, or none; what loading raises.
    """
    if job.report.asked is None or not (len(rows) or len(held_out)):
        return None
    found = _answered(_job_of_other(job), job, ask, rows, held_out, group)
    gc.collect()  # its modules know each other
    if job.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _job_of_other(job: Job) -> Job:
    """The job with the other model in the place of the trained one; of its memory nothing was decided."""
    asked = job.report.asked
    assert asked is not None
    theirs = asked.plan.recipe
    recipe = job.recipe.model_copy(update={"model": theirs.model, "quantization": theirs.quantization})
    plan = replace(job.plan, recipe=recipe, facts=asked.facts)
    return replace(job, report=replace(job.report, plan=plan, memory=None))


def loaded_beside(job: Job, rows: Sequence[TokenizedRow]) -> tuple[PreTrainedModel, Batches, Inputs]:
    """The other model, frozen, which stays beside the trained one; how its batches are laid out; and the identity of
    its files.

    Args:
        rows: A few, for the self-check.

    Raises:
        FtcliError: FT326 (exit 3) where an id is another token there; what loading raises.
    """
    of_other = _job_of_other(job)
    require_same_tokens(job, of_other, (rows,))
    read = assembly.begin_reading(of_other)
    model = assembly.build_base(of_other)
    model.requires_grad_(False).eval()
    assembly.put_on_kernels(of_other, model, rows)
    return model, assembly.laid_out(of_other, model, rows), assembly.loaded_base(of_other, model, read)


def _answered(
    of_other: Job,
    job: Job,
    ask: Callable[[Job, PreTrainedModel], _T],
    rows: Sequence[TokenizedRow],
    held_out: Sequence[TokenizedRow],
    group: RankGroup | None,
) -> Answered[_T]:
    with nullcontext() if group is None else group.after_leader("other tokens"):  # which may be downloaded
        require_same_tokens(job, of_other, (rows, held_out))
    read = assembly.begin_reading(of_other) if group is None or group.leads else tuple
    needed = assembly.to_download(of_other) > 0
    with nullcontext() if group is None else group.after_leader("other weights", lambda: needed):
        model = assembly.build_base(of_other)
    model.requires_grad_(False).eval()
    shown = rows if len(rows) else held_out
    assembly.put_on_kernels(of_other, model, shown)
    assembly.laid_out(of_other, model, shown)
    if group is not None:
        assembly.form_group(job, group)
        assembly.shard_weights(of_other, model, group)
    return Answered(ask(of_other, model), assembly.loaded_base(of_other, model, read))


def require_same_tokens(job: Job, of_other: Job, tables: Iterable[Sequence[TokenizedRow]]) -> None:
    """Raises FtcliError FT326 (exit 3) for ids that are other tokens of the other model's tokenizer; and for those that
    only one of the two has, if rows of ``tables`` have them.
    """
    theirs, ours = _vocabulary(of_other), {at: token for token, at in job.tokenizer.get_vocab().items()}
    said = foreign_tokens(ours, theirs, ours.keys() & theirs.keys())
    alone = ours.keys() - theirs.keys()
    if alone and not said:
        used = {at for table in tables for row in table for at in alone.intersection(row.input_ids)}
        said = foreign_tokens(ours, theirs, used)
    if said:
        raise FtcliError([foreign_tokens_finding(of_other.facts.name, said)], ExitCode.PREFLIGHT)


def _vocabulary(of_other: Job) -> dict[int, str]:
    tokenizer = load_tokenizer(of_other.recipe.model, offline=of_other.session.offline)
    return {at: token for token, at in tokenizer.get_vocab().items()}
