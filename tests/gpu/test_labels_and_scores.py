"""KTO and reward models, compiled: a step against transformers' layers, and the same bits under CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ftcli.config.training import TrainConfig
from ftcli.data.tokens import TokenizedRow
from ftcli.labels import IGNORE_INDEX
from ftcli.methods.kto.losses import LabelLoss
from ftcli.methods.kto.objective import LabelObjective
from ftcli.methods.kto.reference import answer_start, mismatched_rows
from ftcli.methods.preference.reference import Reference
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.methods.reward.objective import RewardObjective
from ftcli.methods.reward.settings import RewardModelConfig
from ftcli.model.backbone import base_of, compute_context
from ftcli.model.fused import DecoderStack, stack_of
from ftcli.model.score_head import scores
from ftcli.plan.batches import Batches
from ftcli.plan.precision import DtypePlan
from ftcli.reporting import SilentReporter
from ftcli.rows.row import Row
from ftcli.train.checkpoint_state import Progress
from ftcli.train.parallel import Divisors, TokenCounts
from tests.gpu.test_graphs import adapted, graphed, set_policy
from tests.gpu.test_shared_prompts import APART, SHARED, off
from tests.unit.methods.kto.labelled import Monitor, epochs_of
from tests.unit.methods.preference.steps import epochs_of_pairs

pytestmark = pytest.mark.gpu

FAMILIES = ["mistral", "gemma2", "qwen3"]
#: The policy of checkpointing and the base of each family whose graphs are looked at.
GRAPHS = [("mistral", False, "none"), ("gemma2", "selective", "none"), ("qwen3", "lean", "nf4"), ("mistral", True, "fp8")]  # fmt: skip  # noqa: E501
BFLOAT16 = DtypePlan("bfloat16", "float32", "bfloat16", autocast=True, reason="a test")
FLOAT32 = DtypePlan("float32", "float32", "float32", autocast=False, reason="a test")
#: Tokens of a prompt and of its answer, some longer than the window of 128, and the answer's label.
LABELLED = ((190, 170, 1), (40, 60, -1), (300, 20, 1), (1, 200, -1), (90, 90, 1), (20, 250, -1), (64, 64, 1), (7, 3, 1))
#: Tokens of a prompt and of both answers, and the margin that a pair asks for.
PAIRS = ((190, 130, 110, 0.5), (40, 20, 130, 0.0), (300, 7, 60, 1.0), (1, 200, 90, 0.25))
BETA, CENTRING, LONGEST = 0.1, 0.1, 384


def row_of(ids: list[int], asked: int, value: float) -> TokenizedRow:
    return TokenizedRow(Row("d", 1, {}), ids, [IGNORE_INDEX] * asked + ids[asked:], value)


def labelled(sizes: Sequence[tuple[int, int, int]], alphabet: Sequence[int], seed: int = 0) -> list[TokenizedRow]:
    """Answers of these tokens to prompts of any."""
    rng = Random(seed)
    return [
        row_of([rng.randrange(3, 8000) for _ in range(asked)] + rng.choices(alphabet, k=size), asked, float(label))
        for asked, size, label in sizes
    ]


def pairs(sizes: Sequence[tuple[int, int, int, float]] = PAIRS, seed: int = 0) -> list[TokenizedRow]:
    """Chosen and rejected rows in turn."""
    rng, made = Random(seed), []
    for asked, *answers, margin in sizes:
        prompt = [rng.randrange(3, 8000) for _ in range(asked)]
        made += [row_of(prompt + [rng.randrange(3, 8000) for _ in range(int(n))], asked, margin) for n in answers]
    return made


@torch.no_grad()
def likelier(model: Any) -> list[int]:
    """Tokens of which a random text has become likelier by the adapters: answers of them make a KL above 0.

    What gains most on average need not gain in a text of itself, so fewer and fewer are tried.
    """
    ids = torch.randint(3, 8000, (1, 512), generator=torch.Generator().manual_seed(5)).cuda()
    now = model(input_ids=ids).logits[0].float().log_softmax(-1).mean(0)
    with model.disable_adapter():
        before = model(input_ids=ids).logits[0].float().log_softmax(-1).mean(0)
    best: list[int] = (now - before)[3:].topk(400).indices.add(3).tolist()
    for tokens in (best, best[:100], best[:25], *([one] for one in best[:50])):
        rows = labelled(LABELLED, tokens, seed=1)
        if float(torch.stack([plain_gain(model, row) for row in rows]).mean()) > 1.0:
            return tokens
    raise AssertionError("no text has become likelier")


# -- a step as it is written down, on transformers' layers, a row at a time -----------------------------------------


def plain_gain(model: Any, row: TokenizedRow) -> Tensor:
    """The log-probability that a row's answer has gained over the model without its adapters."""

    def log_prob() -> Tensor:
        ids = torch.tensor([row.input_ids]).cuda()
        each = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])
        return each[answer_start(row) - 1 :].sum()

    with torch.no_grad(), model.disable_adapter():
        reference = log_prob()
    return log_prob() - reference


def plain_kto(model: Any, rows: Sequence[TokenizedRow], mismatched: Sequence[TokenizedRow]) -> list[Tensor]:
    """[(loss, KL), gradients]: the mean of 1 - s(beta y (r - z)), z of the mismatched rows."""
    with torch.no_grad():
        kl = torch.stack([plain_gain(model, row) for row in mismatched]).mean().relu()
    losses = [torch.sigmoid(-BETA * row.value * (plain_gain(model, row) - kl)) / len(rows) for row in rows]
    return result(model, losses, kl)


def plain_reward(model: Any, rows: Sequence[TokenizedRow]) -> list[Tensor]:
    """[(loss, 0), gradients]: the mean of -log sigma(s - t - m) + c (s + t)^2 of the scores s and t."""

    def score(row: TokenizedRow) -> Tensor:
        ids = torch.tensor([row.input_ids]).cuda()
        return scores(model, base_of(model).model(input_ids=ids).last_hidden_state[0, -1:])[0]

    both = [(score(one), score(other), one.value) for one, other in zip(rows[0::2], rows[1::2], strict=True)]
    losses = [(-F.logsigmoid(s - t - m) + CENTRING * (s + t).square()) / len(both) for s, t, m in both]
    return result(model, losses, torch.zeros((), device=losses[0].device))


def result(model: Any, losses: Sequence[Tensor], kl: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    total = torch.stack(list(losses)).sum()
    total.backward()
    return [torch.stack([total.detach(), kl]), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]


# -- a step of a run ------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A model and what trains it."""

    model: Any
    objective: Any

    def step(self, number: int = 0) -> list[Tensor]:
        """[(loss, KL or 0), gradients] of the numbered step, as the loop makes it."""
        self.model.zero_grad(set_to_none=True)
        self.objective.begin(number)
        made = self.objective.micro_batches(number, Monitor())
        counts = sum((batch.counts for batch in made), TokenCounts())
        divisors = Divisors(*(torch.tensor(float(n)).cuda() for n in (counts.supervised, counts.pairs)))
        total = torch.zeros(()).cuda()
        for batch in made:
            loss = self.objective.loss({name: value.cuda() for name, value in batch.inputs.items()}, divisors)
            loss.backward()
            total += loss.detach()
        self.objective.reduced()
        kl = torch.tensor(self.objective.metrics().get("kl", 0.0)).cuda()
        return [torch.stack([total, kl]), *(p.grad.clone() for p in self.model.parameters() if p.requires_grad)]


def job_of(dtypes: DtypePlan, batches: Batches, size: int, accumulation: int) -> Any:
    train = TrainConfig(per_device_train_batch_size=size, gradient_accumulation_steps=accumulation)
    settings = RewardModelConfig(margin=True, center_rewards_coefficient=CENTRING)
    return SimpleNamespace(
        recipe=SimpleNamespace(train=train, reward=settings, data=SimpleNamespace(max_seq_len=LONGEST)),
        device=torch.zeros(0).cuda().device,
        dtypes=dtypes,
        pad_token_id=0,
        batches=lambda model: batches,
        reporter=SilentReporter(),
    )


def kto_run(model: Any, rows: Sequence[TokenizedRow], dtypes: DtypePlan, size: int = 4, accumulation: int = 2) -> Run:
    """On pieces of ``size`` rows, behind its first step."""
    loss = LabelLoss.of(PreferenceConfig(beta=BETA))
    stack = stack_of(model, getattr(torch, dtypes.compute))
    assert isinstance(stack, DecoderStack)
    job, epochs = job_of(dtypes, APART, size, accumulation), epochs_of(rows)
    made = LabelObjective(job, model, epochs, loss, group=None, stack=stack, sequence=None, reference=Reference())
    made.restore({"reference": "live"}, Progress(1, 2, 0.0, 0))
    return Run(model, made)


def reward_run(
    model: Any, rows: Sequence[TokenizedRow], dtypes: DtypePlan, batches: Batches, size: int = 2, accumulation: int = 2
) -> Run:
    stack = stack_of(model, getattr(torch, dtypes.compute))
    assert isinstance(stack, DecoderStack)
    job = job_of(dtypes, batches, size, accumulation)
    return Run(model, RewardObjective(job, model, epochs_of_pairs(rows), group=None, stack=stack, sequence=None))


# -- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_of_kto_is_as_exact_as_transformers(name: str) -> None:
    """In float32 to 1e-5; in bfloat16 no further from float32 than transformers' own layers are.

    The KL is a mean of differences of sums of a thousand nats.
    """
    plain = adapted(name, patched=False).float()
    rows = labelled(LABELLED, likelier(plain))
    mismatched = mismatched_rows(kto_run(adapted(name), rows, BFLOAT16).objective.rows_of_step(0), LONGEST)
    exact = plain_kto(plain, rows, mismatched)
    assert float(exact[0][1]) > 0.05
    found = kto_run(adapted(name).float(), rows, FLOAT32).step()
    assert torch.allclose(found[0][0], exact[0][0], rtol=1e-4)
    assert torch.allclose(found[0][1], exact[0][1], rtol=1e-4, atol=5e-4)
    assert off(found, exact) <= 1e-5
    ours = kto_run(adapted(name), rows, BFLOAT16).step()
    with compute_context(ours[0].device, "bfloat16", True):
        theirs = plain_kto(adapted(name, patched=False), rows, mismatched)
    assert torch.allclose(ours[0][0], exact[0][0], rtol=0.05, atol=0.05)
    kl, rounded = abs(ours[0][1] - exact[0][1]), abs(theirs[0][1] - exact[0][1])
    assert float(kl) <= max(
        1.5 * float(rounded), 0.2 * float(exact[0][1])
    )  # a hundred nats of sums rounded by 1 in 256
    assert off(ours, exact) <= 1.25 * off(theirs, exact)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_of_a_reward_model_is_as_exact_as_transformers(name: str) -> None:
    """With the prompts of pairs once or twice; bounds as above."""
    rows = pairs()
    exact = plain_reward(adapted(name, patched=False, scores=True).float(), rows)
    with compute_context(exact[0].device, "bfloat16", True):
        theirs = plain_reward(adapted(name, patched=False, scores=True), rows)
    for batches in (APART, SHARED):
        found = reward_run(adapted(name, scores=True).float(), rows, FLOAT32, batches).step()
        assert torch.allclose(found[0], exact[0], rtol=1e-5)
        assert off(found, exact) <= 1e-5
        ours = reward_run(adapted(name, scores=True), rows, BFLOAT16, batches).step()
        assert torch.allclose(ours[0], exact[0], rtol=0.05, atol=0.05)
        assert off(ours, exact) <= 1.25 * off(theirs, exact)


def same_bits(
    name: str, policy: Any, base: str, run_of: Callable[[Any], Run], *, scores: bool = False, steps: int = 4
) -> None:
    """Losses, KL, gradients and weights of some steps of AdamW, with and without graphs."""
    found: list[list[Tensor]] = []
    for graphs in (False, True):
        model = adapted(name, base, scores=scores)
        set_policy(model, policy)
        runner = graphed(model) if graphs else None
        run, trained = run_of(model), [p for p in model.parameters() if p.requires_grad]
        optimizer, numbers = torch.optim.AdamW(trained, lr=1e-3), []
        for number in range(steps):
            numbers += run.step(number)
            optimizer.step()
        found.append([*numbers, *(p.detach().clone() for p in trained)])
        if runner is not None:
            assert runner.status.stopped is None
            assert (runner.status.without, runner.status.replays) == (1, 2 * steps - 1)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(("name", "policy", "base"), GRAPHS)
def test_kto_has_the_bits_of_a_run_without_graphs(name: str, policy: Any, base: str) -> None:
    """Micro-batches of one shape, whose answers begin elsewhere each time; the KL is estimated without graphs."""
    sizes = [(30 + 3 * n, 110 - 3 * n, 1 if n % 3 else -1) for n in range(16)]
    rows = labelled(sizes, range(3, 8000))
    same_bits(name, policy, base, lambda model: kto_run(model, rows, BFLOAT16))


@pytest.mark.parametrize("batches", [APART, SHARED], ids=["apart", "shared"])
@pytest.mark.parametrize(("name", "policy", "base"), GRAPHS)
def test_reward_models_have_the_bits_of_a_run_without_graphs(
    name: str, policy: Any, base: str, batches: Batches
) -> None:
    rows = pairs([(60, 90 + 2 * n, 70 - 2 * n, 0.1 * n) for n in range(8)])
    same_bits(name, policy, base, lambda model: reward_run(model, rows, BFLOAT16, batches), scores=True)
