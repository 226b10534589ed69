"""float16 trains under a scaled loss; weight decay leaves norms and biases alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ftcli.config.training import TrainConfig
from ftcli.errors import ExitCode, FtcliError
from ftcli.plan.precision import DtypePlan
from ftcli.train.optimizer import MOST_SKIPPED, Optimization
from ftcli.train.parallel import Parallel
from tests.small_models import build

CPU = torch.device("cpu")


class Three(torch.nn.Module):
    """Three weights, the gradient of each of which is its number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))


def optimization(model: Any, *, scaled: bool = False, own: bool = False, **settings: Any) -> Optimization:
    train = TrainConfig.model_validate({"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 1e6, **settings})
    plan = DtypePlan("float32", None, "float32", False, "", loss_scaling=scaled)
    parallel = Parallel(None, model, seed=0, batch_size=1)
    return Optimization(model, train, plan, train.optim, own, 100, device=CPU, stack=None, parallel=parallel)


def test_gradients_are_divided_by_the_scale_once_before_clipping() -> None:
    model = Three()
    made = optimization(model, scaled=True, lr_scheduler_type="constant")
    assert made.scaler is not None
    made.backward((model.weight * torch.tensor([1.0, 2.0, 2.0])).sum())
    assert model.weight.grad is not None
    assert model.weight.grad[0] == made.scaler.get_scale() > 1.0
    assert made.clip() == 3.0
    made.step(1)
    assert torch.equal(model.weight.detach(), -torch.tensor([1.0, 2.0, 2.0]))
    assert model.weight.grad is None


@pytest.mark.parametrize(("optim", "own"), [("sgd", False), ("adamw_torch", False), ("adamw_torch", True)])
@pytest.mark.parametrize("limit", [1.5, 4.0])
def test_gradients_are_clipped_to_max_grad_norm(optim: str, own: bool, limit: float) -> None:
    model, gradient = Three(), torch.tensor([1.0, 2.0, 2.0])
    made = optimization(model, own=own, optim=optim, max_grad_norm=limit)
    made.begin()
    made.backward((model.weight * gradient).sum())
    assert made.clip() == 3.0, "the norm is that before clipping"
    made.step(1)
    # The first step of AdamW is the same for gradients of any size; its first moment is a tenth of the gradient.
    taken = -model.weight.detach() if optim == "sgd" else 10 * made.optimizer.state[model.weight]["exp_avg"]
    assert torch.allclose(taken, gradient * min(1.0, limit / 3.0), rtol=1e-5)


def test_a_step_that_overflows_changes_nothing_and_halves_the_scale() -> None:
    model = Three()
    made = optimization(model, scaled=True)
    assert made.scaler is not None
    before = made.scaler.get_scale()
    made.backward((model.weight * torch.inf).sum())
    made.clip()
    made.step(1)
    assert torch.equal(model.weight.detach(), torch.zeros(3))
    assert made.scaler.get_scale() == before / 2
    assert made.learning_rate() == 1.0, "a step that was skipped is none of the schedule's"
    made.backward(model.weight.sum())
    made.clip()
    made.step(2)
    assert made.learning_rate() == pytest.approx(0.99)


def test_twenty_skipped_steps_in_a_row_are_divergence() -> None:
    model = Three()
    made = optimization(model, scaled=True)

    def step(number: int, factor: float) -> None:
        made.backward((model.weight * factor).sum())
        made.clip()
        made.step(number)

    for number in range(MOST_SKIPPED - 1):
        step(number, torch.inf)
    step(MOST_SKIPPED, 1.0)
    for number in range(MOST_SKIPPED - 1):
        step(number, torch.inf)
    with pytest.raises(FtcliError) as raised:
        step(40, torch.inf)
    assert raised.value.findings[0].code == "FT702"
    assert raised.value.exit_code == ExitCode.DIVERGED


@pytest.mark.parametrize(
    ("optim", "own", "settings"),
    [
        ("adamw_torch", False, {}),
        ("adamw_torch", True, {}),
        ("adamw_torch", False, {"loraplus_lr_ratio": 4.0}),
        ("muon", False, {}),
        ("sgd", False, {}),
    ],
)
def test_weight_decay_is_never_on_norms_and_biases(optim: str, own: bool, settings: dict[str, Any]) -> None:
    model = build("qwen2")  # has biases
    made = optimization(model, own=own, optim=optim, weight_decay=0.1, learning_rate=0.1, **settings)
    decay = {id(p): group["weight_decay"] for group in made.optimizer.param_groups for p in group["params"]}
    names = {name: decay[id(p)] for name, p in model.named_parameters()}
    left_alone = {name for name in names if "norm" in name or name.endswith("bias")}
    assert any("norm" in name for name in left_alone)
    assert any(name.endswith("bias") for name in left_alone)
    assert {name for name, value in names.items() if value == 0.0} == left_alone
    assert {value for name, value in names.items() if name not in left_alone} == {0.1}
