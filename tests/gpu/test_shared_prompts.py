"""Pairs that share their prompt, compiled: as exact as separate rows, and the same bits under CUDA graphs."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ftcli.data.tokens import TokenizedRow
from ftcli.labels import IGNORE_INDEX
from ftcli.methods.preference.pairs import AnswerScorer
from ftcli.model.backbone import base_of, compute_context
from ftcli.model.fused import DecoderStack, stack_of
from ftcli.plan.batches import Batches
from ftcli.rows.row import Row
from tests.gpu.test_graphs import adapted, graphed, set_policy

pytestmark = pytest.mark.gpu

SHARED, APART = Batches("unpadded", "a test", shares_prompts=True), Batches("unpadded", "a test")
#: Tokens of prompt, chosen and rejected answer; some answers are longer than the window of 128.
SIZES = ((190, 330, 310), (40, 20, 130), (300, 7, 60), (1, 200, 90))


def rows(sizes: tuple[tuple[int, int, int], ...] = SIZES, seed: int = 0) -> list[TokenizedRow]:
    """Chosen and rejected rows in turn, of random tokens."""
    rng, made = Random(seed), []
    for prompt, *answers in sizes:
        asked = [rng.randrange(3, 8000) for _ in range(prompt)]
        for size in answers:
            ids = asked + [rng.randrange(3, 8000) for _ in range(size)]
            made.append(TokenizedRow(Row("d", 1, {}), ids, [IGNORE_INDEX] * prompt + ids[prompt:]))
    return made


def step(model: Any, batches: Batches, documents: list[TokenizedRow], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:  # fmt: skip  # noqa: E501
    """The log-probabilities of the answers, and the gradients of a loss of them."""
    scorer = AnswerScorer(batches, 0, 8000, 1.0)
    inputs = {name: value.cuda() for name, value in scorer.batch(documents).items()}
    stack = stack_of(model, dtype)
    assert isinstance(stack, DecoderStack)
    with compute_context(torch.device("cuda"), str(dtype).removeprefix("torch."), dtype != torch.float32):
        sums = scorer.score(model, inputs, stack).sums
    trained = [p for p in model.parameters() if p.requires_grad]
    model.zero_grad(set_to_none=True)
    (-F.logsigmoid(0.01 * (sums[0::2] - sums[1::2]))).mean().backward()
    return [sums.detach(), *(p.grad.clone() for p in trained)]


def off(found: list[Tensor], exact: list[Tensor]) -> float:
    """Relative difference of all gradients together."""
    error = sum(float((a.double() - b.double()).norm() ** 2) for a, b in zip(found[1:], exact[1:], strict=True))
    return float((error / sum(float(b.double().norm() ** 2) for b in exact[1:])) ** 0.5)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "qwen3"])
def test_as_exact_as_separate_rows(name: str) -> None:
    """In float32 to 1e-5; in bfloat16 no further from float32 than separate rows are."""
    rounded = [step(adapted(name), batches, rows()) for batches in (SHARED, APART)]
    exact = [step(adapted(name).float(), batches, rows(), torch.float32) for batches in (SHARED, APART)]
    assert torch.allclose(exact[0][0], exact[1][0], rtol=1e-5, atol=1e-3)
    assert off(exact[0], exact[1]) <= 1e-5
    shared, apart = (off(each, exact[1]) for each in rounded)
    assert shared <= 1.25 * apart


@pytest.mark.parametrize(("name", "policy", "base"), [
    ("mistral", False, "none"), ("gemma2", "selective", "none"), ("qwen3", "lean", "nf4"), ("mistral", True, "fp8"),
])  # fmt: skip
def test_the_bits_are_those_without_graphs(name: str, policy: Any, base: str) -> None:
    """Micro-batches of one shape, whose prompts and answers end elsewhere each time, and pairs apart in between."""
    given = [
        (batches, rows(((60 + n, 200 - n, 150 + n), (90, 100 + 2 * n, 70 - n)), n))
        for n in range(4)
        for batches in (SHARED, APART)
    ]
    found = []
    for graphs in (False, True):
        model = adapted(name, base)
        set_policy(model, policy)
        runner = graphed(model) if graphs else None
        found.append([step(model, batches, documents) for batches, documents in given])
        if runner is not None:
            assert runner.status.stopped is None
            assert runner.status.replays == 6
        base_of(model).model.layers[0].stack.runner = None
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
