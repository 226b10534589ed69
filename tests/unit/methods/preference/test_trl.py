"""Loss and gradients of a step on pairs, compared with TRL's own trainers on one model and the same pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from ftcli.config.model import ModelConfig
from ftcli.labels import IGNORE_INDEX
from ftcli.methods.preference.losses import Answers, PairLoss
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.model.tokenizer import load_tokenizer
from tests.unit.methods.preference import steps
from tests.unit.methods.preference.steps import PADDED, UNPADDED, Result, objective_of, require_same, step

ALL = [[0, 1, 2, 3, 4, 5]]
#: Losses that TRL 1.16 computes as their papers say, each with a beta that leaves it in its interesting range.
LOSSES = {
    "sigmoid": 0.3, "sigmoid_norm": 5.0, "ipo": 0.5, "hinge": 0.3, "robust": 0.3, "apo_zero": 0.3, "apo_down": 0.3,
    "bco_pair": 0.3, "nca_pair": 0.3, "sppo_hard": 0.1, "discopop": 0.3,
}  # fmt: skip


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> DPOTrainer:
    """TRL's trainer, which gives the model its adapters; those are trained a little afterwards."""
    folder = tmp_path_factory.mktemp("trl")
    args = DPOConfig(
        output_dir=str(folder / "out"), report_to="none", use_cpu=True, bf16=False, save_strategy="no",
        disable_tqdm=True, gradient_checkpointing=False, use_weighting=True,
    )  # fmt: skip
    tokenizer = load_tokenizer(ModelConfig(name_or_path="bundled:tiny-gemma2"), offline=True)
    made = DPOTrainer(
        model=steps.base_model(folder), args=args, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}),
        peft_config=steps.LORA,
    )  # fmt: skip
    steps.perturb(made.model)
    made.model.train()
    return made


def theirs(trainer: DPOTrainer, **settings: Any) -> Result:
    """A step over all pairs as TRL makes it."""
    names = {"loss": "loss_types", "weights": "loss_weights"}
    given: dict[str, Any] = {"beta": 0.1, "label_smoothing": 0.0, "ld_alpha": None, "weights": [1.0]}
    given |= {"use_weighting": False, **settings}
    for name, value in given.items():
        setattr(trainer, names.get(name, name), value)
    documents, examples = steps.rows(), []
    for chosen, rejected in zip(documents[0::2], documents[1::2], strict=True):
        asked = sum(label == IGNORE_INDEX for label in chosen.labels)
        found = (chosen.input_ids[:asked], chosen.input_ids[asked:], rejected.input_ids[asked:])
        examples.append(dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), found, strict=True)))
    trainer.model.zero_grad(set_to_none=True)
    loss = trainer.compute_loss(trainer.model, DataCollatorForPreference(pad_token_id=0)(examples))
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def ours(trainer: DPOTrainer, batches: Any = PADDED, **settings: Any) -> Result:
    """The same step in three micro-batches."""
    return step(objective_of(trainer.model, batches=batches, **settings), trainer.model, [[3, 0], [5], [1, 4, 2]])


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradients_are_trls(trainer: DPOTrainer, name: str) -> None:
    wanted = theirs(trainer, loss=[name], beta=LOSSES[name])
    require_same(ours(trainer, loss=name, beta=LOSSES[name]), wanted)
    require_same(ours(trainer, UNPADDED, loss=name, beta=LOSSES[name]), wanted)


@pytest.mark.parametrize("name", ["sigmoid", "bco_pair", "sigmoid_norm"])
def test_long_answers_count_less_as_in_trl(trainer: DPOTrainer, name: str) -> None:
    found = []
    for alpha in (0.4, 0.0):
        wanted = theirs(trainer, loss=[name], beta=3.0, ld_alpha=alpha)
        require_same(ours(trainer, loss=name, beta=3.0, ld_alpha=alpha), wanted)
        found.append(wanted[0])
    assert found[0] != pytest.approx(found[1], rel=1e-3)
    assert found[0] != pytest.approx(theirs(trainer, loss=[name], beta=3.0)[0], rel=1e-3)


@pytest.mark.parametrize("name", ["sigmoid", "ipo", "bco_pair"])
def test_pairs_are_weighed_by_the_policy_as_in_trl(trainer: DPOTrainer, name: str) -> None:
    """WPO; its weights have no gradient. Random weights make an answer about as likely as any other."""
    wanted = theirs(trainer, loss=[name], beta=LOSSES[name], use_weighting=True)
    require_same(ours(trainer, loss=name, beta=LOSSES[name], use_weighting=True), wanted)
    require_same(ours(trainer, UNPADDED, loss=name, beta=LOSSES[name], use_weighting=True), wanted)
    assert wanted[0] != pytest.approx(theirs(trainer, loss=[name], beta=LOSSES[name])[0], rel=1e-3)


def test_robust_has_the_share_of_wrong_labels_that_it_has_in_trl(trainer: DPOTrainer) -> None:
    wanted = theirs(trainer, loss=["robust"], beta=0.3, label_smoothing=0.2)
    require_same(ours(trainer, loss="robust", beta=0.3, label_smoothing=0.2), wanted)


def test_a_mixture_with_cross_entropy_is_trls_of_one_micro_batch(trainer: DPOTrainer) -> None:
    """TRL's `sft` is a mean over the tokens of the micro-batch: of a step in one piece it is ours."""
    wanted = theirs(trainer, loss=["sigmoid", "bco_pair", "sft"], weights=[0.8, 0.2, 1.0], beta=0.3)
    mixed = [{"name": "sigmoid", "weight": 0.8}, {"name": "bco_pair", "weight": 0.2}]
    require_same(ours(trainer, loss=mixed, beta=0.3, sft_weight=1.0), wanted)


def test_smoothing_of_trls_sigmoid_does_nothing_and_ours_is_the_paper_s(trainer: DPOTrainer) -> None:
    """docs/preference.md tells of it: TRL has no conservative DPO since 0.28."""
    plain, smoothed = (theirs(trainer, loss=["sigmoid"], beta=0.3, label_smoothing=e)[0] for e in (0.0, 0.2))
    assert smoothed == plain
    assert ours(trainer, loss="sigmoid", beta=0.3)[0] == pytest.approx(plain, rel=1e-5)
    assert ours(trainer, loss="sigmoid", beta=0.3, label_smoothing=0.2)[0] != pytest.approx(plain, rel=1e-3)


@pytest.fixture
def answers() -> Answers:
    torch.manual_seed(4)
    sums = (-torch.rand(2, 16) * 30 - 0.5).requires_grad_()
    tokens = torch.randint(1, 20, (2, 16)).float()
    return Answers(sums[0], sums[1], torch.zeros(16), torch.zeros(16), tokens[0], tokens[1])


def without_init(trainer: type, **attributes: Any) -> Any:
    """One of TRL's trainers, of which nothing but the loss is wanted."""
    made = trainer.__new__(trainer)
    made.accelerator = type("Accelerator", (), {"device": torch.device("cpu")})()
    vars(made).update(attributes)
    return made


def require_alike(answers: Answers, found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    (one,) = torch.autograd.grad(found.sum(), answers.chosen._base, retain_graph=True)
    (other,) = torch.autograd.grad(wanted.sum(), answers.chosen._base)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["sigmoid", "simpo"])
def test_cpo_and_simpo_are_trls(answers: Answers, name: str) -> None:
    beta, mine = (0.1, "cpo") if name == "sigmoid" else (2.0, "simpo")
    trl = without_init(CPOTrainer, loss_type=name, beta=beta, simpo_gamma=0.5, label_smoothing=0.0, alpha=0.0)
    given = answers.chosen, answers.rejected
    if name == "simpo":
        given = answers.chosen / answers.chosen_tokens, answers.rejected / answers.rejected_tokens
    loss = PairLoss.of("simpo", PreferenceConfig.model_validate({"loss": mine}))
    require_alike(answers, loss.values(answers), trl.cpo_loss(*given)[0])


def test_orpo_is_trls_with_the_cross_entropy_of_the_answer_alone(answers: Answers) -> None:
    trl = without_init(ORPOTrainer, beta=0.1)
    chosen, rejected = answers.chosen / answers.chosen_tokens, answers.rejected / answers.rejected_tokens
    wanted = -chosen - trl.odds_ratio_loss(chosen, rejected)[0]
    require_alike(answers, PairLoss.of("orpo", None).values(answers), wanted)
