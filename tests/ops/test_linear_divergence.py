"""The divergence of two heads' distributions in chunks: its formula in float64, and TRL's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from ftkernels import linear_divergence as module
from ftkernels.limits import DIVERGENCE_BYTES, divergence_bytes, divergence_rows_at_once
from ftkernels.linear_divergence import (
    LinearHead,
    TopLogProbs,
    linear_divergence,
    linear_divergence_reference,
    top_log_probs,
)

ours = partial(linear_divergence, backend="triton")
BETAS = [0.0, 0.3, 0.5, 1.0]
OPTIONS: list[tuple[dict[str, float], dict[str, float], float]] = [
    ({}, {}, 1.0),
    ({"softcap": 30.0, "logit_scale": 0.5}, {}, 0.5),
    ({}, {"softcap": 5.0, "logit_scale": 2.0}, 2.0),
]


def _case(device: str, rows: int = 13, hidden: int = 33, vocabulary: int = 301, more: int = 0) -> tuple[Any, ...]:
    """The student's hidden states, head and bias; the teacher's, which is wider; weights."""
    student = (
        torch.randn(rows, hidden, device=device),
        torch.randn(vocabulary, hidden, device=device) * 0.3,
        torch.randn(vocabulary, device=device),
    )
    teacher = (
        torch.randn(rows, hidden + 7, device=device),
        torch.randn(vocabulary + more, hidden + 7, device=device) * 0.3,
        torch.randn(vocabulary + more, device=device),
    )
    weights = torch.rand(rows, device=device)
    weights[::4] = 0.0
    return student, teacher, weights


def _call(function: Any, teacher: Any, weights: Any, given: Any, beta: float) -> Any:
    mine, theirs, temperature = given

    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        head = LinearHead(*(one.to(x.dtype) for one in teacher), **theirs)
        found = function(LinearHead(x, w, b, **mine), head, weights.to(x.dtype), beta=beta, temperature=temperature)
        return found.loss

    return run


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, of which the last is smaller."""
    monkeypatch.setattr(module, "divergence_rows_at_once", lambda *_: 5)


@pytest.mark.parametrize("given", OPTIONS, ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_loss_and_all_gradients_match_float64(device: str, tools: Any, given: Any, beta: float) -> None:
    student, teacher, weights = _case(device)
    call = partial(_call, teacher=teacher, weights=weights, given=given, beta=beta)
    tools.assert_float32(call(ours), call(linear_divergence_reference), student)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_rows_and_entropies_are_the_formulas(device: str, beta: float, backend: Any) -> None:
    student, teacher, weights = _case(device, rows=6)
    mine, theirs = LinearHead(*student), LinearHead(*teacher)
    found = linear_divergence(mine, theirs, weights, beta=beta, backend=backend)
    exact = [LinearHead(*(one.double() for one in (head.hidden, head.weight, head.bias))) for head in (mine, theirs)]
    wanted = linear_divergence_reference(*exact, weights.double(), beta=beta)
    torch.testing.assert_close(found.rows.double(), wanted.rows, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(found.entropies.double(), wanted.entropies, rtol=2e-5, atol=2e-5)
    assert not found.rows.requires_grad
    assert found.agreed.tolist() == wanted.agreed.tolist()
    same = linear_divergence(mine, mine, weights, beta=beta, backend=backend)
    assert same.agreed.all()


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("given", OPTIONS, ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_the_likeliest_entries_and_their_tail_match_float64(
    device: str, tools: Any, given: Any, beta: float, count: int
) -> None:
    student, teacher, weights = _case(device, more=9)
    mine, theirs, temperature = given
    exact = LinearHead(*(one.double() for one in teacher), **theirs).within(301)
    top = top_log_probs(exact, count, temperature=temperature)

    def call(function: Any) -> Any:
        def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
            head = LinearHead(x, w, b, **mine)
            found = function(head, top, weights.to(x.dtype), beta=beta, temperature=temperature)
            return found.loss

        return run

    # A small difference of large sums: under strong softcaps torch's own float32 is 9e-6 off.
    compared = tools.compare(call(ours), call(linear_divergence_reference), student)
    assert compared.error <= max(1e-5, 2 * compared.torch_error), compared


@pytest.mark.parametrize("given", OPTIONS, ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_all_entries_are_the_whole_vocabulary(device: str, given: Any, beta: float) -> None:
    """The same loss, gradients, entropies and agreement; what is known of fewer entries is never more."""
    (x, w, b), theirs = ([one.double() for one in each] for each in _case(device)[:2])
    weights = torch.rand(len(x), device=device, dtype=torch.float64)
    mine, other, temperature = given
    head = LinearHead(*theirs, **other)
    x.requires_grad_()
    found = []
    for against in (head, *(top_log_probs(head, count, temperature=temperature) for count in (301, 300, 40))):
        one = linear_divergence(LinearHead(x, w, b, **mine), against, weights, beta=beta, temperature=temperature)
        found.append((one, *torch.autograd.grad(one.loss, x)))
    (whole, gradient), (every, of_every), (but_one, of_but_one), (few, _) = found
    near = 1e-9 if device == "cpu" else 1e-6  # a compiled kernel is given beta and temperature in float32
    for same, its in ((every, of_every), (but_one, of_but_one)):
        torch.testing.assert_close(same.rows, whole.rows, rtol=near, atol=1e-12)
        torch.testing.assert_close(its, gradient, rtol=near, atol=1e-12)
    for one in (every, but_one, few):
        torch.testing.assert_close(one.entropies, whole.entropies, rtol=near, atol=1e-12)
        assert one.agreed.tolist() == whole.agreed.tolist()
    assert bool((few.rows <= whole.rows + 1e-12).all())
    assert float((whole.rows - few.rows).max()) > 1e-6


@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")
def test_the_tail_is_trls(device: str) -> None:
    """Of TRL's self-distillation, whose loss is the Jensen-Shannon divergence of both with a tail bucket."""
    from trl.experimental.sdpo.loss_utils import add_tail_bucket

    (x, w, b), (y, v, c) = ([one.double() for one in each] for each in _case(device)[:2])
    top = top_log_probs(LinearHead(y, v, c), 6)
    theirs = add_tail_bucket(torch.log_softmax(y @ v.T + c, -1).gather(1, top.ids))
    mine = add_tail_bucket(torch.log_softmax(x @ w.T + b, -1).gather(1, top.ids))
    found = linear_divergence(LinearHead(x, w, b), top, torch.ones(len(x), device=device), beta=0.0)
    torch.testing.assert_close(found.rows, (theirs.exp() * (theirs - mine)).sum(1), rtol=1e-6, atol=1e-9)


def test_what_is_kept_of_a_teacher_is_its_distribution(device: str) -> None:
    (_, _, _), (y, v, c), _ = _case(device)
    found = top_log_probs(LinearHead(y, v, c, 5.0, 2.0), 6, temperature=0.7)
    exact = torch.log_softmax(5 * torch.tanh(2 * (y.double() @ v.double().T + c) / 5) / 0.7, -1)
    wanted = exact.topk(6)
    assert found.ids.tolist() == wanted.indices.tolist()
    torch.testing.assert_close(found.log_probs.double(), wanted.values, rtol=1e-5, atol=1e-5)
    left = exact.scatter(1, wanted.indices, -torch.inf).logsumexp(1)
    torch.testing.assert_close(found.rest.double(), left, rtol=1e-5, atol=1e-5)
    assert top_log_probs(LinearHead(y[:0], v), 6).ids.shape == (0, 6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_of_a_model_from_itself_there_is_none(device: str, beta: float, backend: Any) -> None:
    (x, w, b), _, weights = _case(device)
    x.requires_grad_()
    head = LinearHead(x.detach(), w, b)
    found = linear_divergence(replace(head, hidden=x), head, weights, beta=beta, backend=backend)
    assert float(found.rows.abs().max()) < (1e-6 if 0 < beta < 1 else 1e-12)
    found.loss.backward()
    assert x.grad is not None
    assert float(x.grad.abs().max()) < 1e-6


@pytest.mark.parametrize(("rows", "vocabulary", "more"), [(1, 2, 0), (3, 127, 5), (17, 9001, 64), (2, 5000, 0)])
def test_odd_shapes_and_padded_vocabularies(device: str, tools: Any, rows: int, vocabulary: int, more: int) -> None:
    student, teacher, weights = _case(device, rows, 5, vocabulary, more)
    call = partial(_call, teacher=teacher, weights=weights + 0.1, given=OPTIONS[0], beta=1.0)
    tools.assert_float32(call(ours), call(linear_divergence_reference), student)


@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")
@pytest.mark.parametrize("beta", BETAS)
def test_it_is_trls(device: str, beta: float) -> None:
    """GKD's on whole logits; and that of DistillationTrainer, which has tiles of its own."""
    from trl.experimental.gkd import GKDTrainer

    (x, w, b), (y, v, c), _ = _case(device)
    weights = torch.full((len(x),), 1.0 / len(x), device=device)
    x.requires_grad_()
    loss = GKDTrainer.generalized_jsd_loss(
        (x @ w.T + b)[None], (y @ v.T + c)[None], beta=beta, temperature=0.7, reduction="sum"
    )
    (wanted,) = torch.autograd.grad(loss / len(x), x)
    found = linear_divergence(LinearHead(x, w, b), LinearHead(y, v, c), weights, beta=beta, temperature=0.7)
    torch.testing.assert_close(found.loss, loss / len(x), rtol=1e-5, atol=1e-6)
    (mine,) = torch.autograd.grad(found.loss, x)
    torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-6)


def test_half_precision_keeps_logits_in_float32(device: str) -> None:
    student, teacher, weights = _case(device, rows=64, hidden=64, vocabulary=500)
    half = [[one.bfloat16() for one in each] for each in (student, teacher)]
    mine, theirs = (LinearHead(*each) for each in half)
    exact = [LinearHead(*(one.double() for one in each)) for each in half]
    wanted = linear_divergence_reference(*exact, weights.double()).rows
    found = linear_divergence(mine, theirs, weights, backend="auto").rows
    assert float((found.double() - wanted).abs().max()) < 1e-3


def test_strided_inputs(device: str, tools: Any) -> None:
    student, teacher, weights = _case(device, rows=12)
    x = torch.randn(24, 66, device=device)[::2, ::2]
    call = partial(_call, teacher=teacher, weights=weights[:12], given=OPTIONS[0], beta=0.5)
    tools.assert_float32(call(ours), call(linear_divergence_reference), (x, *student[1:]))


@pytest.mark.parametrize(
    ("change", "said"),
    [({"beta": 1.5}, "beta lies"), ({"temperature": 0.0}, "temperature is positive"), ({"weights": 3}, "do not fit")],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], said: str) -> None:
    student, teacher, weights = _case("cpu")
    given = dict(change)
    weights = weights[: given.pop("weights", len(weights))]
    with pytest.raises(ValueError, match=said):
        linear_divergence(LinearHead(*student), LinearHead(*teacher), weights, **given)
    top = TopLogProbs(torch.zeros(13, 2).long(), torch.zeros(13, 2), torch.zeros(13), 301)
    with pytest.raises(ValueError, match=said):
        linear_divergence(LinearHead(*student), top, weights, **given)


def test_the_workspace_is_bounded() -> None:
    for vocabulary in (32_000, 128_256, 262_144):
        rows = divergence_rows_at_once("cuda", vocabulary, 4)
        assert rows >= 256
        assert rows % 64 == 0
        assert rows * vocabulary * 10 <= DIVERGENCE_BYTES["cuda"]
        assert divergence_bytes(8 * 4096, 4096, vocabulary, 2, on_gpu=True) < 1.5 * 2**30
