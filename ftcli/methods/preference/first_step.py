"""The check of a run's first step: before it, policy and reference are one model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ftcli.errors import ExitCode, FtcliError
from ftcli.methods.preference.pairs import SCORED, AnswerScorer, ScoredAnswers
from ftcli.model.backbone import compute_context
from ftcli.model.quantized import has_coarse_products
from ftcli.train.parallel import float_bits, float_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.plan.precision import DtypePlan
    from ftcli.run.process_group import RankGroup

#: Nats a token by which policy and reference may differ before the first step, by the dtype of the products: the two
#: are computed by other code. Roundings of single tokens are larger and of either sign (0.06 in a Mistral-7B in
#: bfloat16, 0.3 in a Llama-3.1-8B in fp8; :mod:`ftcli.methods.grpo.parity`): n tokens count as at least 15 sqrt n.
_ALLOWED = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
_ALLOWED_COARSE, _ROUNDED = 0.1, 15.0


@torch.no_grad()
def require_equal(
    model: PreTrainedModel | PeftModel,
    dtypes: DtypePlan,
    scorer: AnswerScorer,
    inputs: dict[str, Tensor],
    policy: ScoredAnswers,
    reference: ScoredAnswers,
    group: RankGroup | None = None,
) -> None:
    """Before the first step the model is its reference, but for dropout and rounding. Raises FtcliError FT714 (exit 1);
    what is not finite is left to FT702.

    Args:
        scorer, inputs: What policy and reference were scored with; the policy is once more, without dropout, where they
            differ.
        group: All of its ranks call this: where weights are sharded or rows are shared, no rank can score on its own.
    """
    allowed = _ALLOWED_COARSE if has_coarse_products(model) else _ALLOWED[dtypes.compute]
    tokens = (inputs[SCORED] > 0).sum(1).float()
    found = _largest(_difference(policy, reference, tokens), group)
    if found > allowed:
        with without_dropout(model), compute_context(tokens.device, dtypes.compute, dtypes.autocast):
            # Layer by layer: a stack would write over what the policy's backward pass reads.
            again = scorer.score(model, inputs)
        found = _largest(_difference(again, reference, tokens), group)
    if found > allowed:
        raise FtcliError.single(
            "FT714",
            f"before the first step policy and reference differ by {found:.2g} nats a token: the run would begin "
            "with another reference than its own start",
            exit_code=ExitCode.BUG,
            help="train with model.kernels: off, and report this with the run's manifest.json",
        )


@contextmanager
def without_dropout(model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """A block in which nothing is dropped."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _largest(difference: float, group: RankGroup | None) -> float:
    """That of the rank with the largest."""
    if group is None:
        return difference
    return max(float_of(row[0]) for row in group.agree("compared", [float_bits(difference)]))


def _difference(one: ScoredAnswers, other: ScoredAnswers, tokens: Tensor) -> float:
    """The mean over answers, in nats a token; of short ones in nats for 15 sqrt n tokens."""
    return float(((one.sums.detach() - other.sums).abs() / torch.maximum(tokens, _ROUNDED * tokens.sqrt())).mean())
