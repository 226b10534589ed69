"""Loss and gradients of a step on labelled answers, compared with TRL's KTOTrainer on one model and the same rows."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset
from trl import KTOConfig, KTOTrainer
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from ftcli.config.model import ModelConfig
from ftcli.methods.kto.reference import answer_start, mismatched_rows
from ftcli.model.tokenizer import load_tokenizer
from tests.unit.methods.kto.labelled import LONGEST, objective_of, rows, step
from tests.unit.methods.preference import steps
from tests.unit.methods.preference.steps import PADDED, UNPADDED, Result, require_same


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> KTOTrainer:
    """TRL's trainer, which gives the model its adapters; those are trained a little afterwards."""
    folder = tmp_path_factory.mktemp("trl")
    args = KTOConfig(
        output_dir=str(folder / "out"), report_to="none", use_cpu=True, bf16=False, save_strategy="no",
        disable_tqdm=True, gradient_checkpointing=False, per_device_train_batch_size=2,
    )  # fmt: skip
    tokenizer = load_tokenizer(ModelConfig(name_or_path="bundled:tiny-gemma2"), offline=True)
    made = KTOTrainer(
        model=steps.base_model(folder), args=args, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"], "completion": ["b", "c"], "label": [True, False]}),
        peft_config=steps.LORA,
    )  # fmt: skip
    steps.perturb(made.model)
    made.model.train()
    return made


def theirs(trainer: KTOTrainer, **settings: Any) -> Result:
    """A step over all rows as TRL makes it, its mismatched rows given."""
    plain = {"loss_type": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    for name, value in {**plain, **settings}.items():
        setattr(trainer, name, value)
    trainer.calculate_KL = trainer.loss_type == "kto"
    documents, examples = rows(), []
    mismatched = {other.row.number: other for other in mismatched_rows(documents, LONGEST)}
    for row in documents:
        asked, other = answer_start(row), mismatched[row.row.number]
        parts = {"prompt_ids": row.input_ids[:asked], "completion_ids": row.input_ids[asked:]}
        strange = {"KL_completion_ids": other.input_ids[asked:]} if trainer.calculate_KL else {}
        examples.append({**parts, **strange, "label": row.value > 0})
    trainer.model.zero_grad(set_to_none=True)
    loss = trainer.compute_loss(trainer.model, DataCollatorForUnpairedPreference(pad_token_id=0)(examples))
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


SETTINGS: dict[str, dict[str, Any]] = {
    "kto": {"beta": 0.3},
    "weights": {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.6},
    "another beta": {"beta": 2.0},
    "apo_zero_unpaired": {"loss": "apo_zero_unpaired", "beta": 0.3, "undesirable_weight": 1.7},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_loss_gradients_and_metrics_are_trls(trainer: KTOTrainer, settings: dict[str, Any]) -> None:
    """Theirs in one micro-batch, ours in one, three and eight."""
    named = {"loss_type" if name == "loss" else name: value for name, value in settings.items()}
    trainer._metrics["train"].clear()
    wanted = theirs(trainer, **named)
    said = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    for batches, size, accumulation in ((PADDED, 8, 1), (UNPADDED, 3, 3), (PADDED, 1, 8)):
        objective = objective_of(trainer.model, batches=batches, size=size, accumulation=accumulation, **settings)
        require_same(step(objective, trainer.model), wanted)
        found = objective.metrics()
        for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
            assert found[name] == pytest.approx(said[name], rel=1e-4, abs=1e-6), name
        if "loss" not in settings:
            assert found["kl"] == pytest.approx(said["kl"], rel=1e-4, abs=1e-6)
            assert said["kl"] > 0.01
