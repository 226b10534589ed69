"""Before GRPO's first step: the log-probabilities that it trains on, compared with the model's own and the sampler's.

A policy gradient is silently wrong where the two sides of a ratio come from different arithmetic: another mask, other
positions, a cap or a temperature that one side does not know. So a few completions of the first batch go through
transformers' own layers and head, with all of their logits, and the sampler's log-probabilities are compared where it
gave any.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ftcli.errors import ExitCode, FtcliError
from ftcli.methods.grpo.losses import Completions
from ftcli.model.backbone import base_of, compute_context, rotation_kept
from ftcli.model.delta_layer import FusedDeltaLayer
from ftcli.model.quantized import has_coarse_products
from ftcli.model.selfcheck import rounded_otherwise
from ftcli.plan.precision import DtypePlan

if TYPE_CHECKING:
    from ftcli.methods.grpo.policy import PolicyScores

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


@torch.no_grad()
def check_parity(policy: PolicyScores, plan: DtypePlan, inputs: Completions, sampled: Tensor | None) -> Parity:
    """Compares on a few rows of ``inputs``, a micro-batch; the model leaves as it came.

    Args:
        sampled: (B, C), the log-probabilities that the sampler says its tokens had under the weights as they are now;
            None where it is not known.

    Raises:
        FtcliError: FT707 (exit 1) when the log-probabilities that training works with are not the model's own; FT708
            (exit 1) when they are not those that completions were sampled with.
    """
    model: Any = policy.model
    chosen = _chosen(inputs["completion_mask"])
    prompts, prompt_mask = inputs["prompt_ids"][chosen], inputs["prompt_mask"][chosen]
    ids, mask = inputs["completion_ids"][chosen, :LONGEST], inputs["completion_mask"][chosen, :LONGEST]
    training = model.training
    model.eval()
    with rotation_kept(model), compute_context(policy.device, plan.compute, plan.autocast):
        ours, _ = policy.log_probs(torch.cat([prompts, ids], 1), torch.cat([prompt_mask, mask], 1), ids.shape[1])
        rows = list(zip(prompts, prompt_mask.bool(), ids, mask.bool(), strict=True))
        plain = torch.cat([*(_plain(model, p[pm], c[cm], policy.temperature) for p, pm, c, cm in rows), ours[:0, 0]])
        rounding = None
        coarse = has_coarse_products(model)
        if coarse or _is_recurrent(model):
            with rounded_otherwise(model, getattr(torch, plan.compute)):
                again = [_plain(model, p[pm], c[cm], policy.temperature) for p, pm, c, cm in rows]
            rounding = float((torch.cat([*again, plain[:0]]) - plain).abs().mean()) if len(plain) else 0.0
    model.train(training)
    mine, most = ours[mask.bool()], allowed(plan, rounding, coarse=coarse)
    if not bool(torch.isfinite(mine).all()):
        return Parity(len(chosen), len(mine), 0.0, 0.0, None, None, most)  # FT702 names it
    theirs = None if sampled is None else sampled[chosen, :LONGEST][mask.bool()]
    found = replace(_compared(len(chosen), mine, plain, theirs, most), rounding_mean=rounding)
    _require(found)
    return found


def allowed(plan: DtypePlan, rounding: float | None, *, coarse: bool) -> float:
    """The largest mean difference that passes, in nats.

    Args:
        rounding: What one more rounding makes, in nats, where that counts.
        coarse: Products are coarser than the compute dtype.
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


def _plain(model: Any, prompt: Tensor, completion: Tensor, temperature: float) -> Tensor:
    """(C,) float32: log-probabilities of the completion out of the model's own logits.

    A cache is asked for: with one, layers on our kernels hand on to the original ones.
    """
    ids = torch.cat([prompt, completion])[None]
    count = completion.shape[0]
    fewer = "logits_to_keep" in inspect.signature(base_of(model).forward).parameters
    given = {"logits_to_keep": count + 1} if fewer else {}
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
