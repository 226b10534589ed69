"""What a run says before its first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftcli.config.recipe import Recipe
from ftcli.methods.grpo.train import training_rows as grpo_rows
from ftcli.methods.sft.train import Supervised
from ftcli.train import assembly
from ftcli.train.start import effective_batch, trained_share

GRPO = {"grpo": {"num_generations": 8, "rewards": [{"use": "json_valid"}]}}


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate({"version": 1, "model": {"name_or_path": "a/b"}, **sections})


@pytest.mark.parametrize(("method", "sections", "text"), [
    ("sft", {"train": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}},
     "32 rows a step (4 at a time x 8 accumulated)"),
    ("sft", {"data": {"packing": True}}, "1 packed rows a step (1 at a time x 1 accumulated)"),
    ("grpo", {"train": {"per_device_train_batch_size": 64}, **GRPO},
     "64 completions a step (64 at a time x 1 accumulated), 8 of each prompt"),
    # `ftcli train` of a recipe that has the section all the same.
    ("sft", {"train": {"per_device_train_batch_size": 64}, **GRPO}, "64 rows a step (64 at a time x 1 accumulated)"),
])  # fmt: skip
def test_the_effective_batch(method: str, sections: dict[str, Any], text: str) -> None:
    made = recipe(**sections)
    rows = grpo_rows(made, 100) if method == "grpo" else Supervised().training_rows(made, 100, 1000)
    assert effective_batch(made, rows) == text


def test_trained_parameters_and_their_share() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(10, 90, bias=False))
    model[1].requires_grad_(False)
    job: Any = SimpleNamespace(recipe=recipe(lora={"r": 4}), facts=SimpleNamespace(parameters=5_000))
    assert trained_share(job, model) == "100 of 1,000 (10.00%) are trained"
    stored_in_four_bits: Any = SimpleNamespace(
        recipe=recipe(lora={"r": 4}, quantization={"method": "nf4"}), facts=SimpleNamespace(parameters=4_900)
    )
    assert trained_share(stored_in_four_bits, model) == "100 of 5,000 (2.00%) are trained"
    stored_in_four_bits.facts = SimpleNamespace(parameters=None)
    assert trained_share(stored_in_four_bits, model) == "100 are trained"


@pytest.mark.parametrize(
    ("local", "init", "offline", "missing", "said"),
    [
        (False, "pretrained", False, 3 * 2**30, ["download: 3.0 GiB of weights from google/gemma-2-2b"]),
        (False, "pretrained", False, 0, []),
        (False, "pretrained", True, 3 * 2**30, []),
        (False, "random", False, 3 * 2**30, []),
        (True, "pretrained", False, 3 * 2**30, []),
    ],
)
def test_a_download_is_announced_with_its_size(
    monkeypatch: pytest.MonkeyPatch, local: bool, init: str, offline: bool, missing: int, said: list[str]
) -> None:
    told: list[str] = []
    asked: list[tuple[str, str | None]] = []

    def missing_bytes(name: str, revision: str | None) -> int:
        asked.append((name, revision))
        return missing

    monkeypatch.setattr(assembly, "missing_bytes", missing_bytes)
    job: Any = SimpleNamespace(
        facts=SimpleNamespace(is_local=local, name="google/gemma-2-2b"),
        recipe=recipe(model={"name_or_path": "google/gemma-2-2b", "init": init, "revision": "main"}),
        session=SimpleNamespace(offline=offline),
        reporter=SimpleNamespace(info=told.append),
    )
    assembly.tell_download(job)
    assert told == said
    assert asked == ([("google/gemma-2-2b", "main")] if not local and init == "pretrained" and not offline else [])
