"""Greedy completions, and how likely other tokens are at each place: what a server's answers are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ftcli.evaluate.generate import answering, complete
from ftcli.generation.requests import StopCheck, StopConditions
from ftcli.model.backbone import compute_context, head_of, hidden_states, logits_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.job import Job

#: Tokens of each place whose log-probabilities are kept. What another program chooses is among them, or far from right.
_KEPT = 64


@dataclass(frozen=True, slots=True)
class GreedyAnswer:
    """A greedy completion.

    Attributes:
        tokens: Its ids; that which ended it is among them.
        stopped: A stop token ended it, and not its limit.
        likeliest: For each of ``tokens``, the log-probabilities in nats of the likeliest ids at its place, best first.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    stopped: bool
    likeliest: tuple[Mapping[int, float], ...]

    @property
    def said(self) -> tuple[int, ...]:
        """The tokens without the one that ended it."""
        return self.tokens[:-1] if self.stopped else self.tokens

    def log_prob(self, at: int, token: int) -> float:
        """The log-probability of ``token`` at a place; of one that is not kept, an upper bound."""
        kept = self.likeliest[at]
        return kept.get(token, min(kept.values()))


def greedy_answers(
    model: PreTrainedModel | PeftModel, job: Job, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[GreedyAnswer]:
    """One for each prompt, in the order given.

    Raises FtcliError FT761 (exit 5) when one alone does not fit into memory, FT762 (exit 6) for logits that are not
    finite.
    """
    recipe, stopping = job.recipe, StopCheck(StopConditions(frozenset(job.stops)), job.tokenizer)
    changes = {"max_new_tokens": max_new_tokens, "do_sample": False, "stop_strings": (), "overflow": "end"}
    completions = complete(
        model,
        prompts,
        recipe.eval.generate.model_copy(update=changes),
        pad=job.pad_token_id,
        batch_size=recipe.eval.per_device_eval_batch_size,
        plan=job.dtypes,
        device=job.device,
        reporter=job.reporter,
        stopping=stopping,
        max_length=recipe.data.max_seq_len,
    )
    with answering(model), torch.no_grad():
        return [
            GreedyAnswer(tuple(prompt), tuple(made), stopping.stopped(made), _likeliest(model, job, prompt, made))
            for prompt, made in zip(prompts, completions, strict=True)
        ]


def _likeliest(
    model: PreTrainedModel | PeftModel, job: Job, prompt: Sequence[int], made: Sequence[int]
) -> tuple[dict[int, float], ...]:
    """Of each token of ``made``, the likeliest ids at its place and their log-probabilities."""
    ids = torch.tensor([[*prompt, *made[:-1]]], device=job.device)
    with compute_context(job.device, job.dtypes.compute, job.dtypes.autocast):
        states = hidden_states(model, {"input_ids": ids}).tensor[0, len(prompt) - 1 :]
        logits = logits_of(model, head_of(model), states)
    found = logits.float().log_softmax(-1).topk(min(_KEPT, logits.shape[-1]))
    places = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return tuple(dict(zip(ids, values, strict=True)) for ids, values in places)
