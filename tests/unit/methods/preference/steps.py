"""What tests of steps on pairs share: a small model with trained adapters, pairs, and a step's loss and gradients."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Literal

import peft
import torch
from torch import Tensor

from ftcli.config.model import QuantizationConfig
from ftcli.config.training import TrainConfig
from ftcli.data.order import Epochs, Mixture, Packs
from ftcli.data.tokens import TokenizedRow
from ftcli.labels import IGNORE_INDEX
from ftcli.methods.preference.losses import PairLoss
from ftcli.methods.preference.objective import PairObjective
from ftcli.methods.preference.reference import Reference
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.model.sequence_parallel import SequencePart
from ftcli.plan.batches import Batches
from ftcli.reporting import SilentReporter
from ftcli.rows.row import Row
from ftcli.train.checkpoint_state import Progress
from ftcli.train.parallel import Divisors, TokenCounts
from tests.quantized import PLAN, TINY, load

PADDED, UNPADDED = Batches("padded", "a test"), Batches("unpadded", "a test")
SHARED = Batches("unpadded", "a test", shares_prompts=True)
#: Tokens of a prompt, of its chosen answer and of its rejected one.
SIZES = ((3, 7, 2), (5, 4, 4), (2, 1, 6), (4, 3, 9), (6, 5, 5), (1, 8, 3))


def two_layers(folder: Path) -> Path:
    """The tiny model's folder without weights and its last two layers: one has a window, and one has none."""
    model = folder / "model"
    if not model.exists():
        shutil.copytree(TINY, model, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((TINY / "config.json").read_text())
        config |= {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}
        (model / "config.json").write_text(json.dumps(config))
    return model


def base_model(folder: Path, quantization: Literal["none", "nf4"] = "none") -> Any:
    """These layers with random weights, the same ones at each call."""
    torch.manual_seed(0)
    return load(two_layers(folder), QuantizationConfig(method=quantization), init="random")


LORA = peft.LoraConfig(r=4, target_modules="all-linear", exclude_modules="lm_head", task_type="CAUSAL_LM")


def perturb(model: Any) -> None:
    """Trains the adapters a little, so that the reference is another model."""
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)


def adapted_model(folder: Path, quantization: Literal["none", "nf4"] = "none", *, trained: bool = True) -> Any:
    """Two layers with adapters on all linear ones."""
    model: Any = peft.get_peft_model(base_model(folder, quantization), LORA)
    if trained:
        perturb(model)
    return model.train()


def rows(sizes: Sequence[tuple[int, int, int]] = SIZES) -> list[TokenizedRow]:
    """Pairs of random tokens: chosen and rejected answers to one prompt in turn."""
    rng, made = Random(1), []
    for number, (asked, *answers) in enumerate(sizes, 1):
        prompt = [rng.randrange(5, 250) for _ in range(asked)]
        for size in answers:
            answer = [rng.randrange(5, 250) for _ in range(size)]
            made.append(TokenizedRow(Row("pairs.jsonl", number, {}), prompt + answer, [IGNORE_INDEX] * asked + answer))
    return made


def epochs_of_pairs(documents: Sequence[TokenizedRow], seed: int = 0) -> Epochs:
    """As :func:`ftcli.methods.preference.pairs.pair_epochs`, of rows in memory."""
    import numpy as np

    pairs = len(documents) // 2
    packs = Packs(np.arange(2 * pairs, dtype=np.int64), np.arange(2, 2 * pairs + 1, 2, dtype=np.int64))
    return Epochs(list(documents), Mixture((pairs,), (pairs,)), packs, seed)


def job_of(batches: Batches = PADDED, *, size: int = 4, accumulation: int = 1) -> Any:
    """What an objective asks of a job."""
    train = TrainConfig(per_device_train_batch_size=size, gradient_accumulation_steps=accumulation)
    recipe = SimpleNamespace(train=train)
    return SimpleNamespace(
        pixel_reader=lambda: None,
        vision="text alone",
        recipe=recipe,
        device=torch.device("cpu"),
        dtypes=PLAN,
        pad_token_id=0,
        stops=range(250),
        tokenizer=SimpleNamespace(decode=str),
        batches=lambda model: batches,
        reporter=SilentReporter(),
    )


def objective_of(
    model: Any,
    documents: Sequence[TokenizedRow] | None = None,
    batches: Batches = PADDED,
    *,
    method: str = "dpo",
    reference: Any = None,
    known: Any = None,
    started: bool = True,
    job: Any = None,
    sequence: SequencePart | None = None,
    **settings: Any,
) -> PairObjective:
    """What a run on pairs trains on; ``started``: its first step has been made."""
    loss = PairLoss.of(method, PreferenceConfig.model_validate(settings))
    epochs = epochs_of_pairs(rows() if documents is None else documents)
    compared = Reference(reference, known)
    made = PairObjective(
        job or job_of(batches), model, epochs, loss, group=None, stack=None, reference=compared, sequence=sequence
    )
    if started:
        made.restore({}, Progress(1, 2, 0.0, 0))
    return made


#: Loss and gradients.
Result = tuple[float, dict[str, Tensor]]


def divisors(counts: TokenCounts) -> Divisors:
    """What a step of so many tokens and pairs is divided by."""
    return Divisors(torch.tensor(float(counts.supervised)), torch.tensor(float(counts.pairs)))


def step(
    objective: PairObjective, model: Any, split: Sequence[Sequence[int]], blanks: int = 0, group: Any = None
) -> Result:
    """One optimizer step over micro-batches of these pairs, and of so many that stand for none. Where there is a
    ``group``, the step is that of all its ranks.
    """
    model.zero_grad(set_to_none=True)
    made = [objective.micro_batch(units, blank=False) for units in split]
    made += [objective.micro_batch([0], blank=True) for _ in range(blanks)]
    counts = sum((batch.counts for batch in made), TokenCounts())
    if group is not None:
        counts = sum((TokenCounts(*one) for one in group.agree("step begins", counts.numbers)), TokenCounts())
    objective.begin(1)
    total = 0.0
    for batch in made:
        loss = objective.loss(dict(batch.inputs), divisors(counts))
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    objective.reduced()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def require_same(found: Result, wanted: Result, *, rel: float = 1e-5) -> None:
    """Loss and gradients agree to rounding, and there are gradients."""
    import pytest

    assert found[0] == pytest.approx(wanted[0], rel=rel, abs=1e-6)
    assert found[1].keys() == wanted[1].keys()
    size = sum(float(g.norm() ** 2) for g in wanted[1].values()) ** 0.5
    assert size > 1e-4
    off = sum(float((found[1][name] - g).norm() ** 2) for name, g in wanted[1].items()) ** 0.5
    assert off <= 10 * rel * size
