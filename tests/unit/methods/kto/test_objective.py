"""Steps on labelled answers: what no split, order or layout changes, the KL, the reference, and what is resumed."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ftcli.errors import FtcliError
from ftcli.methods.kto.objective import LabelObjective
from ftcli.methods.kto.reference import mismatched_rows
from ftcli.model.backbone import base_of
from ftcli.model.fsdp import RankShards, shard
from ftcli.model.fused import stack_of
from ftcli.model.patch import patch
from ftcli.plan.batches import Batches
from ftcli.train.checkpoint_state import Progress
from ftcli.train.parallel import TokenCounts
from tests.quantized import PLAN
from tests.tiers import in_turn
from tests.unit.methods.kto.labelled import LONGEST, Monitor, epochs_of, objective_of, rows, step
from tests.unit.methods.preference import steps
from tests.unit.methods.preference.steps import PADDED, UNPADDED, require_same
from tests.unit.model.test_stack import adapted

SPLITS = {"2x4": (4, 2), "4x2": (2, 4), "8x1": (1, 8), "3+3+2": (3, 3)}
SETTINGS: dict[str, dict[str, Any]] = {
    "kto": {"beta": 0.3},
    "unpaired APO": {"loss": "apo_zero_unpaired", "beta": 0.3},
    "all at once": {"beta": 0.3, "sft_weight": 0.7, "desirable_weight": 1.3, "undesirable_weight": 0.4, "kl_rows": 5},
}


def shown(value: str | Batches) -> str:
    return value if isinstance(value, str) else value.layout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return steps.adapted_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("name", "batches"), in_turn(list(SETTINGS), [PADDED, UNPADDED], ids=shown))
def test_micro_batches_and_layout_change_nothing(model: Any, name: str, batches: Batches) -> None:
    settings = SETTINGS[name]
    whole = objective_of(model, **settings)
    wanted, said = step(whole, model), whole.metrics()
    for size, accumulation in SPLITS.values():
        split = objective_of(model, batches=batches, size=size, accumulation=accumulation, **settings)
        require_same(step(split, model), wanted)
        assert split.metrics() == pytest.approx(said, rel=1e-4, abs=1e-6)


def test_neither_does_the_order_of_the_step(model: Any) -> None:
    """The rows of one step in the order of six other epochs: which answer meets which prompt is the same."""
    wanted = step(objective_of(model, beta=0.3), model)
    orders = set()
    for seed in range(1, 7):
        objective = objective_of(model, beta=0.3, size=2, accumulation=4)
        objective._epochs = epochs_of(rows(), seed)
        objective._order = objective.order(0)
        orders.add(str(objective._order))
        require_same(step(objective, model), wanted)
    assert len(orders) > 3


class Group:
    """Stands for a group of two whose other rank has summed what is in ``heard``, all-reduce by all-reduce."""

    def __init__(self, rank: int, heard: Sequence[Tensor] = ()) -> None:
        self.rank, self.size = rank, 2
        self.said: list[Tensor] = []
        self._heard = list(heard)

    def agree(self, where: str, numbers: Sequence[int] = ()) -> list[list[int]]:
        return []

    def exchanging(self) -> Any:
        return nullcontext()

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self.said.append(tensor.clone())
            if self._heard:
                tensor += self._heard.pop(0)


@pytest.mark.parametrize("kl_rows", [None, 3])
def test_two_ranks_have_the_kl_of_one_process_to_the_last_bit(model: Any, kl_rows: int | None) -> None:
    alone = objective_of(model, beta=0.3, size=2, accumulation=4, kl_rows=kl_rows)
    wanted, _ = step(alone, model)
    first = [Group(rank) for rank in range(2)]
    for group in first:
        objective_of(model, size=2, accumulation=2, group=group, kl_rows=kl_rows).micro_batches(0, Monitor())
    loss = 0.0
    for rank in range(2):
        group = Group(rank, first[1 - rank].said)
        objective = objective_of(model, beta=0.3, size=2, accumulation=2, group=group, kl_rows=kl_rows)
        made = objective.micro_batches(0, Monitor())
        assert objective._kl == alone._kl > 0
        divisors: Any = type("Divisors", (), {"pairs": torch.tensor(8.0), "supervised": torch.tensor(1.0)})
        loss += sum(objective.loss(dict(batch.inputs), divisors).item() for batch in made)
    assert loss == pytest.approx(wanted, rel=1e-6)


def test_the_kl_is_what_mismatched_answers_have_gained_and_never_below_0(model: Any) -> None:
    """Held against the sums of rows that are scored one by one."""
    means = {}
    for seed in (1, 2):
        objective = objective_of(model)
        gained = []
        for row in mismatched_rows(rows(seed=seed), LONGEST):
            batch = objective._scorer.batch([row])
            policy = objective._scorer.score(model, batch).sums.detach()
            gained.append(float(policy - objective._of_reference(batch).sums))
        means[seed] = sum(gained) / len(gained)
        kl = objective.estimated_kl(rows(seed=seed))
        assert float(kl) == pytest.approx(max(0.0, means[seed]), rel=1e-4, abs=1e-6)
        assert not kl.requires_grad
    assert means[1] < 0 < means[2]


def test_fewer_mismatched_rows_are_scored_where_fewer_are_wanted(model: Any) -> None:
    made = mismatched_rows(rows(), LONGEST, 3)
    every = mismatched_rows(rows(), LONGEST)
    assert [row.row.number for row in made] == [every[index].row.number for index in (0, 2, 5)]
    objective = objective_of(model, kl_rows=3)
    assert float(objective.estimated_kl(rows())) != pytest.approx(float(objective_of(model).estimated_kl(rows())))


def test_no_gradient_goes_through_the_kl(model: Any) -> None:
    """A step with the same KL as a constant has the same gradients."""
    wanted = step(objective_of(model, beta=0.3), model)
    fixed = objective_of(model, beta=0.3, loss="apo_zero_unpaired")  # estimates none
    fixed._loss = replace(fixed._loss, name="kto")
    fixed._kl = objective_of(model).estimated_kl(rows())
    batch = fixed.micro_batch([3, 1, 2, 0, 7, 6, 5, 4], blank=False)
    model.zero_grad(set_to_none=True)
    divisors: Any = type("Divisors", (), {"pairs": torch.tensor(8.0), "supervised": torch.tensor(1.0)})
    loss = fixed.loss(dict(batch.inputs), divisors)
    loss.backward()  # type: ignore[no-untyped-call]
    require_same((loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}), wanted)


def test_a_step_of_one_row_has_no_kl(model: Any) -> None:
    """The last one of an epoch may be such."""
    objective = objective_of(model, beta=0.3, size=7)
    step(objective, model, 1)
    found = objective.metrics()
    assert found["kl"] == 0
    assert ("rewards/chosen" in found) != ("rewards/rejected" in found)
    assert "rewards/margins" not in found


def test_a_micro_batch_that_stands_for_none_adds_nothing(model: Any) -> None:
    objective = objective_of(model, beta=0.3, sft_weight=0.5)
    wanted = step(objective, model)
    said = objective.metrics()
    found = step(objective, model, blanks=2)
    assert found[0] == wanted[0]
    assert all(torch.equal(found[1][name], gradient) for name, gradient in wanted[1].items())
    assert objective.metrics() == said
    blank = objective.micro_batch([0], blank=True)
    assert (blank.rows, blank.counts.pairs, blank.counts.supervised, blank.counts.real) == ((), 0, 0, 0)


def test_counts_are_of_answers_and_of_the_wanted_ones_tokens(model: Any) -> None:
    """Unit 0 is the first wanted row, unit 5 the first unwanted one."""
    batch = objective_of(model).micro_batch([0, 5], blank=False)
    assert batch.counts == TokenCounts(supervised=7, real=3 + 7 + 5 + 4, computed=2 * 10, pairs=2)


def test_at_the_start_the_loss_is_half_the_mean_weight(tmp_path: Path) -> None:
    fresh = steps.adapted_model(tmp_path, trained=False)
    for loss in ("kto", "apo_zero_unpaired"):
        objective = objective_of(fresh, started=False, loss=loss, desirable_weight=1.4, undesirable_weight=0.6)
        assert step(objective, fresh)[0] == pytest.approx((5 * 1.4 + 3 * 0.6) / 8 / 2, abs=1e-7)
        said = objective.metrics()
        assert (said["rewards/margins"], said["rewards/accuracies"]) == (0.0, 0.5)
        assert (said["chosen_rose"], said["rejected_fell"]) == (0.5, 0.5)
        assert said.get("kl") == (0.0 if loss == "kto" else None)


def test_another_reference_than_the_start_ends_the_run(tmp_path: Path) -> None:
    other = steps.adapted_model(tmp_path)
    objective = objective_of(other, started=False)
    with pytest.raises(FtcliError, match="before the first step policy and reference differ") as error:
        step(objective, other)
    assert error.value.findings[0].code == "FT714"
    resumed = objective_of(other, started=False)
    resumed.restore({}, Progress(3, 4, 0.0, 0))
    assert step(resumed, other)[0] != pytest.approx(0.5, abs=1e-3)


def learnt(objective: LabelObjective, model: Any, count: int, rate: float) -> list[float]:
    """The losses of so many steps of plain gradient descent."""
    losses = []
    for _ in range(count):
        loss, gradients = step(objective, model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in gradients:
                    parameter -= rate * gradients[name]
        losses.append(loss)
    return losses


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_good_answers_become_likelier_and_bad_ones_less_likely(tmp_path: Path, quantization: Any) -> None:
    """And the reference stays the base, bit for bit."""
    fresh = steps.adapted_model(tmp_path, quantization, trained=False)
    objective = objective_of(fresh, beta=0.5, started=False)
    batch = dict(objective.micro_batch([0, 1, 5, 6], blank=False).inputs)
    before = objective._of_reference(batch).sums
    losses = learnt(objective, fresh, 6, 0.5)
    assert losses[-1] < 0.9 * losses[0]
    objective.metrics()
    step(objective, fresh)
    said = objective.metrics()
    assert said["rewards/chosen"] > 0.02 > -0.02 > said["rewards/rejected"]
    assert said["rewards/accuracies"] > 0.9
    assert torch.equal(objective._of_reference(batch).sums, before)


def test_full_fine_tuning_compares_with_the_second_model(tmp_path: Path) -> None:
    policy, reference = (steps.base_model(tmp_path).train() for _ in range(2))
    reference.requires_grad_(False).eval()
    objective = objective_of(policy, reference=reference, beta=0.5, started=False)
    losses = learnt(objective, policy, 4, 0.05)
    assert losses[0] == pytest.approx(0.5, abs=1e-7)
    assert losses[-1] < 0.9 * losses[0]
    wanted = steps.base_model(tmp_path).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in reference.state_dict().items())


def test_dropout_is_the_policys_alone(tmp_path: Path) -> None:
    """Neither the reference nor the KL draws anything: a step draws what its answers take."""
    import peft

    torch.manual_seed(0)
    dropping: Any = peft.get_peft_model(
        steps.base_model(tmp_path), peft.LoraConfig(**{**steps.LORA.to_dict(), "lora_dropout": 0.3})
    )
    steps.perturb(dropping)
    dropping.train()
    objective = objective_of(dropping, beta=0.3)
    state = torch.get_rng_state()
    kl = objective.estimated_kl(rows())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(objective.estimated_kl(rows()), kl)
    assert dropping.training
    assert step(objective, dropping)[0] != step(objective, dropping)[0]


@pytest.mark.parametrize("batches", [PADDED, UNPADDED], ids=["padded", "unpadded"])
def test_our_layers_train_what_transformers_do(model: Any, batches: Batches) -> None:
    """As one stack, as the run has them; KL and reference run the layers one by one."""
    wanted = step(objective_of(model, beta=0.3), model)
    base, own = base_of(model), base_of(model).config._attn_implementation
    done = patch(model, "reference")
    try:
        assert any(entry.on for entry in done.table)
        objective = objective_of(model, batches=batches, beta=0.3)
        stack = stack_of(model, torch.float32)
        objective._stack = None if isinstance(stack, str) else stack
        require_same(step(objective, model), wanted, rel=2e-5)
    finally:
        base.set_attn_implementation(own)
        done.undo()


def test_a_half_filled_line_goes_through_a_checkpoint_bit_for_bit(model: Any) -> None:
    whole = objective_of(model, beta=0.3, size=4)
    step(whole, model, 0)
    kept = json.loads(json.dumps(whole.state()))
    step(whole, model, 1)
    resumed = objective_of(model, beta=0.3, size=4)
    resumed.restore(kept, Progress(1, 2, 0.0, 0))
    step(resumed, model, 1)
    found = resumed.metrics()
    assert found == whole.metrics()
    assert math.isfinite(found["kl"])
    assert whole.metrics() == resumed.metrics() == {}  # nothing is counted twice


def test_a_step_that_failed_leaves_nothing_in_the_sums(model: Any) -> None:
    objective = objective_of(model, beta=0.3, size=4)
    step(objective, model, 0)
    wanted = objective.state()
    step(objective, model, 1)
    assert objective.state() != wanted
    objective.undo(1)
    assert objective.state() == wanted


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """A process group of this process alone."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield DeviceMesh.from_group(dist.group.WORLD, "cpu")
    dist.destroy_process_group()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_adapters_on_a_sharded_base_take_the_same_step(mesh: DeviceMesh, settings: dict[str, Any]) -> None:
    model = adapted("llama")
    other = copy.deepcopy(model)
    shard(other, mesh, RankShards(0, 1, joins=True), PLAN)
    wanted = step(objective_of(model, **settings), model)
    require_same(step(objective_of(other, size=3, accumulation=3, **settings), other), wanted, rel=1e-5)
