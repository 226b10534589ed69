"""Tiny models on disk, with adapters that change something, in run directories as training leaves them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
import yaml
from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from ftcli.assets import asset
from ftcli.config.load import load_recipe
from ftcli.config.recipe import Recipe
from ftcli.errors import Finding
from ftcli.facts.model import read_facts
from ftcli.model.tokenizer import align_special_tokens
from ftcli.plain import plain_fields
from ftcli.reporting import SilentReporter
from ftcli.run.directory import RunDirectory
from ftcli.run.inputs import base_inputs
from ftcli.run.integrity import result_files
from ftcli.run.status import FinishedTraining, TrainingSummary, note_trained, write_end

if TYPE_CHECKING:
    from ftcli.export.clean.process import CleanProcess
    from ftcli.export.gguf.file import ExpectedFile

SHAPE = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "eos_token_id": 4,
}


@pytest.fixture(autouse=True)
def _one_process_for_all(shared_clean: None) -> None:
    """No test here pays for another process that imports everything."""


@dataclass
class Heard(SilentReporter):
    """Remembers what was told."""

    findings: list[Finding] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def info(self, text: str) -> None:
        self.lines.append(text)

    def finding(self, finding: Finding) -> None:
        self.findings.append(finding)


def tokenizer() -> Any:
    found = AutoTokenizer.from_pretrained(asset("tokenizers", "bytes"))
    found.unk_token = found.pad_token  # else Qwen2's class adds a token, which the model has no row for (FT315)
    return found


def build(family: str, dtype: str) -> Any:
    torch.manual_seed(7)
    if family == "gemma2":
        model = Gemma2ForCausalLM(Gemma2Config(**SHAPE, sliding_window=16, query_pre_attn_scalar=8))
        assert model.lm_head.weight is model.model.embed_tokens.weight
    else:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))
    return model.to(getattr(torch, dtype)).eval()


def write_run(path: Path, base: Path, **sections: Any) -> RunDirectory:
    raw = {"version": 1, "model": {"name_or_path": str(base)}, **sections}
    run = RunDirectory(path)
    run.path.mkdir(parents=True)
    run.recipe_path.write_text(yaml.safe_dump(Recipe.model_validate(raw).model_dump(mode="json")))
    return run


@dataclass
class Trained:
    """A base on disk and a run with an adapter for it."""

    base: Path
    run: RunDirectory


@pytest.fixture(scope="session")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Base and adapter of each kind, made once."""
    made: dict[str, Path] = {}

    def make(family: str, dtype: str, size: float, options: dict[str, Any]) -> Path:
        asked = repr((family, dtype, size, options))
        if asked not in made:
            made[asked] = tmp_path_factory.mktemp("trained")
            _train(made[asked], build(family, dtype), size, options)
        return made[asked]

    return make


def _train(folder: Path, model: Any, size: float, options: dict[str, Any]) -> None:
    model.save_pretrained(folder / "base")
    tokenizer().save_pretrained(folder / "base")
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    )
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                step = torch.randn(parameter.shape) * size / parameter.shape[-1] ** 0.5
                parameter += step.to(parameter.dtype) if "lora_A" not in name else 0
    adapted.save_pretrained(folder / "adapter", save_embedding_layers=False)
    tokenizer().save_pretrained(folder / "adapter")


@pytest.fixture
def trained(tmp_path: Path, _made: Callable[..., Path]) -> Callable[..., Trained]:
    """Make a run with an adapter; ``size`` scales how much it changes, other options are peft.LoraConfig's."""

    def make(family: str = "gemma2", dtype: str = "float32", *, size: float = 0.3, **options: Any) -> Trained:
        made, base = _made(family, dtype, size, options), tmp_path / "base"
        shutil.copytree(made / "base", base, dirs_exist_ok=True)
        run = write_run(tmp_path / "run", base, lora={"r": 4})
        shutil.copytree(made / "adapter", run.adapter_dir)
        return Trained(base, run)

    return make


@pytest.fixture(scope="session")
def _tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and a full fine-tune of it, made once."""
    folder = tmp_path_factory.mktemp("tuned")
    model = build("gemma2", "float32")
    model.save_pretrained(folder / "base")
    tokenizer().save_pretrained(folder / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape)
    align_special_tokens(model, tokenizer(), (4,))
    model.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    return folder


@pytest.fixture
def tuned(tmp_path: Path, _tuned: Path) -> Trained:
    """A run with a full fine-tune."""
    base = tmp_path / "base"
    shutil.copytree(_tuned / "base", base)
    run = write_run(tmp_path / "run", base)
    shutil.copytree(_tuned / "model", run.model_dir)
    return Trained(base, run)


def with_rows(made: Trained, train: str = "bundled:sample-chat", **calibration: int) -> Trained:
    """The run with rows that it was trained on."""
    raw = yaml.safe_load(made.run.recipe_path.read_text())
    raw["data"]["train"] = [{"path": train}]
    raw["export"]["calibration"].update({"rows": 16, "row_tokens": 128, **calibration})
    made.run.recipe_path.write_text(yaml.safe_dump(raw))
    return made


def noted(made: Trained) -> Trained:
    """The run with what training notes of its base and its result."""
    run, recipe = made.run, load_recipe(made.run.recipe_path)
    facts = read_facts(recipe.recipe.model, offline=True, origins=recipe.origins)
    inputs = base_inputs(facts, recipe.recipe.model, None)
    run.manifest_path.write_text(json.dumps({"inputs": plain_fields(inputs)}))
    assert run.result_dir is not None
    files = result_files(run.result_dir)
    write_end(run.status_path, 0)
    note_trained(run.status_path, FinishedTraining(TrainingSummary(1), 1, run.result_dir.name, files))
    return made


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, clean_process: CleanProcess) -> ExpectedFile:
    """One llama, prepared once for all GGUF files of it."""
    from tests.small_models import build as small
    from tests.unit.export.gguf_runs import adapt, prepared_of

    pytest.importorskip("gguf")
    return prepared_of(adapt(tmp_path_factory.mktemp("shared"), small("llama")), clean_process)
