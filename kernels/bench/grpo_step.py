"""Times whole GRPO steps, from prompts to the optimizer's step, by the trainer of `ftcli grpo`: where a step's time
goes, what it needs of memory, whether every adapter gets a gradient, and how far log-probabilities agree.

    python kernels/bench/grpo_step.py --cases bf16 fp8 nf4
    python kernels/bench/grpo_step.py --cases long --checkpointing true
    python kernels/bench/grpo_step.py --cases bf16 long --tiny

Random weights of Llama-3.1-8B's shape, LoRA r 16 on all linear layers. ``bf16``, ``fp8`` and ``nf4`` are the storage of
the base, each with 8 prompts x 8 completions of 512 + 512 tokens, rollouts included. ``long`` is the training pass over
8 rows of 20,480 tokens, a row in each micro-batch. Its completions are random tokens: to sample them would take
minutes, and is what generation.py times.
"""

from __future__ import annotations

import argparse
import json
import string
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memory_worker import clear

from ftcli.config.load import LoadedRecipe, Override, load_recipe
from ftcli.data.asked import RenderedPrompt, asked_rows, room_of_grpo
from ftcli.data.template import Renderer
from ftcli.data.tokens import TokenizedRow
from ftcli.generation.requests import Completion, StopCheck
from ftcli.job import Job, open_job
from ftcli.methods.grpo.objective import build_grpo
from ftcli.methods.grpo.spans import LOG_PROBS, OPTIMIZER, REWARDS, ROLLOUT, TRAINING
from ftcli.pipeline import build
from ftcli.pipeline.checking import checked
from ftcli.reporting import Session, SilentReporter
from ftcli.rows.prompts import prompts_of
from ftcli.rows.row import Row
from ftcli.run.completions import ScoredCompletion
from ftcli.run.metrics import MetricsLine
from ftcli.train.bench import StepTimer
from ftcli.train.loop import Attendance, StepIntervals, TrainerHooks, TrainingLoop

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@dataclass(frozen=True)
class Case:
    """A storage of the base and the shape of a step. ``sampled`` says whether the engine makes the completions."""

    storage: str
    prompts: int
    prompt: int
    completion: int
    micro_batch: int
    sampled: bool = True

    def tiny(self) -> Case:
        """Small enough for a CPU."""
        prompts, completion = min(self.prompts, 2), 24 if self.sampled else 96
        return Case(self.storage, prompts, 48, completion, min(self.micro_batch, 8), self.sampled)


PARTS = (ROLLOUT, REWARDS, LOG_PROBS, TRAINING, OPTIMIZER)
#: Completions of each prompt.
GROUP = 8
CASES = {
    **{storage: Case(storage, 8, 512, 512, 8) for storage in ("bf16", "fp8", "nf4")},
    "long": Case("bf16", 1, 480, 20_000, 1, sampled=False),
}


@dataclass
class Figures:
    """What one case came to. Seconds are those of each step; the first has everything in it that is set up once."""

    case: str
    seconds: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    peak_gib: float = 0.0
    rollout_peak_gib: float = 0.0
    estimate_gib: float = 0.0
    checkpointing: str = ""
    log_probs: dict[str, Any] = field(default_factory=dict)
    advantages: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


class Listener(SilentReporter):
    """Keeps what people would be told."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def info(self, text: str) -> None:
        """One line."""
        self._said.append(text)


class RandomCompletions:
    """In the place of the engine: completions of random tokens, all of the same length."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self._vocabulary, self._length = vocabulary, length

    def complete(self, prompts: Sequence[Sequence[int]], step: int) -> list[Completion]:
        """One for each prompt; nothing is known of their log-probabilities."""
        generator = torch.Generator().manual_seed(step)
        shape = (len(prompts), self._length)
        return [Completion(ids) for ids in torch.randint(8, self._vocabulary, shape, generator=generator).tolist()]


class Watcher:
    """Takes the numbers of each step, and looks at the gradients before the optimizer takes them."""

    requested = None

    def __init__(self, figures: Figures, loop: TrainingLoop) -> None:
        self._figures, self._loop = figures, loop
        self._reduced = loop.objective.reduced

    def reduced(self) -> None:
        """Which adapters have a gradient. LoRA's A has none in the very first step, since B begins as zeros."""
        self._reduced()
        trained = [(name, p) for name, p in self._loop.model.named_parameters() if p.requires_grad]
        norms = torch.stack(
            torch._foreach_norm([torch.zeros_like(p) if p.grad is None else p.grad for _, p in trained])
        ).tolist()
        told = []
        for kind in ("lora_A", "lora_B"):
            found = [norm for (name, _), norm in zip(trained, norms, strict=True) if kind in name]
            told.append(f"{kind} {sum(norm > 0 for norm in found)} of {len(found)} (smallest {min(found):.1e})")
        self._figures.adapters.append(f"step {self._loop.step + 1}, gradients that are not zero: {', '.join(told)}")

    def write(self, line: MetricsLine) -> None:
        """Numbers of a step."""
        told = {key: value for key, value in line.items() if key.split("/")[0] in ("seconds", "throughput")}
        self._figures.parts.append(told)
        self._figures.gradient_norm.append(line["grad_norm"])

    def completions(self, _step: int, scored: Sequence[ScoredCompletion]) -> None:
        """Advantages of a step."""
        self._figures.advantages.append(sum(abs(one.advantage or 0.0) for one in scored) / len(scored))

    def begin(self, step: int, total: int) -> None:
        """Nothing is shown."""

    def show(self, step: int, line: MetricsLine) -> None:
        """Nothing is shown."""

    def evaluated(self, step: int, metrics: MetricsLine) -> None:
        """Nothing is evaluated."""


class Apart:
    """Rollouts whose peak of memory is kept apart from what follows."""

    def __init__(self, rollouts: Any, stopping: StopCheck) -> None:
        self._rollouts, self.stopping = rollouts, stopping
        self.peak = 0

    def complete(self, prompts: Sequence[Sequence[int]], step: int, own: slice | None = None) -> list[Completion]:
        """As the rollouts."""
        found: list[Completion] = self._rollouts.complete(prompts, step, own)
        if torch.cuda.is_available():
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        return found


def recipe_of(case: Case, steps: int, options: argparse.Namespace, scratch: Path) -> LoadedRecipe:
    """The recipe of Llama-3.1-8B (or the bundled tiny model's), made into the case's."""
    # Characters in a completion of random tokens: 248 of the ids that a vocabulary has stand for one, on average.
    mean = round(case.completion * 248 / (264 if options.tiny else 128256))
    thresholds = [mean, mean + 1]
    rewards = ", ".join(f"{{use: length, min_chars: {least}, max_chars: 1000000}}" for least in thresholds)
    values = {
        "run.output_dir": scratch / "run",
        "model.tokenizer": "bytes",
        "model.init": "random",
        "lora.r": 16,
        "quantization.method": "none" if case.storage == "bf16" else case.storage,
        "data.train": f"[{scratch / 'prompts.jsonl'}]",
        "data.eval": "[]",
        "data.max_seq_len": case.prompt + case.completion,
        "train.max_steps": steps,
        "train.per_device_train_batch_size": case.micro_batch,
        "train.gradient_accumulation_steps": case.prompts * GROUP // case.micro_batch,
        "train.learning_rate": 1e-3,
        "train.warmup_steps": 0,
        "train.gradient_checkpointing": options.checkpointing,
        "train.memory_budget_gib": options.budget,
        "checkpoint.every_steps": "null",
        "eval.every_steps": "null",
        "eval.tasks": "[]",
        "grpo": f"{{num_generations: {GROUP}, max_prompt_length: {case.prompt}, "
        f"max_completion_length: {case.completion}, rewards: [{rewards}]}}",
    }
    set_to = [Override(f"{key}={value}", f"--set {key}={value}") for key, value in values.items() if value is not None]
    return load_recipe(RECIPES / ("smoke-grpo.yaml" if options.tiny else "llama3.1-8b.yaml"), set_to)


def write_prompts(loaded: LoadedRecipe, job: Job, case: Case, path: Path) -> list[RenderedPrompt]:
    """As many prompts as a step needs, each as long as the case says in the recipe's template."""
    renderer = Renderer(job.tokenizer, loaded.recipe.data.chat_template)
    letters = Random(0)

    def line(length: int) -> dict[str, str]:
        return {"prompt": "".join(letters.choices(string.ascii_lowercase, k=length))}

    def tokens(length: int) -> int:
        (prompt,) = prompts_of([Row(str(path), 1, line(length))], loaded.recipe.data.format)
        return len(job.tokenizer(renderer.prompt(prompt), add_special_tokens=False)["input_ids"])

    length = case.prompt - (tokens(case.prompt) - case.prompt)  # a byte of text is a token
    path.write_text("".join(json.dumps(line(length)) + "\n" for _ in range(case.prompts)), encoding="utf-8")
    data = job.recipe.data
    asked, _ = asked_rows(data.train, data, job.tokenizer, room_of_grpo(job.recipe.grpo), offline=True)  # type: ignore[arg-type]
    return asked


def measure(name: str, case: Case, options: argparse.Namespace, scratch: Path) -> Figures:
    """Trains ``options.steps`` steps; one of the long case."""
    figures = Figures(name)
    (scratch / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    steps = options.steps if case.sampled else options.long_steps
    loaded = recipe_of(case, steps, options, scratch)
    report = checked(loaded, Session(Listener(figures.said), offline=True), "grpo")
    job = open_job(report, Session(Listener(figures.said), offline=True))
    grpo = job.recipe.grpo
    assert grpo is not None
    asked = write_prompts(loaded, job, case, scratch / "prompts.jsonl")
    model = build.build_trainable(job)
    ids = job.tokenizer([one.text for one in asked], add_special_tokens=False)["input_ids"]
    build.put_on_kernels(
        job, model, [TokenizedRow(one.prompt.row, row, row) for one, row in zip(asked, ids, strict=True)]
    )
    parity = []
    watchers: list[Watcher] = []
    hooks = TrainerHooks(None, 1, None, completions=lambda step, scored: watchers[0].completions(step, scored))
    loop = build_grpo(job, grpo, model, asked, hooks, parity.append)
    parts: Any = loop.objective._parts  # type: ignore[attr-defined]
    made: Any = parts.rollouts if case.sampled else RandomCompletions(job.vocab_size, case.completion)
    parts.rollouts = apart = Apart(made, parts.rollouts.stopping)
    timer = StepTimer(job.device)
    loop.watchers.append(timer)
    watchers.append(Watcher(figures, loop))
    loop.objective.reduced = watchers[0].reduced  # type: ignore[method-assign]
    loop.run(Attendance(StepIntervals(1, None, None), watchers[0].write, watchers[0], watchers[0]))
    figures.seconds = list(timer.times(steps).seconds)
    figures.peak_gib = loop.peak_memory_bytes() / 2**30
    figures.rollout_peak_gib = apart.peak / 2**30
    figures.estimate_gib = 0.0 if report.memory is None else report.memory.allocated_bytes / 2**30
    figures.checkpointing = str(report.checkpointing.policy)
    figures.log_probs = asdict(parity[0])
    return figures


def tell(figures: Figures) -> None:
    """The table for people."""
    print(
        f"\n{figures.case}: checkpointing {figures.checkpointing}; peak {figures.peak_gib:.1f} GiB in training passes, "
        f"{figures.rollout_peak_gib:.1f} up to the end of a rollout (the estimate allows {figures.estimate_gib:.1f})"
    )
    print("step   seconds " + "".join(f"{part:>11}" for part in PARTS) + "      other   rollout tok/s  training tok/s")
    for at, (seconds, parts) in enumerate(zip(figures.seconds, figures.parts, strict=True), start=1):
        each = [parts[f"seconds/{part}"] for part in PARTS]
        rates = [parts.get(f"throughput/{part}", 0.0) for part in ("rollout", "training")]
        print(f"{at:4} {seconds:9.2f} " + "".join(f"{value:11.2f}" for value in [*each, seconds - sum(each)])
              + "".join(f"{rate:16,.0f}" for rate in rates))  # fmt: skip
    print(f"log-probabilities: {json.dumps(figures.log_probs)}")
    print(f"mean |advantage| by step {figures.advantages}; gradient norm by step {figures.gradient_norm}")
    print("\n".join(figures.adapters))
    print("\n".join(f"  {text}" for text in figures.said), flush=True)


def main() -> None:
    """Print a table for each case, and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["bf16"], choices=list(CASES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--long-steps", type=int, default=1)
    parser.add_argument("--checkpointing", default="auto", help="a policy; auto takes the fastest that fits")
    parser.add_argument("--budget", type=float, help="GiB that auto plans with; all of the device when absent")
    parser.add_argument("--tiny", action="store_true", help="a small model and short rows, for a CPU")
    options = parser.parse_args()
    for name in options.cases:
        case = CASES[name].tiny() if options.tiny else CASES[name]
        with tempfile.TemporaryDirectory(prefix="ftcli-grpo-") as scratch:
            figures = measure(name, case, options, Path(scratch))
        tell(figures)
        print(json.dumps(asdict(figures)), flush=True)
        clear()


if __name__ == "__main__":
    main()
