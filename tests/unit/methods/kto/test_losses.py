"""Losses of labelled answers against the papers' formulas in float64, their gradients, extremes, what is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from ftcli.methods.kto.losses import (
    LABEL_SUMS,
    LabelledAnswers,
    LabelLoss,
    LabelSettings,
    label_sums,
    measures,
    step_sums,
)
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.tables import code_of, preference_losses


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


#: Of r, z, beta and the weights of good and bad answers: the loss of a good one, and of a bad one.
Formula = Callable[[float, float, float, float, float], tuple[float, float]]
FORMULAS: dict[str, Formula] = {
    "kto": lambda r, z, b, good, bad: (good * (1 - sigma(b * (r - z))), bad * (1 - sigma(b * (z - r)))),
    "apo_zero_unpaired": lambda r, z, b, good, bad: (good * (1 - sigma(b * r)), bad * sigma(b * r)),
}
GAINS = (-40.0, -3.25, -0.5, 0.0, 0.125, 2.0, 17.5)
HOW = LabelSettings(0.3, 1.25, 0.75)


def answers_of(gained: Tensor, labels: list[float], kl: float) -> LabelledAnswers:
    kind = gained.dtype
    return LabelledAnswers(gained, torch.tensor(labels, dtype=kind), torch.tensor(kl, dtype=kind))


def values(name: str, answers: LabelledAnswers, how: LabelSettings = HOW) -> Tensor:
    found: Tensor = code_of(preference_losses.row(name).code)(answers, how)
    return found


def test_every_loss_has_a_formula_here() -> None:
    assert set(FORMULAS) == set(preference_losses.names(paired=False))


@pytest.mark.parametrize("name", FORMULAS)
def test_it_is_the_papers_formula(name: str) -> None:
    for gain, kl in product(GAINS, (0.0, 0.7, 12.0)):
        wanted = FORMULAS[name](gain, kl, HOW.beta, HOW.desirable_weight, HOW.undesirable_weight)
        for kind, rel in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
            found = values(name, answers_of(torch.tensor([gain, gain, gain], dtype=kind), [1, -1, 0], kl))
            assert found.tolist() == pytest.approx([*wanted, 0.0], rel=rel, abs=1e-12 if rel < 1e-6 else 1e-7)


@pytest.mark.parametrize("name", FORMULAS)
def test_its_gradient_is_that_of_finite_differences(name: str) -> None:
    gained = torch.tensor(GAINS, dtype=torch.float64, requires_grad=True)
    labels = [1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0]
    assert torch.autograd.gradcheck(lambda x: values(name, answers_of(x, labels, 0.4)), (gained,), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FORMULAS)
def test_nothing_overflows_in_float32(name: str) -> None:
    gained = torch.tensor([-1e5, -1e3, 1e3, 1e5] * 2, requires_grad=True)
    found = values(name, answers_of(gained, [1.0] * 4 + [-1.0] * 4, 1e4))
    (gradient,) = torch.autograd.grad(found.sum(), gained)
    assert torch.isfinite(found).all()
    assert torch.isfinite(gradient).all()
    assert float(found.detach().min()) >= 0


@pytest.mark.parametrize("name", FORMULAS)
def test_a_good_answer_is_pulled_up_and_a_bad_one_down(name: str) -> None:
    gained = torch.zeros(3, requires_grad=True)
    found = values(name, answers_of(gained, [1, -1, 0], 0.0))
    (gradient,) = torch.autograd.grad(found.sum(), gained)
    assert found.tolist() == pytest.approx([HOW.desirable_weight / 2, HOW.undesirable_weight / 2, 0.0])
    assert gradient.tolist() == pytest.approx([-HOW.beta * 1.25 / 4, HOW.beta * 0.75 / 4, 0.0])


def test_what_the_recipe_says_arrives() -> None:
    assert LabelLoss.of(None) == LabelLoss("kto", LabelSettings(0.1, 1.0, 1.0), 0.0, None)
    section = {
        "loss": "apo_zero_unpaired", "beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.5, "kl_rows": 4,
        "sft_weight": 0.1,
    }  # fmt: skip
    found = LabelLoss.of(PreferenceConfig.model_validate(section))
    assert found == LabelLoss("apo_zero_unpaired", LabelSettings(0.2, 1.5, 0.5), 0.1, 4)
    assert (found.estimates_kl, LabelLoss.of(None).estimates_kl) == (False, True)


def test_measures_are_means_of_either_kind() -> None:
    answers = answers_of(torch.tensor([2.0, -1.0, 0.0, -3.0, 1.0, 9.0]), [1, 1, 1, -1, -1, 0], 0.5)
    logp, tokens = torch.tensor([-4.0, -6.0, -2.0, -9.0, -3.0, -99.0]), torch.tensor([2.0, 3.0, 1.0, 4.0, 2.0, 7.0])
    sums = label_sums(answers, logp, tokens, 0.1) + step_sums(torch.tensor(0.5))
    sums = sums + step_sums(torch.tensor(0.25))
    assert measures(sums.tolist(), kl=True) == pytest.approx(
        {
            "rewards/chosen": 0.1 / 3, "rewards/rejected": -0.1, "rewards/margins": 0.1 / 3 + 0.1,
            "logps/chosen": -12 / 6, "logps/rejected": -12 / 6, "chosen_rose": 1.5 / 3, "rejected_fell": 0.5,
            "rewards/accuracies": 2.5 / 5, "kl": 0.375,
        },
        rel=1e-6,
    )  # fmt: skip
    assert "kl" not in measures(sums.tolist(), kl=False)
    assert measures([0.0] * LABEL_SUMS, kl=True) == {}
