"""Losses of pairs against the papers' formulas in float64, their gradients, their values at the start, and extremes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ftcli.methods.preference.figures import measures, pair_sums
from ftcli.methods.preference.losses import Answers, LossSettings, PairLoss
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.tables import code_of, preference_losses

#: What each loss is asked with where it says nothing of beta itself.
BETA = {"sigmoid_norm": 5.0, "ipo": 0.5}
#: Losses of r_w - r_l alone: what they pull one answer up by, they push the other one down by.
OF_DIFFERENCE = ("sigmoid", "hinge", "robust", "discopop", "cpo")
#: The same of nats a token.
OF_MEAN_DIFFERENCE = ("sigmoid_norm", "ipo", "simpo")


def log_sigma(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigma(x: float) -> float:
    return math.exp(log_sigma(x))


@dataclass(frozen=True)
class Pair:
    """Four log-probabilities, two lengths, and what the papers make of them."""

    w: float
    l: float  # noqa: E741 - the papers' letter
    ref_w: float
    ref_l: float
    n_w: int
    n_l: int

    @property
    def up(self) -> float:
        """log pi(w) / ref(w)."""
        return self.w - self.ref_w

    @property
    def down(self) -> float:
        """log pi(l) / ref(l)."""
        return self.l - self.ref_l

    def swapped(self) -> Pair:
        return Pair(self.l, self.w, self.ref_l, self.ref_w, self.n_l, self.n_w)

    def answers(self, dtype: torch.dtype = torch.float64, *, alone: bool = False) -> Answers:
        """As our losses take it; ``alone``: without a reference."""
        one = [self.w, self.l, 0.0 if alone else self.ref_w, 0.0 if alone else self.ref_l, self.n_w, self.n_l]
        return Answers(*(torch.tensor([float(value)], dtype=dtype) for value in one))


Formula = Callable[[Pair, float, float, float], float]


def _conservative(x: float, e: float) -> float:
    return -(1 - e) * log_sigma(x) - e * log_sigma(-x)


def _orpo(p: Pair, b: float, g: float, e: float) -> float:
    chosen, rejected = math.exp(p.w / p.n_w), math.exp(p.l / p.n_l)
    odds = (chosen / -math.expm1(p.w / p.n_w)) / (rejected / -math.expm1(p.l / p.n_l))
    return -math.log(chosen) - b * math.log(odds / (1 + odds))


def _discopop(p: Pair, b: float, g: float, e: float) -> float:
    rho = b * (p.up - p.down)
    share = 1 / (1 + math.exp(-rho / 0.05))
    return (1 - share) * math.log(1 + math.exp(-rho)) + share * math.exp(-rho)


#: Written from the papers (the table of docs/preference.md): a pair, beta, gamma, and the share of wrong labels.
FORMULAS: dict[str, Formula] = {
    "sigmoid": lambda p, b, g, e: _conservative(b * (p.up - p.down), e),
    "sigmoid_norm": lambda p, b, g, e: _conservative(b * (p.up / p.n_w - p.down / p.n_l), e),
    "ipo": lambda p, b, g, e: (p.up / p.n_w - p.down / p.n_l - 0.5 / b) ** 2,
    "hinge": lambda p, b, g, e: (1 - e) * max(0.0, 1 - b * (p.up - p.down)) + e * max(0.0, 1 - b * (p.down - p.up)),
    "robust": lambda p, b, g, e: (
        ((1 - e) * -log_sigma(b * (p.up - p.down)) - e * -log_sigma(b * (p.down - p.up))) / (1 - 2 * e)
    ),
    "apo_zero": lambda p, b, g, e: (1 - sigma(b * p.up)) + sigma(b * p.down),
    "apo_down": lambda p, b, g, e: sigma(b * p.up) + (1 - sigma(b * (p.up - p.down))),
    "bco_pair": lambda p, b, g, e: -math.log(sigma(b * p.up)) - math.log(1 - sigma(b * p.down)),
    "nca_pair": lambda p, b, g, e: -log_sigma(b * p.up) - 0.5 * (log_sigma(-b * p.up) + log_sigma(-b * p.down)),
    "sppo_hard": lambda p, b, g, e: (p.up - 0.5 / b) ** 2 + (p.down + 0.5 / b) ** 2,
    "discopop": _discopop,
    "simpo": lambda p, b, g, e: -log_sigma(b / p.n_w * p.w - b / p.n_l * p.l - g),
    "cpo": lambda p, b, g, e: _conservative(b * (p.w - p.l), e),
    "orpo": _orpo,
}

PAIRS = (
    Pair(-12.5, -20.25, -14.0, -17.5, 5, 7),
    Pair(-31.0, -4.5, -30.5, -6.0, 12, 2),
    Pair(-3.0, -3.5, -2.0, -5.5, 3, 9),
    Pair(-60.0, -75.0, -80.0, -52.5, 25, 25),
)
EXTREMES = (1e-3, 1.0, 1e2, 1e4, 1e5)


def settings_of(name: str, smoothing: float = 0.0) -> LossSettings:
    beta = BETA.get(name) or preference_losses.row(name).beta
    assert beta is not None
    return LossSettings(beta, 0.75, smoothing if preference_losses.row(name).smooths else 0.0)


def value_of(name: str, answers: Answers, how: LossSettings) -> Tensor:
    found: Tensor = code_of(preference_losses.row(name).code)(answers, how)
    return found


def test_every_loss_has_a_formula_here() -> None:
    assert set(FORMULAS) == set(preference_losses.names(paired=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("name", FORMULAS)
def test_it_is_the_papers_formula(name: str, smoothing: float) -> None:
    how, alone = settings_of(name, smoothing), not preference_losses.row(name).reference
    for pair in PAIRS:
        wanted = FORMULAS[name](pair, how.beta, how.gamma, how.smoothing)
        assert value_of(name, pair.answers(alone=alone), how).item() == pytest.approx(wanted, rel=1e-9, abs=1e-12)
        found = value_of(name, pair.answers(torch.float32, alone=alone), how)
        assert found.dtype == torch.float32
        assert found.item() == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", FORMULAS)
def test_its_gradient_is_that_of_finite_differences(name: str) -> None:
    how = settings_of(name, 0.2)
    for pair in PAIRS:
        fixed = pair.answers(alone=not preference_losses.row(name).reference)
        given = (fixed.chosen.requires_grad_(), fixed.rejected.requires_grad_())

        def value(chosen: Tensor, rejected: Tensor, fixed: Answers = fixed) -> Tensor:
            rest = (fixed.ref_chosen, fixed.ref_rejected, fixed.chosen_tokens, fixed.rejected_tokens)
            return value_of(name, Answers(chosen, rejected, *rest), how)

        assert torch.autograd.gradcheck(value, given, eps=1e-6, atol=1e-6)


def gradients(name: str, answers: Answers, how: LossSettings) -> tuple[float, float, float]:
    """The loss, and its gradients to both answers' log-probabilities."""
    chosen, rejected = (x.detach().clone().requires_grad_() for x in (answers.chosen, answers.rejected))
    rest = (answers.ref_chosen, answers.ref_rejected, answers.chosen_tokens, answers.rejected_tokens)
    loss = value_of(name, Answers(chosen, rejected, *rest), how).sum()
    up, down = torch.autograd.grad(loss, (chosen, rejected))
    return loss.item(), up.item(), down.item()


@pytest.mark.parametrize("name", FORMULAS)
def test_nothing_overflows_in_float32(name: str) -> None:
    """Also where an answer is all but certain (ORPO's odds are infinite at 0) and where margins are enormous."""
    how = settings_of(name, 0.2)
    for size in EXTREMES:
        for ahead in (True, False):
            certain, unlikely = (-0.0, -size) if ahead else (-size, -0.0)
            for pair in (
                Pair(certain, unlikely, -size / 2, -size / 2, 4, 4),
                Pair(certain * 1e-8, certain * 1e-9, -1.0, -size, 4, 3),
                Pair(0.0, 0.0, unlikely, certain, 1, 1),
            ):
                answers = pair.answers(torch.float32, alone=not preference_losses.row(name).reference)
                assert all(map(math.isfinite, gradients(name, answers, how))), (name, pair)


@pytest.mark.parametrize("name", [*OF_DIFFERENCE, *OF_MEAN_DIFFERENCE])
def test_an_equal_pair_teaches_nothing_and_a_swapped_one_the_opposite(name: str) -> None:
    """Both answers are computed by one model: the gradient of two equal ones adds up to 0."""
    how = settings_of(name)
    same = Pair(-8.0, -8.0, -7.0, -7.0, 4, 4)
    _, up, down = gradients(name, same.answers(), how)
    assert up + down == pytest.approx(0.0, abs=1e-15)
    assert abs(up) > 0.01
    # At the start a swapped pair pulls as hard at the other answer.
    start = Pair(-8.0, -11.0, -8.0, -11.0, 4, 4)
    if preference_losses.row(name).reference:
        assert gradients(name, start.swapped().answers(), how)[2] == pytest.approx(
            -gradients(name, start.answers(), how)[1]
        )
    for pair in PAIRS:
        answers, other = pair.answers(), pair.swapped().answers()
        assert other.difference.item() == -answers.difference.item()
        assert other.mean_difference.item() == -answers.mean_difference.item()


@pytest.mark.parametrize("name", ["sigmoid", "sigmoid_norm", "hinge", "cpo"])
def test_labels_that_are_wrong_in_a_share_of_the_pairs_are_the_mean_over_both_ways(name: str) -> None:
    plain, smoothed = settings_of(name), settings_of(name, 0.2)
    for pair in PAIRS:
        right, wrong = (value_of(name, p.answers(), plain).item() for p in (pair, pair.swapped()))
        assert value_of(name, pair.answers(), smoothed).item() == pytest.approx(0.8 * right + 0.2 * wrong, rel=1e-12)


def test_robust_is_unbiased() -> None:
    """Its mean over labels of which a share is flipped is the loss of the right ones."""
    for pair in PAIRS:
        right, wrong = (value_of("robust", p.answers(), settings_of("robust", 0.2)) for p in (pair, pair.swapped()))
        clean = value_of("sigmoid", pair.answers(), settings_of("sigmoid")).item()
        assert (0.8 * right + 0.2 * wrong).item() == pytest.approx(clean, rel=1e-12)


def _start(beta: float) -> dict[str, float]:
    ln2 = math.log(2)
    return {
        "sigmoid": ln2, "sigmoid_norm": ln2, "ipo": 1 / (4 * beta**2), "hinge": 1.0, "robust": ln2, "apo_zero": 1.0,
        "apo_down": 1.0, "bco_pair": 2 * ln2, "nca_pair": 2 * ln2, "sppo_hard": 1 / (2 * beta**2),
        "discopop": (ln2 + 1) / 2,
    }  # fmt: skip


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("name", _start(1.0))
def test_where_the_policy_is_the_reference_the_loss_is_known(name: str, smoothing: float) -> None:
    how = settings_of(name, smoothing)
    answers = Pair(-12.0, -31.5, -12.0, -31.5, 5, 9).answers(torch.float32)
    assert value_of(name, answers, how).item() == pytest.approx(_start(how.beta)[name], rel=1e-6)


def test_the_gradient_of_a_small_beta_is_half_the_difference() -> None:
    for pair in PAIRS:
        _, up, down = gradients("sigmoid", pair.answers(), LossSettings(1e-9))
        assert (up / 1e-9, down / 1e-9) == pytest.approx((-0.5, 0.5), rel=1e-6)


def loss_of(method: str = "dpo", **settings: Any) -> PairLoss:
    return PairLoss.of(method, PreferenceConfig.model_validate(settings))


def test_a_mixture_is_the_weighted_sum() -> None:
    mixed = loss_of(loss=[{"name": "sigmoid", "weight": 0.8}, {"name": "bco_pair", "weight": 0.2}], beta=0.3)
    for pair in PAIRS:
        parts = (FORMULAS[name](pair, 0.3, 0.5, 0.0) for name in ("sigmoid", "bco_pair"))
        wanted = sum(weight * part for weight, part in zip((0.8, 0.2), parts, strict=True))
        assert mixed.values(pair.answers()).item() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("name", ["simpo", "cpo", "orpo"])
def test_a_loss_without_a_reference_has_none_in_a_mixture_that_has_one(name: str) -> None:
    mixed = loss_of(loss=[{"name": "sigmoid"}, {"name": name, "weight": 0.5}], beta=0.3)
    assert mixed.reference
    for pair in PAIRS:
        alone = Pair(pair.w, pair.l, 0.0, 0.0, pair.n_w, pair.n_l)
        wanted = FORMULAS["sigmoid"](pair, 0.3, 0.5, 0.0) + 0.5 * FORMULAS[name](alone, 0.3, 0.5, 0.0)
        assert mixed.values(pair.answers()).item() == pytest.approx(wanted, rel=1e-9)


def test_each_loss_of_a_mixture_has_its_own_beta_where_none_is_written() -> None:
    mixed = loss_of(loss=[{"name": "sigmoid"}, {"name": "nca_pair", "weight": 2.0}])
    assert [(name, weight, how.beta) for name, weight, how in mixed.parts] == [
        ("sigmoid", 1.0, 0.1),
        ("nca_pair", 2.0, 0.01),
    ]


@pytest.mark.parametrize(("method", "name", "reference"), [("dpo", "sigmoid", True), ("orpo", "orpo", False)])
def test_a_method_begins_with_its_own_loss(method: str, name: str, reference: bool) -> None:
    loss = PairLoss.of(method, None)
    assert [part[0] for part in loss.parts] == [name]
    assert loss.reference is reference


def sums_of(pairs: list[Pair], loss: PairLoss, weights: list[float] | None = None) -> dict[str, float]:
    each = [p.answers(torch.float32, alone=not loss.reference) for p in pairs]
    answers = Answers(*(torch.cat([getattr(a, n) for a in each]) for n in Answers.__slots__))
    counted = torch.ones(len(pairs)) if weights is None else torch.tensor(weights)
    return measures(pair_sums(answers, loss, counted).tolist(), compared=loss.reference)


def test_measures_are_means_over_pairs_a_tie_being_half_right() -> None:
    tie, right = Pair(-8.0, -9.0, -8.0, -9.0, 4, 4), Pair(-8.0, -13.0, -10.0, -9.0, 2, 5)
    found = sums_of([tie, right], loss_of())
    assert found["rewards/accuracies"] == 0.75
    assert found["rewards/accuracies_alike"] == 0.5  # the other pair's answers differ in length
    assert found["rewards/chosen"] == pytest.approx(0.1 * 2 / 2)
    assert found["rewards/rejected"] == pytest.approx(0.1 * -4 / 2)
    assert found["rewards/margins"] == pytest.approx(0.3)
    assert found["logps/chosen"] == pytest.approx(-16 / 6)  # nats a token, over all tokens
    assert found["logps/rejected"] == pytest.approx(-22 / 9)
    assert found["chosen_fell"] == 0.0
    assert sums_of([right.swapped()], loss_of())["rewards/accuracies"] == 0.0
    assert sums_of([right, tie], loss_of(), [1.0, 0.0]) == sums_of([right], loss_of())
    assert sums_of([tie], loss_of(), [0.0]) == {}


def test_rewards_of_losses_of_nats_a_token_are_of_nats_a_token() -> None:
    pair = Pair(-8.0, -12.0, -10.0, -9.0, 2, 3)
    assert sums_of([pair], loss_of(loss="ipo", beta=0.5))["rewards/margins"] == pytest.approx(0.5 * (2 / 2 + 3 / 3))
    assert "chosen_fell" not in sums_of([pair], loss_of("simpo"))  # there is nothing that it could have fallen from
    # The longer answer is the likelier one a token: SimPO prefers it, CPO the other one.
    longer = Pair(-8.0, -6.0, 0.0, 0.0, 8, 2)
    assert sums_of([longer], loss_of("simpo"))["rewards/accuracies"] == 1.0
    assert sums_of([longer], loss_of(loss="cpo"))["rewards/accuracies"] == 0.0
