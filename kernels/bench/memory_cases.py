"""What ``memory.py`` measures: every shipped recipe through its own command, and a grid of whole models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ftcli.config.load import LoadedRecipe, Override, load_recipe
from ftcli.config.recipe import Recipe
from ftcli.facts.device import DeviceFacts
from ftcli.facts.model import read_facts
from ftcli.pipeline.benchmark import bench_recipe
from ftcli.pipeline.options import BenchOptions
from ftcli.plan.checkpointing import choose_checkpointing
from ftcli.plan.memory.estimate import MemoryEstimate, estimate_memory
from ftcli.plan.run import RunPlan
from ftcli.tables import methods

Kind = Literal["train", "grpo", "bench", "evaluation"]
RECIPES = Path(__file__).resolve().parents[2] / "recipes"
#: Steps of a benchmark after the first; the optimizer's state is there from the second on.
STEPS = 1

# Random weights and bytes need no download. Two steps, with an evaluation between them while the optimizer's state is
# there; from the second micro-batch on a step holds the gradients of the first, and further ones change nothing.
_ANY = ("model.init=random", "model.tokenizer=bytes", "checkpoint.every_steps=null", "logging.tensorboard=false")
_TRAIN = ("train.max_steps=2", "train.warmup_steps=0", "eval.every_steps=1")
# A step of GRPO uses up one generation batch. Held-out answers are cut short: that cache is a part of the other.
_GRPO = ("train.max_steps=1", "train.warmup_steps=0", "eval.generate.max_new_tokens=8")
#: What CUDA graphs keep to themselves is for rows of all lengths; the cases have full ones, which no graph takes.
_EAGER = ("train.cuda_graphs=false",)


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement. ``overrides`` are settings as ``--set`` takes them.

    ``kind``: ``train`` and ``grpo`` run the recipe's command, ``bench`` and ``evaluation`` are `ftcli bench` without
    and with ``--eval``, which trains or evaluates on ``batch`` rows of ``seq`` tokens.
    """

    name: str
    recipe: str
    kind: Kind
    overrides: tuple[str, ...] = ()
    batch: int | None = None
    seq: int | None = None

    def loaded(self, *more: str, device: DeviceFacts | None = None) -> LoadedRecipe:
        """The recipe with the overrides, and ``more`` of them.

        For a ``device`` with the policy that `auto` comes to where nothing else runs on it: cases run beside others.
        """
        overrides = [Override(text, f"--set {text}") for text in (*self._fixed(), *self.overrides, *more)]
        loaded = load_recipe(RECIPES / f"{self.recipe}.yaml", overrides)
        if device is None:
            return loaded
        alone = replace(device, free_bytes=None, host_free_bytes=None)
        plan = self._plan(loaded, loaded.recipe, alone)
        return replace(loaded, recipe=choose_checkpointing(plan).applied_to(plan).recipe)

    @property
    def options(self) -> BenchOptions:
        """What `ftcli bench` is asked for."""
        return BenchOptions(batch=self.batch, seq=self.seq, steps=STEPS, evaluation=self.kind == "evaluation")

    def estimate(self, device: DeviceFacts) -> MemoryEstimate:
        """What ftcli predicts. Raises FtcliError for a recipe that cannot be read."""
        loaded = self.loaded(device=device)
        recipe: Recipe = loaded.recipe
        if self.kind in ("bench", "evaluation"):
            recipe = bench_recipe(recipe, self.options)
        plan = self._plan(loaded, recipe, device)
        found = estimate_memory(plan)
        assert found is not None, f"no arithmetic for {plan.facts.model_type}"
        return found

    def _plan(self, loaded: LoadedRecipe, recipe: Recipe, device: DeviceFacts) -> RunPlan:
        facts = read_facts(recipe.model, offline=True, origins=loaded.origins)
        method = methods.row("grpo" if self.kind == "grpo" else "sft")
        return RunPlan(recipe, facts, device, "eval" if self.kind == "evaluation" else "train", method)

    def _fixed(self) -> tuple[str, ...]:
        if self.kind == "grpo":
            return (*_ANY, *_GRPO)
        return (*_ANY, *_TRAIN, *_EAGER) if self.kind == "train" else _EAGER


def recipe_cases() -> list[Case]:
    """Every file in recipes/. What takes longest comes first."""
    cases = []
    for path in sorted(RECIPES.glob("*.yaml")):
        recipe = load_recipe(path).recipe
        if recipe.grpo is not None:
            cases.append(Case(path.stem, path.stem, "grpo"))
            continue
        halved = ("train.gradient_accumulation_steps=2",) if recipe.train.gradient_accumulation_steps > 2 else ()
        cases.append(Case(path.stem, path.stem, "train", halved))
    return sorted(cases, key=lambda case: (case.kind != "grpo", case.name.startswith(("smoke", "tiny"))))


def _bench(recipe: str, batch: int, seq: int, policy: str, *overrides: str) -> Case:
    what = [text.removeprefix("quantization.method=").removeprefix("model.") for text in overrides]
    name = ", ".join([recipe, f"{batch} x {seq}", policy, *what])
    return Case(name, recipe, "bench", (f"train.gradient_checkpointing={policy}", *overrides), batch, seq)


def _evaluation(recipe: str, batch: int, seq: int, *overrides: str) -> Case:
    what = [text.removeprefix("quantization.method=").removeprefix("model.") for text in overrides]
    name = ", ".join([recipe, f"{batch} x {seq}", "evaluation", *what])
    return Case(name, recipe, "evaluation", overrides, batch, seq)


_NF4, _FP8, _OFF = "quantization.method=nf4", "quantization.method=fp8", "model.kernels=off"
_R8, _R64 = "lora.r=8", "lora.r=64"


def grid_cases() -> list[Case]:
    """Each value of batch, length, rank, policy, quantisation and kernels several times, with different others."""
    return [
        _bench("llama3.1-8b", 2, 4096, "false"),
        _bench("llama3.1-8b", 1, 1024, "offload"),
        _bench("llama3.1-8b", 1, 16384, "true", _R64),
        _bench("llama3.1-8b", 4, 2048, "selective", _R8),
        _bench("llama3.1-8b", 2, 4096, "false", _NF4, _R64),
        _bench("llama3.1-8b", 1, 2048, "offload", _NF4, _R8),
        _bench("llama3.1-8b", 2, 4096, "selective", _FP8),
        _bench("llama3.1-8b", 1, 4096, "true", _OFF),
        _evaluation("llama3.1-8b", 4, 4096),
        _bench("gemma2-9b", 1, 4096, "false", _R64),
        _bench("gemma2-9b", 4, 2048, "offload"),
        _bench("gemma2-9b", 1, 8192, "offload", _NF4),
        _bench("gemma2-9b", 2, 1024, "selective", _FP8, _R8),
        _bench("gemma2-9b", 1, 1024, "false", _OFF),
        _evaluation("gemma2-9b", 2, 4096, _NF4),
        _bench("qwen3-8b", 2, 2048, "false", _R8),
        _bench("qwen3-8b", 1, 4096, "true", _FP8, _R64),
        _bench("qwen3-8b", 4, 4096, "offload", _NF4),
        _bench("gemma2-2b", 1, 1024, "true", "lora=null"),
        _bench("gemma2-2b", 2, 2048, "true", "lora=null", "train.optim=adamw_torch_fused"),
        _bench("gemma2-2b", 1, 4096, "selective", "lora=null", "train.pure_bf16=true"),
        _bench("bitnet-2b", 4, 2048, "false", "train.optim=adamw_torch_fused"),
        _bench("bitnet-2b", 4, 4096, "true", "train.optim=adamw_torch_fused"),
        _evaluation("bitnet-2b", 4, 4096),
        Case(
            "mistral-7b-grpo, completions of 64, two steps",
            "mistral-7b-grpo",
            "grpo",
            ("grpo.max_completion_length=64", "train.max_steps=2"),
        ),
    ]
