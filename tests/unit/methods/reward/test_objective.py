"""A step of reward modelling: its formula, TRL's trainer, scores of plain transformers, what it must not depend on."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer
from trl.trainer.reward_trainer import DataCollatorForPreference

from ftcli.config.model import ModelConfig
from ftcli.data.collate import padded_batch
from ftcli.data.tokens import TokenizedRow
from ftcli.methods.preference.figures import ORDER_SUMS, order_measures, order_sums
from ftcli.methods.reward.objective import RewardObjective, both_lengths, pair_losses, score_batch, score_rows
from ftcli.methods.reward.settings import RewardModelConfig
from ftcli.model.patch import patch
from ftcli.model.score_head import add_score_head, as_classifier, row_scores
from ftcli.model.tokenizer import load_tokenizer, pad_apart
from ftcli.plan.batches import Batches
from tests.unit.methods.preference import steps
from tests.unit.methods.preference.steps import PADDED, UNPADDED, Result, require_same, step

ALL = [[0, 1, 2, 3, 4, 5]]
#: As a GPU lays pairs out: the prompt once.
SHARED = Batches("unpadded", "a test", shares_prompts=True)


def scorer(folder: Path) -> Any:
    """Two layers with a score head, to be trained whole."""
    model = steps.base_model(folder)
    add_score_head(model, seed=0)
    return model.train()


def documents(margins: bool = False) -> list[TokenizedRow]:
    rows = steps.rows()
    if margins:
        for number, row in enumerate(rows[0::2]):
            object.__setattr__(row, "value", 0.25 * (number + 1))
    return rows


def objective(model: Any, batches: Batches = PADDED, rows: Any = None, **settings: Any) -> RewardObjective:
    job = steps.job_of(batches)
    job.recipe = SimpleNamespace(train=job.recipe.train, reward=RewardModelConfig.model_validate(settings))
    return RewardObjective(
        job, model, steps.epochs_of_pairs(rows or documents()), group=None, stack=None, sequence=None
    )


def result(model: Any, split: Any = ALL, batches: Batches = PADDED, **more: Any) -> Result:
    blanks = more.pop("blanks", 0)
    return step(objective(model, batches, **more), model, split, blanks)  # type: ignore[arg-type]


@pytest.mark.parametrize("centring", [0.0, 0.01, 2.0])
def test_the_loss_is_bradley_and_terrys(centring: float) -> None:
    chosen, rejected, margins = torch.randn(3, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 9
    found = pair_losses(chosen, rejected, margins.abs(), centring)
    for loss, one, other, margin in zip(found, chosen, rejected, margins.abs(), strict=True):
        d = float(one - other - margin)
        wanted = math.log1p(math.exp(-d)) if d > -30 else -d
        assert float(loss) == pytest.approx(wanted + centring * float(one + other) ** 2, rel=1e-6, abs=1e-12)


def test_losses_are_finite_however_far_scores_are() -> None:
    far = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = pair_losses(far, -far, torch.zeros(2), 0.0)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert loss.isfinite().all()
    assert far.grad is not None
    assert far.grad.isfinite().all()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> RewardTrainer:
    """TRL's trainer on transformers' own classifier with the same weights."""
    folder = tmp_path_factory.mktemp("trl")
    ours = scorer(folder)
    config = as_classifier(copy.deepcopy(ours.config))
    config.pad_token_id = 0
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    weights = {name: value for name, value in ours.state_dict().items() if not name.startswith("lm_head")}
    told = model.load_state_dict(weights, strict=True)
    assert not told.missing_keys
    args = RewardConfig(
        output_dir=str(folder / "out"), report_to="none", use_cpu=True, bf16=False, save_strategy="no",
        disable_tqdm=True, gradient_checkpointing=False, disable_dropout=True,
    )  # fmt: skip
    tokenizer = load_tokenizer(ModelConfig(name_or_path="bundled:tiny-gemma2"), offline=True)
    data = Dataset.from_dict({"chosen": ["a b"], "rejected": ["a c"]})
    made = RewardTrainer(model=model, args=args, processing_class=tokenizer, train_dataset=data)
    made.model.train()
    return made


@pytest.mark.parametrize("settings", [{}, {"center_rewards_coefficient": 0.1}, {"margin": True}])
@pytest.mark.parametrize("batches", [PADDED, UNPADDED, SHARED], ids=["padded", "unpadded", "shared"])
def test_a_step_is_trls(trainer: RewardTrainer, tmp_path: Path, settings: dict[str, Any], batches: Batches) -> None:
    rows = documents(margins=True)
    trainer.args.center_rewards_coefficient = settings.get("center_rewards_coefficient")
    examples = [
        {
            "chosen_ids": chosen.input_ids,
            "rejected_ids": rejected.input_ids,
            **({"margin": chosen.value} if settings.get("margin") else {}),
        }
        for chosen, rejected in zip(rows[0::2], rows[1::2], strict=True)
    ]
    trainer.model.zero_grad(set_to_none=True)
    loss = trainer.compute_loss(trainer.model, DataCollatorForPreference(pad_token_id=0)(examples))
    loss.backward()
    theirs = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    model = scorer(tmp_path)
    if batches is SHARED:
        patch(model, "reference")
    found = result(model, [[3, 0], [5], [1, 4, 2]], batches, rows=rows, **settings)
    require_same(found, (loss.item(), theirs), rel=2e-5)


def test_a_step_does_not_depend_on_its_split_order_and_blanks(tmp_path: Path) -> None:
    model = scorer(tmp_path)
    wanted = result(model)
    for split in ([[0], [1], [2], [3], [4], [5]], [[5, 1, 3], [0, 2, 4]]):
        require_same(result(model, split), wanted)
        require_same(result(model, split, blanks=2), wanted)


def test_margins_are_read_where_they_are_asked_for(tmp_path: Path) -> None:
    model, rows = scorer(tmp_path), documents(margins=True)
    assert result(model, rows=rows)[0] == result(model)[0]
    assert result(model, rows=rows, margin=True)[0] > result(model)[0] + 0.01


@pytest.mark.parametrize("batches", [PADDED, UNPADDED], ids=["padded", "unpadded"])
def test_scores_of_one_row_are_those_in_a_batch(tmp_path: Path, batches: Batches) -> None:
    model, rows = scorer(tmp_path).eval(), documents()
    with torch.no_grad():
        together = score_rows(model, score_batch(rows, batches, 0, margin=False))
        alone = [score_rows(model, score_batch(rows[i : i + 2], batches, 0, margin=False)) for i in range(0, 12, 2)]
    torch.testing.assert_close(together, torch.cat(alone))


def test_a_score_is_that_of_plain_transformers_of_the_last_real_token(tmp_path: Path) -> None:
    model, rows = scorer(tmp_path).eval(), documents()
    config = as_classifier(copy.deepcopy(model.config))
    config.pad_token_id = 0
    plain = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    plain.load_state_dict({n: v for n, v in model.state_dict().items() if not n.startswith("lm_head")})
    batch = padded_batch(rows, 0)
    with torch.no_grad():
        wanted = plain(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.squeeze(-1)
        found = score_rows(model, score_batch(rows, PADDED, 0, margin=False))
        own, _ = row_scores(model, batch["input_ids"], batch["attention_mask"])
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(own, wanted)


def test_a_tie_is_one_half_and_alike_pairs_are_counted_apart() -> None:
    chosen, rejected = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1.0, 0.0, 3.0])
    lengths = torch.tensor([10.0, 10.0, 10.0]), torch.tensor([10.0, 20.0, 11.0])
    vector = order_sums(chosen, rejected, lengths, torch.tensor([1.0, 1.0, 1.0]))
    found = order_measures(vector.tolist())
    assert len(vector) == ORDER_SUMS
    assert found["rewards/accuracies"] == pytest.approx(1.5 / 3)
    assert found["rewards/accuracies_alike"] == pytest.approx(0.5 / 2)
    assert found["rewards/margins"] == pytest.approx(-1 / 3)
    assert order_measures([0.0] * ORDER_SUMS) == {}


def test_pairs_are_alike_by_their_answers_whatever_the_prompt_adds(tmp_path: Path) -> None:
    """Whole rows were compared: after a long prompt all pairs were alike."""
    batch = score_batch(steps.rows([(50, 4, 8), (3, 10, 11)]), PADDED, 0, margin=False)
    chosen, rejected = both_lengths(batch)
    assert (chosen.tolist(), rejected.tolist()) == ([4, 10], [8, 11])


def test_adapters_have_the_score_in_their_file_and_the_base_keeps_its_own(tmp_path: Path) -> None:
    base = scorer(tmp_path)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS")
    model: Any = peft.get_peft_model(base, config)
    require_same(result(model), result(model))
    names = {name for name, p in model.named_parameters() if p.requires_grad and "score" in name}
    assert names == {"base_model.model.score.modules_to_save.default.weight"}
    assert "base_model.model.score.weight" in peft.get_peft_model_state_dict(model)


def test_padding_ends_no_turn() -> None:
    """transformers' classifiers take the last token that is no padding: a stop token that pads would be cut off."""
    tokenizer = load_tokenizer(ModelConfig(name_or_path="bundled:tiny-gemma2"), offline=True)
    tokenizer.pad_token = tokenizer.eos_token
    stops = (tokenizer.eos_token_id, 1)
    pad_apart(tokenizer, stops)
    assert tokenizer.pad_token_id not in (*stops, tokenizer.bos_token_id)
