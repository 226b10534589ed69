"""A step on pairs: however it is split, ordered and laid out it is one step, and its reference stays what it was."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from ftkernels.device import interpreting
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ftcli.errors import FtcliError
from ftcli.methods.preference.objective import PairObjective, require_equal
from ftcli.methods.preference.pairs import SCORED, ScoredAnswers
from ftcli.model import attention
from ftcli.model.backbone import base_of
from ftcli.model.fused import stack_of
from ftcli.model.initial_adapters import as_base, remember_initial, remember_start
from ftcli.model.masks import mask_for
from ftcli.model.patch import patch
from ftcli.plan.batches import Batches
from ftcli.train.assembly import of_reference
from ftcli.train.checkpoint_state import Progress
from ftcli.train.parallel import TokenCounts
from tests.quantized import PLAN
from tests.tiers import in_turn
from tests.unit.methods.preference import steps
from tests.unit.methods.preference.steps import PADDED, UNPADDED, objective_of, require_same, step

WHOLE = [[0, 1, 2, 3]]
SPLITS = {
    "2x2": [[0, 1], [2, 3]],
    "4x1": [[0], [1], [2], [3]],
    "another order": [[3, 1, 2, 0]],
    "3+1": [[2], [3, 0, 1]],
}
#: A pair loss, one of nats a token, one with cross-entropy and LD-DPO, and the two that compare with nothing.
SETTINGS: dict[str, dict[str, Any]] = {
    "sigmoid": {"beta": 0.3},
    "ipo": {"loss": "ipo", "beta": 0.5},
    "all at once": {"beta": 0.3, "sft_weight": 0.7, "ld_alpha": 0.5, "label_smoothing": 0.1},
    "orpo": {"method": "orpo"},
    "simpo": {"method": "simpo"},
}


def shown(value: str | Batches) -> str:
    return value if isinstance(value, str) else value.layout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return steps.adapted_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("name", "batches"), in_turn(list(SETTINGS), [PADDED, UNPADDED], ids=shown))
def test_micro_batches_order_and_layout_change_nothing(model: Any, name: str, batches: Batches) -> None:
    settings = SETTINGS[name]
    wanted = step(objective_of(model, **settings), model, WHOLE)
    for split in SPLITS.values():
        require_same(step(objective_of(model, batches=batches, **settings), model, split), wanted)


INTERPRETED = "ftcli-pairs-interpreted"


@pytest.mark.parametrize("attention_by", ["torch", "triton"])
@pytest.mark.parametrize("batches", [PADDED, UNPADDED], ids=["padded", "unpadded"])
def test_our_layers_train_what_transformers_do(model: Any, attention_by: str, batches: Batches) -> None:
    """Also as one stack, as the run has them: the reference runs the layers one by one."""
    split = [[0, 2], [1]] if attention_by == "torch" else [[0, 2]]  # the interpreter is slow
    wanted = step(objective_of(model, beta=0.3), model, split)
    base, own = base_of(model), base_of(model).config._attn_implementation
    done = patch(model, "reference")
    try:
        assert any(entry.on for entry in done.table)
        if attention_by == "triton":
            if not interpreting():
                pytest.skip("Triton's interpreter is off (TRITON_INTERPRET=1 turns it on)")
            AttentionInterface.register(INTERPRETED, partial(attention.ftcli_attention_forward, kernels="triton"))
            AttentionMaskInterface.register(INTERPRETED, mask_for)
            base.set_attn_implementation(INTERPRETED)
        objective = objective_of(model, batches=batches, beta=0.3)
        stack = stack_of(model, torch.float32)
        objective._stack = None if isinstance(stack, str) else stack
        require_same(step(objective, model, split), wanted, rel=2e-5)
    finally:
        base.set_attn_implementation(own)
        done.undo()


def test_a_micro_batch_that_stands_for_none_adds_nothing(model: Any) -> None:
    objective = objective_of(model, beta=0.3, sft_weight=0.5)
    wanted = step(objective, model, WHOLE)
    said = objective.metrics()
    found = step(objective, model, WHOLE, blanks=2)
    assert found[0] == wanted[0]
    assert all(torch.equal(found[1][name], gradient) for name, gradient in wanted[1].items())
    assert objective.metrics() == said
    blank = objective.micro_batch([0], blank=True)
    assert (blank.rows, blank.counts.pairs, blank.counts.supervised, blank.counts.real) == ((), 0, 0, 0)


def test_counts_are_of_pairs_and_of_the_chosen_answers_tokens(model: Any) -> None:
    batch = objective_of(model).micro_batch([0, 2], blank=False)
    assert batch.counts == TokenCounts(supervised=7 + 1, real=3 + 7 + 3 + 2 + 2 + 1 + 2 + 6, computed=4 * 10, pairs=2)
    assert batch.inputs[SCORED].sum(1).tolist() == [7, 2, 1, 6]


class Ranks:
    """Stands for a group of two whose other rank has said what is in ``other``."""

    def __init__(self, rank: int, other: Tensor) -> None:
        self.rank, self.size, self._other = rank, 2, other

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor[1 - self.rank :: 2] += self._other


def test_metrics_of_two_ranks_are_those_of_one_process(model: Any) -> None:
    """Also to the last bit: the ranks' sums are added up in the order of one process."""
    alone = objective_of(model, beta=0.3)
    step(alone, model, [[0], [1], [2], [3]])
    ranks = [objective_of(model, beta=0.3) for _ in range(2)]
    for objective, split in zip(ranks, ([[0], [2]], [[1], [3]]), strict=True):
        step(objective, model, split)
    sums = [objective._sums for objective in ranks]
    heard = [torch.stack(each._of_batches) for each in sums]
    for rank, (objective, each) in enumerate(zip(ranks, sums, strict=True)):
        each.take()
        group: Any = Ranks(rank, heard[1 - rank])
        each._group = group
        objective.reduced()
    wanted = alone.metrics()
    assert ranks[0].metrics() == ranks[1].metrics() == wanted
    assert wanted["rewards/margins"] != 0


def test_at_the_start_the_loss_is_ln_2_and_the_margin_0(tmp_path: Path) -> None:
    fresh = steps.adapted_model(tmp_path, trained=False)
    for settings in ({}, {"ld_alpha": 0.3}, {"label_smoothing": 0.2}):
        objective = objective_of(fresh, started=False, **settings)
        assert step(objective, fresh, WHOLE)[0] == pytest.approx(math.log(2), abs=1e-7)
        said = objective.metrics()
        assert (said["rewards/margins"], said["rewards/accuracies"], said["chosen_fell"]) == (0.0, 0.5, 0.0)


def trained(objective: PairObjective, model: Any, count: int, rate: float = 0.5) -> list[float]:
    """The losses of so many steps of plain gradient descent."""
    losses = []
    for _ in range(count):
        loss, gradients = step(objective, model, WHOLE)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in gradients:
                    parameter -= rate * gradients[name]
        losses.append(loss)
    return losses


def test_the_reference_is_the_base_bit_for_bit_after_any_number_of_steps(tmp_path: Path) -> None:
    """Were adapters left on in its pass, every margin would stay 0 and every loss ln 2."""
    fresh = steps.adapted_model(tmp_path, trained=False)
    objective = objective_of(fresh, beta=0.5, started=False)
    batch = dict(objective.micro_batch([0, 1, 2, 3], blank=False).inputs)
    before = objective._of_reference(batch)
    base = steps.base_model(tmp_path)
    by_itself = objective._scorer.score(base, batch)
    losses = trained(objective, fresh, 6)
    assert losses[-1] < 0.9 * losses[0]
    assert objective.metrics()["rewards/margins"] > 0.05
    after = objective._of_reference(batch)
    assert torch.equal(after.sums, before.sums)
    assert torch.equal(after.sums, by_itself.sums.detach())
    assert not torch.equal(after.sums, objective._scorer.score(fresh, batch).sums)


def test_a_reference_with_its_adapters_left_on_learns_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would see."""
    monkeypatch.setattr("ftcli.model.initial_adapters.AdapterSwitch.off", lambda self: nullcontext())
    fresh = steps.adapted_model(tmp_path, trained=False)
    objective = objective_of(fresh, beta=0.5, started=False)
    assert trained(objective, fresh, 6)[-1] == pytest.approx(math.log(2), abs=1e-7)
    assert objective.metrics()["rewards/margins"] == 0


def test_full_fine_tuning_compares_with_the_second_model(tmp_path: Path) -> None:
    policy, reference = (steps.base_model(tmp_path).train() for _ in range(2))
    reference.requires_grad_(False).eval()
    objective = objective_of(policy, reference=reference, beta=0.5, started=False)
    losses = trained(objective, policy, 4, rate=0.05)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-7)
    assert losses[-1] < 0.9 * losses[0]
    assert objective.metrics()["rewards/margins"] > 0.05
    wanted = steps.base_model(tmp_path).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in reference.state_dict().items())


def test_another_reference_than_the_start_ends_the_run(tmp_path: Path) -> None:
    other = steps.adapted_model(tmp_path)
    objective = objective_of(other, started=False)
    with pytest.raises(FtcliError, match="before the first step policy and reference differ") as error:
        step(objective, other, WHOLE)
    assert error.value.findings[0].code == "FT714"
    resumed = objective_of(other, started=False)  # a continued run may have gone anywhere
    resumed.restore({}, Progress(3, 4, 0.0, 0))
    assert step(resumed, other, WHOLE)[0] != pytest.approx(math.log(2), abs=1e-3)


@pytest.mark.parametrize(
    ("dtype", "size", "nats", "refused"),
    [
        ("float32", 300, 0.02, False),
        ("float32", 300, 0.05, True),
        ("bfloat16", 300, 5.0, False),
        ("bfloat16", 300, 10.0, True),
        ("bfloat16", 1, 0.2, False),  # the rounding of a single token
        ("bfloat16", 1, 0.5, True),
        ("bfloat16", 4, math.nan, False),  # FT702 names it
    ],
)
def test_what_rounding_does_is_let_pass(model: Any, dtype: str, size: int, nats: float, refused: bool) -> None:
    fixed = torch.tensor([-900.0, -800.0])
    policy, reference = (ScoredAnswers(sums, sums) for sums in (fixed, fixed + nats))
    scorer: Any = SimpleNamespace(score=lambda *_: policy)
    with pytest.raises(FtcliError, match="FT714") if refused else nullcontext():
        require_equal(model, replace(PLAN, compute=dtype), scorer, {SCORED: torch.ones(2, size)}, policy, reference)


@pytest.mark.parametrize("init", [True, "pissa"], ids=["LoRA", "PiSSA"])
def test_dropout_is_the_policys_alone_and_no_fault(tmp_path: Path, init: Any) -> None:
    """PiSSA's adapters are not 0 at the start: dropout makes the policy another model than it is."""
    torch.manual_seed(0)
    settings = {**steps.LORA.to_dict(), "lora_dropout": 0.3, "init_lora_weights": init}
    dropping = peft.get_peft_model(steps.base_model(tmp_path), peft.LoraConfig(**settings))
    if isinstance(init, str):
        remember_initial(dropping)
    dropping.train()
    objective = objective_of(dropping, started=False)
    batch = dict(objective.micro_batch([0, 1, 2, 3], blank=False).inputs)
    torch.manual_seed(7)
    first = objective._of_reference(batch)
    assert torch.equal(objective._of_reference(batch).sums, first.sums)
    assert dropping.training
    loss, _ = step(objective, dropping, WHOLE)
    assert math.isfinite(loss)
    assert (loss == pytest.approx(math.log(2), abs=1e-7)) == (init is True)


KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "PiSSA": {"init_lora_weights": "pissa"},
    "OLoRA": {"init_lora_weights": "olora"},
    "LoRA and the head": {"modules_to_save": ["lm_head"]},
    "PiSSA and the head": {"init_lora_weights": "pissa", "modules_to_save": ["lm_head"]},
    "OLoRA and the embedding": {"init_lora_weights": "olora", "modules_to_save": ["embed_tokens"]},
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_whatever_is_trained_the_reference_stays_the_base(kind: dict[str, Any], tmp_path: Path) -> None:
    model = peft.get_peft_model(steps.base_model(tmp_path), peft.LoraConfig(**{**steps.LORA.to_dict(), **kind})).train()
    if "init_lora_weights" in kind:
        remember_initial(model)
    objective = objective_of(model, started=False)
    batch = dict(objective.micro_batch([0, 1, 2], blank=False).inputs)
    before = objective._of_reference(batch).sums
    base = objective._scorer.score(steps.base_model(tmp_path), batch).sums.detach()
    torch.testing.assert_close(before, base, rtol=1e-5, atol=1e-4)
    step(objective, model, [[0, 1, 2]])  # FT714 where the start is another model
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trainable:
            parameter += 0.1 * torch.randn_like(parameter) * parameter.abs().mean().clamp(min=0.05)
    assert torch.equal(objective._of_reference(batch).sums, before)
    assert float((objective._scorer.score(model, batch).sums.detach() - before).abs().max()) > 1e-2
    assert [id(p) for p in model.parameters() if p.requires_grad] == [id(p) for p in trainable]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("kind", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_of_an_adapter_that_is_gone_on_from_the_reference_is_what_it_was(kind: dict[str, Any], tmp_path: Path) -> None:
    """Never the base: policy and reference begin as one model, and the reference stays it to the last bit."""
    model = peft.get_peft_model(steps.base_model(tmp_path), peft.LoraConfig(**{**steps.LORA.to_dict(), **kind})).train()
    steps.perturb(model)
    remember_start(model)
    objective = objective_of(model, started=False, beta=0.3)
    batch = dict(objective.micro_batch([0, 1, 2], blank=False).inputs)
    before = objective._of_reference(batch).sums
    assert torch.equal(before, objective._scorer.score(model, batch).sums.detach())
    base = objective._scorer.score(steps.base_model(tmp_path), batch).sums.detach()
    assert float((base - before).abs().max()) > 1e-2
    assert step(objective, model, [[0, 1, 2]])[0] == pytest.approx(math.log(2), abs=1e-7)
    with torch.no_grad():
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            parameter += 0.1 * torch.randn_like(parameter) * parameter.abs().mean().clamp(min=0.05)
    now = objective._scorer.score(model, batch).sums.detach()
    assert torch.equal(objective._of_reference(batch).sums, before)
    assert torch.equal(objective._scorer.score(model, batch).sums.detach(), now)
    assert not torch.equal(now, before)


def test_adapters_that_are_off_stay_off_within_and_are_on_again_afterwards(model: Any) -> None:
    """As where `ftcli eval` measures the base of an adapted model on pairs."""
    objective = objective_of(model)
    batch = dict(objective.micro_batch([0, 1], blank=False).inputs)
    adapted = objective._scorer.score(model, batch).sums.detach()
    with as_base(model):
        with of_reference(None, model):
            inner = objective._scorer.score(model, batch).sums.detach()
        outer = objective._scorer.score(model, batch).sums.detach()
    assert torch.equal(inner, outer)
    assert not torch.equal(adapted, outer)
    assert torch.equal(objective._scorer.score(model, batch).sums.detach(), adapted)


def test_a_half_filled_line_goes_through_a_checkpoint_bit_for_bit(model: Any) -> None:
    whole = objective_of(model, beta=0.3)
    step(whole, model, [[0, 1], [2]])
    kept = json.loads(json.dumps(whole.state()))
    step(whole, model, [[3], [4, 5]])
    resumed = objective_of(model, beta=0.3)
    resumed.restore(kept, Progress(1, 2, 0.0, 0))
    step(resumed, model, [[3], [4, 5]])
    assert resumed.metrics() == whole.metrics()
    assert whole.metrics() == resumed.metrics() == {}  # nothing is counted twice


def test_a_step_that_failed_leaves_nothing_in_the_sums(model: Any) -> None:
    objective = objective_of(model, beta=0.3)
    step(objective, model, [[0, 1]])
    wanted = objective.state()
    objective.begin(2)
    batch = objective.micro_batch([2], blank=False)
    divisors: Any = SimpleNamespace(pairs=torch.tensor(1.0), supervised=torch.tensor(1.0))
    objective.loss(dict(batch.inputs), divisors)
    objective.reduced()
    assert objective.state() != wanted
    objective.undo(2)
    assert objective.state() == wanted
