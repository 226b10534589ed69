"""`ftcli recipes new`: a recipe from four answers, which passes preflight on the GPU that it is for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ftcli.config.conversion.draft import DraftValue, body
from ftcli.config.load import load_text
from ftcli.config.schema import RecipeSchema
from ftcli.errors import FtcliError
from ftcli.facts.device import DeviceFacts, named_device, probe_device

#: What `--gpu` says for the machine that is here, and `--method` for adapters in as many bits as fit.
HERE, AUTO = "here", "auto"
#: What `--method` may say, and what it means.
METHODS = {
    AUTO: "adapters, on a base in 4 bits where 16 do not fit",
    "lora": "adapters on a base in 16 bits",
    "qlora": "adapters on a base in 4 bits: least memory",
    "full": "all weights: most memory",
    "grpo": "adapters, by rewards",
}
#: Rows of an optimizer step.
_ROWS = 16
#: Rows of a forward pass and tokens of a row, the first that fits is taken.
_SIZES = ((2, 2048), (1, 2048), (1, 1024), (1, 512))
_ON_CPU = ((4, 512), (1, 256))


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to the questions: a Hub id, folder or ``bundled:NAME``; files or datasets; a GPU as ``ftcli check
    --as`` takes it, or :data:`HERE`; and a key of :data:`METHODS`.
    """

    model: str
    data: tuple[str, ...]
    held_out: tuple[str, ...]
    gpu: str
    method: str


def new_recipe(answers: Answers, path: Path, *, offline: bool) -> str:
    """The text of the recipe that ``path`` is to hold: of the sizes that are tried, the largest that fits the GPU.
    Under :data:`AUTO` adapters on a base in 16 bits are tried first.

    Raises FtcliError with what `ftcli check` says against it in the smallest size, or against model, data and GPU.
    """
    from ftcli.preflight.stages import preflight

    device = probe_device() if answers.gpu.strip().lower() == HERE else named_device(answers.gpu, "--gpu")
    if answers.method == AUTO:
        try:
            return new_recipe(replace(answers, method="lora"), path, offline=offline)
        except FtcliError as error:
            if device.kind == "cpu" or not _is_short_of_memory(error):
                raise
        return new_recipe(replace(answers, method="qlora"), path, offline=offline)
    refused: FtcliError | None = None
    for rows, length in _ON_CPU if device.kind == "cpu" else _SIZES:
        made = body(_values(answers, device, rows, length), list(RecipeSchema().keys()))
        text = "\n".join([*_header(answers, path), *made]) + "\n"
        try:
            preflight(load_text(text, path), command="check", device=device, offline=offline)
        except FtcliError as error:
            refused = error
            if not _is_short_of_memory(error):
                raise
            continue
        return text
    assert refused is not None  # some size was tried
    less = "choose --method qlora" if answers.method == "lora" else "choose --method lora or qlora"
    findings = [
        replace(finding, help=f"{less}, a larger GPU or a smaller model; in the recipe: {finding.help}")
        if finding.code == "FT601" and answers.method != "qlora"
        else finding
        for finding in refused.findings
    ]
    raise FtcliError(findings, refused.exit_code)


def _is_short_of_memory(error: FtcliError) -> bool:
    return any(finding.code.startswith("FT6") for finding in error.findings)


def _header(answers: Answers, path: Path) -> Iterator[str]:
    command = "grpo" if answers.method == "grpo" else "train"
    file = " ".join(str(path).split())
    yield f"# {' '.join(answers.model.split())}: {METHODS[answers.method]}; written by `ftcli recipes new`"
    yield "#"
    asked = "" if answers.gpu.strip().lower() == HERE else f" --as {answers.gpu}"
    yield f"#   ftcli check {file}{asked}"
    yield f"#   ftcli {command} {file}"
    yield "#"
    yield "# It fits that GPU by the memory estimate; nothing was measured. docs/recipes.md has all keys."
    yield "version: 1"


def _values(answers: Answers, device: DeviceFacts, rows: int, length: int) -> dict[str, DraftValue]:
    made = {
        "model.name_or_path": DraftValue(answers.model),
        "model.dtype": DraftValue(
            "float32" if device.kind == "cpu" else "auto",
            None if device.kind == "cuda" else "16-bit arithmetic is slow on a CPU",
        ),
        "data.train": DraftValue(list(answers.data), "what rows may look like: docs/data.md"),
        "data.max_seq_len": DraftValue(length, "longer rows are an error, not cut: see data.overlong"),
        **_held_out(answers),
        **_weights(answers),
        **(_rewards(rows, length) if answers.method == "grpo" else _schedule(answers, rows)),
        "logging.every_steps": DraftValue(1 if answers.method == "grpo" else 10),
    }
    return {key: drafted for key, drafted in made.items() if drafted.value is not None}


def _held_out(answers: Answers) -> dict[str, DraftValue]:
    if not answers.held_out:
        return {}
    every = DraftValue(50, "steps between evaluations")
    return {"data.eval": DraftValue(list(answers.held_out), "never trained on"), "eval.every_steps": every}


def _weights(answers: Answers) -> dict[str, DraftValue]:
    if answers.method == "full":
        return {"train.learning_rate": DraftValue(2e-5, "about a tenth of LoRA's: docs/sweeps.md")}
    made = {
        "lora.r": DraftValue(16, "rank: more learns more, and takes more memory"),
        "lora.alpha": DraftValue(32.0),
        "lora.target_modules": DraftValue("all-linear"),
        "train.learning_rate": DraftValue(2e-4, "the setting that matters most: `ftcli sweep` finds the best"),
    }
    if answers.method == "qlora":
        made["quantization.method"] = DraftValue("nf4", "the frozen base in 4 bits")
    return made


def _schedule(answers: Answers, rows: int) -> dict[str, DraftValue]:
    return {
        "train.num_train_epochs": DraftValue(3.0),
        "train.per_device_train_batch_size": DraftValue(rows),
        "train.gradient_accumulation_steps": DraftValue(_ROWS // rows, f"{_ROWS} rows a step"),
        "train.lr_scheduler_type": DraftValue("cosine"),
        "train.warmup_steps": DraftValue(0.05, "below 1: a share of all steps"),
        "checkpoint.keep_best": DraftValue(True if answers.held_out else None, "of the evaluations"),
    }


def _rewards(rows: int, length: int) -> dict[str, DraftValue]:
    group = 8
    return {
        "grpo.num_generations": DraftValue(group, "completions for each prompt"),
        "grpo.max_prompt_length": DraftValue(min(512, length // 2)),
        "grpo.max_completion_length": DraftValue(min(256, length // 2)),
        "grpo.rewards": DraftValue([{"use": "exact_match", "answer": "answer"}], "or file: my_rewards.py:function"),
        "train.max_steps": DraftValue(200),
        "train.per_device_train_batch_size": DraftValue(group, "completions, not prompts"),
        "train.gradient_accumulation_steps": DraftValue(4 * rows),
        "train.learning_rate": DraftValue(1e-5),
        "train.lr_scheduler_type": DraftValue("constant"),
    }
