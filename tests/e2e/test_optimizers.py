"""Each optimizer does the steps that its library does, keeps the state that is counted, and goes on to the last bit."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ftcli.plan.trained import TrainedMatrices, TrainedParameters, optimizer_state
from ftcli.tables import optimizers
from ftcli.train.adamw import MuonWithAdamW
from tests.e2e.conftest import User
from tests.tiers import further

SETTINGS: dict[str, dict[str, Any]] = {
    name: {"lr_scheduler_type": "constant"} if optimizers.row(name).schedule_free else {} for name in optimizers.names()
}

#: In `make test`: torch's two, of matrices, with a schedule of its own, in factors.
TELLING = ("adamw_torch_fused", "adamw_8bit", "muon", "schedule_free_adamw", "adafactor")


@pytest.fixture
def user(narrow: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return narrow


def require(name: str) -> None:
    package = optimizers.row(name).package
    if package is not None and importlib.util.find_spec(package.name) is None:
        pytest.skip(f"{package.name} is not installed")


@pytest.mark.filterwarnings("ignore")  # bitsandbytes on a CPU
@pytest.mark.parametrize("name", [*TELLING, *further(*(name for name in optimizers.names() if name not in TELLING))])
def test_a_run_goes_on_to_the_last_bit(name: str, user: User) -> None:
    require(name)
    steps = 8 if name == "schedule_free_radam" else 5  # RAdam's first steps change nothing
    train = {"optim": name, "max_steps": steps, **SETTINGS[name]}
    change: dict[str, Any] = {
        "lora": {"r": 16},  # state in 8 bits begins at 4096 elements
        "data": {"train": [{"path": "bundled:smoke-train", "max_rows": 4}]},  # the same batch again: losses compare
        "checkpoint": {"every_steps": 3},
    }
    if optimizers.row(name).schedule_free:  # whose weights are others while they are evaluated
        change["eval"] = {"every_steps": 2, "samples": 0}
    else:
        change["data"]["eval"] = []
    recipe = user.recipe("r", train=train, **change)
    user.done("train", recipe)
    losses = user.losses("r")
    assert losses[-1] < losses[0]
    user.goes_on_alike("r", recipe)


def bitsandbytes(name: str, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    from bitsandbytes import optim

    made: Callable[[Any], torch.optim.Optimizer] = lambda weight: getattr(optim, name)([weight], lr=1e-3, **options)  # noqa: E731
    return made


def made_by_its_library(name: str, weight: torch.nn.Parameter) -> torch.optim.Optimizer:
    """The optimizer as its documentation makes it."""
    import schedulefree
    from transformers import Adafactor

    plain: dict[str, Callable[[Any], Any]] = {
        "adamw_torch": lambda w: torch.optim.AdamW([w], lr=1e-3),
        "adamw_torch_fused": lambda w: torch.optim.AdamW([w], lr=1e-3, fused=True),
        "sgd": lambda w: torch.optim.SGD([w], lr=1e-3),
        "adafactor": lambda w: Adafactor([w], lr=1e-3, relative_step=False, scale_parameter=False),
        "muon": lambda w: MuonWithAdamW([{"params": [w], "hidden": True, "weight_decay": 0.0}], lr=1e-3),
        "schedule_free_adamw": lambda w: schedulefree.AdamWScheduleFree([w], lr=1e-3),
        "schedule_free_radam": lambda w: schedulefree.RAdamScheduleFree([w], lr=1e-3),
        "schedule_free_sgd": lambda w: schedulefree.SGDScheduleFree([w], lr=1e-3),
    }
    if name in plain:
        made: torch.optim.Optimizer = plain[name](weight)
        return made
    kind, bits = ("AdamW" if "adamw" in name else "Lion"), (8 if "8bit" in name else 32)
    return bitsandbytes(kind, optim_bits=bits)(weight)


@pytest.mark.parametrize("shape", [(48, 80), (256, 512)])
@pytest.mark.parametrize("name", optimizers.names())
def test_the_state_that_is_counted_is_what_the_optimizer_keeps(name: str, shape: tuple[int, int]) -> None:
    require(name)
    weight = torch.nn.Parameter(torch.randn(shape))
    weight.grad = torch.randn(shape)
    optimizer = made_by_its_library(name, weight)
    if hasattr(optimizer, "train"):
        optimizer.train()
    optimizer.step()
    inner = optimizer._parts["muon"].state if isinstance(optimizer, MuonWithAdamW) else optimizer.state
    kept = sum(
        v.numel() * v.element_size()
        for key, v in inner[weight].items()
        if torch.is_tensor(v) and v.dim() > 0 and not key.startswith("qmap")  # one of 1 KiB for all parameters
    )
    state = optimizer_state(name, TrainedParameters(shape[0] * shape[1], (TrainedMatrices(*shape, 1),)))
    assert state.total == kept
    assert bool(state.paged) == (optimizers.row(name).paged and shape == (256, 512))


def test_muon_takes_the_matrices_of_the_adapters_and_adamw_the_rest() -> None:
    torch.manual_seed(0)
    matrix, vector = torch.nn.Parameter(torch.randn(8, 6)), torch.nn.Parameter(torch.randn(6))
    twins = [torch.nn.Parameter(p.detach().clone()) for p in (matrix, vector)]
    groups = [
        {"params": [matrix], "hidden": True, "weight_decay": 0.1},
        {"params": [vector], "hidden": False, "weight_decay": 0.0},
    ]
    ours = MuonWithAdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-6)
    muon = torch.optim.Muon([twins[0]], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([twins[1]], lr=1e-2, weight_decay=0.0, betas=(0.8, 0.9), eps=1e-6)
    for _ in range(3):
        for parameter, twin in zip((matrix, vector), twins, strict=True):
            parameter.grad = torch.randn_like(parameter)
            twin.grad = parameter.grad.clone()
        for optimizer in (ours, muon, adamw):
            optimizer.step()
        for group in (*ours.param_groups, *muon.param_groups, *adamw.param_groups):
            group["lr"] *= 0.5  # as a schedule does
    assert torch.equal(matrix, twins[0])
    assert torch.equal(vector, twins[1])


def test_muon_trains_hidden_matrices_only(user: User) -> None:
    """Full fine-tuning: embedding, head and norms belong to AdamW."""
    recipe = user.recipe(
        "r", lora=None, train={"optim": "muon", "max_steps": 2}, checkpoint={"every_steps": 1}, data={"eval": []}
    )
    user.done("train", recipe)
    state = torch.load(next((user.folder / "r" / "checkpoints").iterdir()) / "optimizer.pt", weights_only=True)
    model = load_file(user.folder / "r" / "model" / "model.safetensors")
    hidden = [t for name, t in model.items() if t.dim() == 2 and "embed_tokens" not in name and "lm_head" not in name]
    assert sorted(s["momentum_buffer"].shape for s in state["muon"]["state"].values()) == sorted(
        t.shape for t in hidden
    )
    assert len(state["adamw"]["state"]) == len(model) - len(hidden)


def test_what_is_saved_of_a_schedule_free_run_is_the_average(user: User, tmp_path: Path) -> None:
    train = {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "max_steps": 4}
    recipe = user.recipe("r", train=train, checkpoint={"every_steps": 3})
    user.done("train", recipe)
    folder = tmp_path / "r" / "checkpoints" / "step-00000003"
    average = load_file(folder / "adapter_model.safetensors")
    training = load_file(folder / "training" / "weights.safetensors")
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    points = [entry["z"] for entry in state["state"].values()]
    found = 0
    for name, y in training.items():
        x = average[name.replace(".default", "")]
        z = next(z for z in points if z.shape == y.shape and torch.allclose(y, 0.9 * x + 0.1 * z, atol=1e-7))
        found += not torch.equal(z, x)
    assert found > 0
    assert {group["train_mode"] for group in state["param_groups"]} == {True}
    told = user.done("eval", recipe, "--run", str(tmp_path / "r"))
    held_out = [line["eval_loss"] for line in user.metrics("r") if "eval_loss" in line]
    assert told["run"]["loss"] == pytest.approx(held_out[-1], rel=1e-5)


def test_evaluating_a_schedule_free_run_changes_nothing(user: User) -> None:
    train = {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "max_steps": 5, "warmup_steps": 0.4}
    user.done("train", user.recipe("often", train=train, eval={"every_steps": 1}, checkpoint={"every_steps": 1}))
    user.done("train", user.recipe("never", train=train))
    assert user.losses("often") == user.losses("never")


def test_a_schedule_free_optimizer_warms_up_by_itself(user: User) -> None:
    train = {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "max_steps": 5, "warmup_steps": 0.4}
    user.done("train", user.recipe("r", train=train, checkpoint={"every_steps": 2}, data={"eval": []}))
    path = user.folder / "r" / "checkpoints" / "step-00000004" / "optimizer.pt"
    groups = torch.load(path, weights_only=True)["param_groups"]
    assert {group["warmup_steps"] for group in groups} == {2}


def test_a_paged_optimizer_on_a_cpu_is_warned_of(user: User) -> None:
    require("paged_adamw_8bit")
    status, document = user.run("check", user.recipe("r", train={"optim": "paged_adamw_8bit"}))
    assert status == 0
    assert [f["help"] for f in document["findings"] if f["code"] == "FT509"] == [
        "nothing is paged here; adamw_8bit does the same"
    ]
