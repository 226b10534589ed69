"""Log-probabilities of completions under a policy, and their comparison with the model's own and the sampler's.

A batch holds completions that are padded on the right, after prompts that are padded on the left. Here each prompt with
its completion is a document, and documents are laid out as those of supervised training are.

A policy gradient is silently wrong where the two sides of a ratio come from different arithmetic: another mask, other
positions, a cap or a temperature that one side does not know. So a few completions of the first batch go through
transformers' own layers and head, with all of their logits, and the sampler's log-probabilities are compared where it
gave any.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from ftcli.data.collate import documents_batch, with_images
from ftcli.data.tokens import TokenizedRow
from ftcli.errors import ExitCode, FtcliError
from ftcli.generation.generator import passes_in_step
from ftcli.labels import IGNORE_INDEX
from ftcli.methods.grpo.losses import Completions, StepShape, loss_mask, policy_loss
from ftcli.methods.grpo.settings import GrpoConfig
from ftcli.methods.grpo.spans import TRAINING
from ftcli.model.backbone import (
    base_of,
    compute_context,
    head_of,
    hidden_states,
    root_of,
    rotation_kept,
    within_root,
)
from ftcli.model.layers import FusedDeltaLayer
from ftcli.model.loss import next_token_log_probs, supervised_positions
from ftcli.model.quantized import has_coarse_products
from ftcli.model.selfcheck import rounded_otherwise
from ftcli.plan.batches import Batches
from ftcli.plan.precision import DtypePlan
from ftcli.rows.row import Row

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.generation.requests import PromptImages
    from ftcli.methods.grpo.spans import Spans
    from ftcli.model.fused import DecoderStack
    from ftcli.run.process_group import RankGroup

#: The numbers of prompts that show images, in a batch.
PROMPT_ROWS = "prompt_rows"
#: How far a server's log-probabilities are from the policy's, in nats a token on average; TRL's name.
SAMPLER_GAP = "sampling/sampling_logp_difference/mean"
#: Numbers by name, one for each micro-batch.
Metrics: TypeAlias = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class ScoredDocuments:
    """Prompts with completions as documents, on the host.

    Attributes:
        documents: Those that have a token to be scored; their labels are the completions.
        where: (B, C) bool, True for each token that is scored; in its order the documents' labels.
    """

    documents: list[TokenizedRow]
    where: Tensor

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor,
        completion: int,
        silent: Sequence[bool],
        written: Tensor | None = None,
        shown: Sequence[PromptImages | None] = (),
    ) -> ScoredDocuments:
        """Of a batch on the host.

        Args:
            input_ids, attention_mask: (B, P + C); the last ``completion`` columns, C, are the completions.
            written: (B, C), 1 for tokens that are scored; None: all of the completions are.
            shown: What each prompt shows; empty where none does.
        """
        documents: list[TokenizedRow] = []
        there = attention_mask[:, -completion:].bool()
        where = there.clone() if written is None else there & written.bool()
        for index, (ids, mask) in enumerate(zip(input_ids, attention_mask.bool(), strict=True)):
            prompt, answer = ids[:-completion][mask[:-completion]], ids[-completion:][there[index]]
            if not len(prompt):
                where[index, :1] = False  # nothing stands before it that could predict it
            if silent[index] or not where[index].any():
                where[index] = False
                continue
            scored = torch.where(where[index], ids[-completion:], IGNORE_INDEX)[there[index]]
            labels = [IGNORE_INDEX] * len(prompt) + scored.tolist()
            every, seen = [*prompt.tolist(), *answer.tolist()], shown[index] if shown else None
            images = () if seen is None else seen.row.images
            documents.append(TokenizedRow(Row("completions", index, {}), every, labels, images=images))
        return cls(documents, where)


class PolicyScores:
    """Scores completions under the policy as it is, or under its reference.

    Args:
        stack: The decoder layers as one function, which passes with gradients take; None where they are not.
        spans: Counts the tokens of passes with gradients.
        shown: What each prompt of the run shows, by its number; empty where none does.
        group: The ranks that train together. Where they hold shards of the weights, all of them call what computes.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        batches: Batches,
        *,
        pad_token_id: int,
        temperature: float,
        device: torch.device,
        stack: DecoderStack | None = None,
        spans: Spans | None = None,
        shown: Sequence[PromptImages | None] = (),
        group: RankGroup | None = None,
    ) -> None:
        self.shown = shown
        self._pixels = next((one.pixels for one in shown if one is not None), None)
        self.model, self.batches, self.temperature, self.device = model, batches, temperature, device
        self.group = group
        self._pad_token_id, self._stack, self._spans = pad_token_id, stack, spans

    def log_probs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        completion: int,
        *,
        rows_at_a_time: int | None = None,
        silent: Sequence[bool] | None = None,
        model: PreTrainedModel | None = None,
        entropy_gradient: bool = False,
        written: Tensor | None = None,
        prompt_rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of completions in nats, (B, C) float32 each, 0 where there is no token.

        Args:
            input_ids, attention_mask: (B, P + C); the last ``completion`` columns, C, are the completions.
            silent: Rows that are left out, with zeros.
            written: (B, C), 1 for tokens that are scored; None: all of the completions are.
            prompt_rows: (B,), the numbers of the prompts, where these show images.
        """
        rows = input_ids.shape[0]
        size = rows_at_a_time or rows
        ids, mask = input_ids.cpu(), attention_mask.cpu()
        silent = silent or (False,) * rows
        own = None if written is None else written.cpu()
        shown = self.shown_by(prompt_rows)
        scored_by = self.model if model is None else model

        def compute() -> list[tuple[Tensor, Tensor]]:
            return [
                self._scores(
                    scored_by,
                    ScoredDocuments.of(
                        ids[at : at + size],
                        mask[at : at + size],
                        completion,
                        silent[at : at + size],
                        None if own is None else own[at : at + size],
                        shown[at : at + size],
                    ),
                    entropy_gradient,
                )
                for at in range(0, rows, size)
            ]

        if torch.is_grad_enabled() or _is_running(scored_by):
            found = compute()
        else:
            found = passes_in_step(self.group, scored_by, compute) or []
        log_probs, entropies = (torch.cat(parts) for parts in zip(*found, strict=True))
        return log_probs, entropies

    def shown_by(self, prompt_rows: Tensor | None) -> list[PromptImages | None]:
        """What prompts of these numbers show; empty where nothing is said of them."""
        return [] if prompt_rows is None else [self.shown[row] for row in prompt_rows.tolist()]

    def _scores(
        self, model: PreTrainedModel | PeftModel, scored: ScoredDocuments, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """(B, C) each."""
        where = scored.where.to(self.device, non_blocking=True)
        nothing = torch.zeros(where.shape, dtype=torch.float32, device=self.device)
        if not scored.documents:
            if torch.is_grad_enabled() and root_of(model) is not None:  # the others need its part of their passes
                filler = TokenizedRow(Row("completions", 0, {}), [0, 0], [IGNORE_INDEX, 0])
                log_probs, _ = self._computed(model, [filler], entropy_gradient)
                return nothing + 0.0 * log_probs.sum(), nothing
            return nothing + _zero_of(model), nothing
        if torch.is_grad_enabled() and self._spans is not None:
            self._spans.count(TRAINING, sum(len(one.input_ids) for one in scored.documents))
        log_probs, entropies = self._computed(model, scored.documents, entropy_gradient)
        return nothing.masked_scatter(where, log_probs), nothing.masked_scatter(where, entropies)

    def _computed(
        self, model: PreTrainedModel | PeftModel, documents: list[TokenizedRow], entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the documents' labels, one after the other."""
        batch = documents_batch(documents, self.batches, self._pad_token_id)
        batch = with_images(batch, [documents], self._pixels)
        vocabulary = base_of(model).get_output_embeddings().weight.shape[0]
        supervised = supervised_positions(batch["labels"], vocabulary).to(self.device, non_blocking=True)
        batch = {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}
        labels = batch.pop("labels")
        stack = self._stack if torch.is_grad_enabled() else None  # a graph's adapters cannot be switched off

        def compute() -> tuple[Tensor, Tensor]:
            return next_token_log_probs(
                hidden_states(model, batch, stack),
                head_of(model),
                labels,
                temperature=self.temperature,
                supervised=supervised,
                entropy_gradient=entropy_gradient,
            )

        return within_root(model, compute)


def _is_running(model: PreTrainedModel | PeftModel) -> bool:
    """True within a pass of a model with sharded weights."""
    root: Any = root_of(model)
    return root is not None and bool(root.running)


def scored_loss(
    policy: PolicyScores, grpo: GrpoConfig, inputs: Completions, shape: StepShape
) -> tuple[Tensor, Metrics]:
    """The policy's loss on a micro-batch, and its metrics.

    Rows whose advantage is zero have no part in the gradient, where nothing but advantages moves the model. They cost
    no pass, and the mean entropy is that of the other rows.
    """
    silent = _without_part(inputs["advantages"], grpo)
    ids, mask = joined(inputs)
    log_probs, entropies = policy.log_probs(
        ids,
        mask,
        inputs["completion_ids"].shape[1],
        silent=silent,
        entropy_gradient=bool(grpo.entropy_coef),
        written=inputs.get("tool_mask"),
        prompt_rows=inputs.get(PROMPT_ROWS),
    )
    left_out = torch.tensor(silent or (), dtype=torch.bool, device=log_probs.device)[:, None]
    if silent is not None and "old_per_token_logps" in inputs:  # ratios of 1
        log_probs = torch.where(left_out, inputs["old_per_token_logps"], log_probs)
    loss, found = policy_loss(grpo, inputs, log_probs, entropies, shape)
    if grpo.server is not None:
        told = loss_mask(inputs) if silent is None else loss_mask(inputs) * ~left_out
        apart = ((log_probs.detach() - inputs["sampling_per_token_logps"]).abs() * told).sum()
        found[SAMPLER_GAP] = apart / told.sum().clamp(min=1)
    values = torch.stack(list(found.values())).tolist()
    metrics = {name: [value] for name, value in zip(found, values, strict=True)}
    if silent is not None:
        metrics["entropy"] = _entropy_of_scored(metrics["entropy"][0], inputs, silent)
    return loss, metrics


def _without_part(advantages: Tensor, grpo: GrpoConfig) -> tuple[bool, ...] | None:
    """Which rows bear no gradient; None where each of them does, or its entropies count."""
    if grpo.beta or grpo.teacher_coef or grpo.entropy_coef or grpo.top_entropy_quantile < 1:
        return None
    silent = (advantages == 0).tolist()
    return tuple(silent) if any(silent) else None


def _entropy_of_scored(mean: float, inputs: Completions, silent: Sequence[bool]) -> list[float]:
    """The mean over rows that were scored, from that over all, in which the others count as 0; nothing where no row was
    scored. A micro-batch may have no tokens at all, where completions that were cut off are masked: its mean is 0.
    """
    tokens = loss_mask(inputs).sum(1).tolist()
    scored = sum(count for count, left_out in zip(tokens, silent, strict=True) if not left_out)
    if scored:
        return [mean * sum(tokens) / scored]
    return [] if any(tokens) else [mean]


def joined(batch: Completions) -> tuple[Tensor, Tensor]:
    """(B, P + C): ids and mask of prompts with their completions."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    return ids, torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)


def _zero_of(model: nn.Module) -> Tensor | float:
    """A zero loss that touches every trained parameter, so that gradients are 0 and not None."""
    if not torch.is_grad_enabled():
        return 0.0
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.stack([parameter.reshape(-1)[:1].sum().float() * 0.0 for parameter in trained]).sum()


#: Rows that are looked at, and completion tokens of each.
ROWS, LONGEST = 2, 64
#: Largest mean difference of a token's log-probability in nats, by compute dtype: two ways through the layers that
#: round in different places, of which one rounds logits, too: 0.059 for a Mistral-7B of random weights in bfloat16
#: (H200, 2026-11-22). In a trained model a mask, a position or a factor that is wrong shows as whole nats.
_ALLOWED: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.3, "float16": 0.1}
#: Products that are coarser than the compute dtype leave at least this much: a mask that is wrong is 0.3 to 0.5 in the
#: tests. In a deep model roundings multiply (0.299 for a Llama-3.1-8B of random weights in fp8 on an H200, 2026-11-22),
#: and so many times as much is allowed as one more rounding of the embeddings makes in its own log-probabilities.
#: Layers that carry a state are allowed as many times a rounding: training takes tokens in chunks, the sampler one by
#: one. That was half of one at most, however late in a completion (random Qwen3.5 of 8 and 24 layers, 100 tokens behind
#: prompts of 40 to 200, chunks' products in bfloat16: 0.031 of 0.069 and 0.061 of 0.133 nats, where a Qwen3 has 0.013
#: of 0.026 and 0.020 of 0.036; in float32 1.9e-6 and 4.3e-6; torch on a CPU, 2026-11-27).
_ALLOWED_COARSE, _TIMES_ROUNDING = 0.3, 2.0


@dataclass(frozen=True, slots=True)
class Parity:
    """Mean and largest absolute difference of log-probabilities in nats, over ``tokens`` of ``rows`` completions.

    ``sampler_*`` are None where the sampler does not say what it sampled with. ``rounding_mean`` is how far the model's
    own move when its embeddings are rounded otherwise; None where products are as fine as the compute dtype, and no
    layer carries a state.
    """

    rows: int
    tokens: int
    plain_mean: float
    plain_max: float
    sampler_mean: float | None
    sampler_max: float | None
    allowed_mean: float
    rounding_mean: float | None = None

    def summary(self) -> str:
        """One line for people."""
        text = f"log-probabilities: {self.plain_mean:.1e} nats from the model's own a token"
        if self.sampler_mean is not None:
            text += f", {self.sampler_mean:.1e} from the sampler's"
        return f"{text} (mean of {self.tokens} tokens; at most {self.allowed_mean:g} is allowed)"


class ParityCheck:
    """:func:`check_parity` of a rank's first micro-batch that has completions, once.

    Ranks that hold shards of the weights call it alike, until each has looked.
    """

    def __init__(self, policy: PolicyScores, plan: DtypePlan, tell: Callable[[Parity], None]) -> None:
        self._policy, self._plan, self._tell = policy, plan, tell
        self._looked = self._over = False
        self.allowed = math.inf

    def __call__(self, inputs: Completions, sampled: Tensor | None) -> bool:
        """Whether something was computed; arguments and errors are those of :func:`check_parity`."""
        if self._over:
            return False
        policy, group = self._policy, self._policy.group
        wanted = not self._looked and bool(inputs["completion_mask"].any())  # all may have been cut off
        found = passes_in_step(
            group,
            policy.model,
            (lambda: check_parity(policy, self._plan, inputs, sampled)) if wanted else None,
        )
        if found is not None:
            self._tell(found)
            self._looked, self.allowed = True, found.allowed_mean
        self._over = self._looked
        if group is not None and root_of(policy.model) is not None:
            self._over = all(told[0] for told in group.agree("compared", [self._looked]))
        return wanted


@torch.no_grad()
def check_parity(policy: PolicyScores, plan: DtypePlan, inputs: Completions, sampled: Tensor | None) -> Parity:
    """Compares on a few rows of ``inputs``, a micro-batch; the model leaves as it came.

    Args:
        sampled: (B, C), the log-probabilities that the sampler says its tokens had under the weights as they are now;
            None where it is not known.

    Raises FtcliError FT707 (exit 1) when the log-probabilities that training works with are not the model's own; FT708
    (exit 1) when they are not those that completions were sampled with.
    """
    model: Any = policy.model
    chosen = _chosen(inputs["completion_mask"])
    prompts, prompt_mask = inputs["prompt_ids"][chosen], inputs["prompt_mask"][chosen]
    ids, mask = inputs["completion_ids"][chosen, :LONGEST], inputs["completion_mask"][chosen, :LONGEST]
    numbers = inputs[PROMPT_ROWS][chosen] if PROMPT_ROWS in inputs else None
    shown = policy.shown_by(numbers) or [None] * len(chosen)
    for at, one in enumerate(shown):  # transformers takes an answer's image token for a place without an image
        if one is not None:
            mask[at] *= (ids[at] == one.pixels.vision.token_id).cumsum(0) == 0
    training = model.training
    model.eval()
    with rotation_kept(model), compute_context(policy.device, plan.compute, plan.autocast):
        whole, real = torch.cat([prompts, ids], 1), torch.cat([prompt_mask, mask], 1)
        ours, _ = policy.log_probs(whole, real, ids.shape[1], prompt_rows=numbers)
        rows = [
            (p[pm], c[cm], policy.temperature, one)
            for p, pm, c, cm, one in zip(prompts, prompt_mask.bool(), ids, mask.bool(), shown, strict=True)
        ]
        plain = torch.cat([*(_plain(model, *row) for row in rows), ours[:0, 0]])
        rounding = None
        coarse = has_coarse_products(model)
        if coarse or _is_recurrent(model):
            with rounded_otherwise(model, getattr(torch, plan.compute)):
                again = [_plain(model, *row) for row in rows]
            rounding = float((torch.cat([*again, plain[:0]]) - plain).abs().mean()) if len(plain) else 0.0
    model.train(training)
    own = loss_mask(inputs)[chosen, :LONGEST].bool()
    plain = plain[own[mask.bool()]]
    mine, most = ours[own], allowed(plan, rounding, coarse=coarse)
    if not bool(torch.isfinite(mine).all()):
        return Parity(len(chosen), len(mine), 0.0, 0.0, None, None, most)  # FT702 names it
    theirs = None if sampled is None else sampled[chosen, :LONGEST][own]
    found = replace(_compared(len(chosen), mine, plain, theirs, most), rounding_mean=rounding)
    _require(found)
    return found


def allowed(plan: DtypePlan, rounding: float | None, *, coarse: bool) -> float:
    """The largest mean difference that passes, in nats.

    Args:
        rounding: What one more rounding makes, in nats, where that counts.
    """
    least = max(_ALLOWED[plan.compute], _ALLOWED_COARSE if coarse else 0.0)
    return least if rounding is None else max(least, _TIMES_ROUNDING * rounding)


def _is_recurrent(model: nn.Module) -> bool:
    """Whether layers carry a state from token to token, in chunks here and step by step where tokens are sampled."""
    return any(isinstance(module, FusedDeltaLayer) for module in model.modules())


def _chosen(completion_mask: Tensor) -> list[int]:
    """The rows with the longest completions, of those that have one."""
    lengths = completion_mask.sum(1).tolist()
    return [row for row in sorted(range(len(lengths)), key=lambda i: -lengths[i])[:ROWS] if lengths[row]]


def _plain(
    model: Any, prompt: Tensor, completion: Tensor, temperature: float, shown: PromptImages | None = None
) -> Tensor:
    """(C,) float32: log-probabilities of the completion out of the model's own logits.

    A cache is asked for: with one, layers on our kernels hand on to the original ones.
    """
    ids = torch.cat([prompt, completion])[None]
    count = completion.shape[0]
    fewer = "logits_to_keep" in inspect.signature(base_of(model).forward).parameters
    given: dict[str, Any] = {"logits_to_keep": count + 1} if fewer else {}
    if shown is not None:
        given |= {name: value.to(ids.device) for name, value in shown.inputs(ids.cpu()).items()}
    logits = model(input_ids=ids, use_cache=True, **given).logits[0, -count - 1 : -1].float()
    log_probs = torch.log_softmax(logits / temperature, -1)
    return log_probs.gather(1, completion[:, None]).squeeze(1)


def _compared(rows: int, ours: Tensor, plain: Tensor, sampler: Tensor | None, most: float) -> Parity:
    if not len(ours):
        return Parity(rows, 0, 0.0, 0.0, None, None, most)
    own = (ours - plain).abs()
    said = None if sampler is None else (ours - sampler.float()).abs()
    return Parity(
        rows,
        len(ours),
        float(own.mean()),
        float(own.max()),
        None if said is None else float(said.mean()),
        None if said is None else float(said.max()),
        most,
    )


def _require(found: Parity) -> None:
    for code, whose, mean, largest, help in (
        (
            "FT707",
            "the model's own",
            found.plain_mean,
            found.plain_max,
            "train with model.kernels: off and data.padding_free: false, and report this with the run's manifest.json",
        ),
        (
            "FT708",
            "those that completions were sampled with",
            found.sampler_mean,
            found.sampler_max,
            "report this with the run's manifest.json: training would weigh its completions by ratios that are wrong",
        ),
    ):
        if mean is None or mean <= found.allowed_mean:  # NaN fails
            continue
        raise FtcliError.single(
            code,
            f"the log-probabilities that training works with are not {whose}: they differ by {mean:.2g} nats a token "
            f"on average, {largest:.2g} at most, over {found.tokens} tokens of {found.rows} completions; "
            f"{found.allowed_mean:g} is allowed",
            exit_code=ExitCode.BUG,
            help=help,
        )
