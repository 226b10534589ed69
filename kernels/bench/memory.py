"""The memory estimate against what a machine allocates: every shipped recipe, and a grid of whole models.

    python kernels/bench/memory.py --json memory.json            # goes on where memory.json ends
    python kernels/bench/memory.py --only bitnet "llama3.1-8b, 2 x 4096"
    python kernels/bench/memory.py --gpus 2                      # weights sharded over two GPUs instead
    python kernels/bench/memory.py --only smoke --device cpu     # does it run at all

Recipes run through `ftcli train` and `ftcli grpo` with random weights on rows of full length: two steps of two
micro-batches and an evaluation (GRPO: one step). The grid runs through `ftcli bench`. One case after the other, each
with the machine to itself, some 20 seconds a case on an H200. Status 1 when a case fails or is out of the margin.

``predicted`` and ``measured`` are the estimate without what CUDA takes itself and the peak of torch's allocator
(max_memory_allocated); ``with CUDA's own`` are the whole estimate and what nvidia-smi says is used at the most beyond
what was used before. On a CPU both are the whole process, the estimate and its largest resident set, not judged.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common import GIB, RECIPES, TINY_STEP, Answer, Table, bench, ftcli, parser, require_device, settings
from rows import UNTRAINED, loaded, write_prompts, write_texts

Kind = Literal["train", "grpo", "bench"]
#: A prediction may be wrong by this share of what was measured ...
MARGIN = 0.10
#: ... or by this many bytes, whichever is more: two of cuBLAS' workspaces, a matter of the tiny recipes alone.
SLACK_BYTES = 64 * 2**20
# Two steps, with an evaluation between them while the optimizer's state is there; from the second micro-batch on a step
# holds the gradients of the first, and further ones change nothing.
# Plain text has no answers that tasks could be judged by.
_TRAIN = ("train.max_steps=2", "train.warmup_steps=0", "eval.every_steps=1", "eval.tasks=[]", "logging.every_steps=1")
# A step of GRPO uses up one generation batch. Held-out answers are cut short: that cache is a part of the other.
_GRPO = ("train.max_steps=1", "train.warmup_steps=0", "eval.generate.max_new_tokens=8", "logging.every_steps=1")
#: What CUDA graphs keep to themselves is for rows of all lengths; the cases have full ones, which no graph takes.
_EAGER = ("train.cuda_graphs=false",)
#: Batches of text for two steps of two micro-batches and for an evaluation; prompts for GRPO's.
_BATCHES, _PROMPTS = {"train": 4, "eval": 1}, {"train": 8, "eval": 8}


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement. ``kind``: ``train`` and ``grpo`` run the recipe's command, ``bench`` runs `ftcli bench` on
    ``batch`` rows of ``seq`` tokens.
    """

    name: str
    recipe: str
    kind: Kind
    overrides: tuple[str, ...] = ()
    batch: int = 1
    seq: int = 0

    @property
    def settings(self) -> tuple[str, ...]:
        """All that is set."""
        if self.kind == "bench":
            return (*_EAGER, *self.overrides)
        return (*UNTRAINED, *(_GRPO if self.kind == "grpo" else (*_TRAIN, *_EAGER)), *self.overrides)


def recipe_cases() -> list[Case]:
    """Every file in recipes/; the small ones last."""
    cases = []
    for path in sorted(RECIPES.glob("*.yaml")):
        recipe = loaded(path).recipe
        many = recipe.grpo is None and recipe.train.gradient_accumulation_steps > 2
        halved = ("train.gradient_accumulation_steps=2",) if many else ()
        cases.append(Case(path.stem, path.stem, "train" if recipe.grpo is None else "grpo", halved))
    return sorted(cases, key=lambda case: case.name.startswith(("smoke", "tiny")))


def _case(recipe: str, batch: int, seq: int, policy: str, *overrides: str) -> Case:
    """A case of the grid."""
    what = [text.removeprefix("quantization.method=").removeprefix("model.") for text in overrides]
    name = ", ".join([recipe, f"{batch} x {seq}", policy, *what])
    return Case(name, recipe, "bench", (f"train.gradient_checkpointing={policy}", *overrides), batch, seq)


_NF4, _FP8, _OFF = "quantization.method=nf4", "quantization.method=fp8", "model.kernels=off"
_R8, _R64, _FUSED = "lora.r=8", "lora.r=64", "train.optim=adamw_torch_fused"


def grid_cases() -> list[Case]:
    """Each value of batch, length, rank, policy, quantization and kernels several times, with different others."""
    short = ("grpo.max_completion_length=64", "train.max_steps=2")
    return [
        _case("llama3.1-8b", 2, 4096, "false"),
        _case("llama3.1-8b", 1, 1024, "offload"),
        _case("llama3.1-8b", 1, 16384, "true", _R64),
        _case("llama3.1-8b", 4, 2048, "selective", _R8),
        _case("llama3.1-8b", 2, 4096, "false", _NF4, _R64),
        _case("llama3.1-8b", 1, 2048, "offload", _NF4, _R8),
        _case("llama3.1-8b", 2, 4096, "selective", _FP8),
        _case("llama3.1-8b", 1, 4096, "true", _OFF),
        _case("gemma2-9b", 1, 4096, "false", _R64),
        _case("gemma2-9b", 4, 2048, "offload"),
        _case("gemma2-9b", 1, 8192, "offload", _NF4),
        _case("gemma2-9b", 2, 1024, "selective", _FP8, _R8),
        _case("gemma2-9b", 1, 1024, "false", _OFF),
        _case("qwen3-8b", 2, 2048, "false", _R8),
        _case("qwen3-8b", 1, 4096, "true", _FP8, _R64),
        _case("qwen3-8b", 4, 4096, "offload", _NF4),
        _case("gemma2-2b", 1, 1024, "true", "lora=null"),
        _case("gemma2-2b", 2, 2048, "true", "lora=null", _FUSED),
        _case("gemma2-2b", 1, 4096, "selective", "lora=null", "train.pure_bf16=true"),
        _case("bitnet-2b", 4, 2048, "false", _FUSED),
        _case("bitnet-2b", 4, 4096, "true", _FUSED),
        Case("mistral-7b-grpo, completions of 64, two steps", "mistral-7b-grpo", "grpo", short),
    ]


def sharded_cases() -> list[Case]:
    """Full fine-tuning with weights sharded over GPUs, at shapes that the estimate was not fitted to."""
    full = ("lora=null", "launch.engine=fsdp")
    return [
        _case("qwen3-8b", 2, 4096, "false", *full, "model.name_or_path=Qwen/Qwen3-4B"),
        _case("gemma2-2b", 1, 8192, "false", *full),
        _case("gemma2-2b", 2, 2048, "true", *full),
        _case("qwen3-8b", 1, 2048, "selective", *full, "model.name_or_path=Qwen/Qwen3-4B"),
    ]


class Used:
    """The most that the first GPU held while a case ran, as nvidia-smi says, beyond what it held before."""

    def __init__(self) -> None:
        self._before, self._most = self._now(), 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Used:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def bytes(self) -> int | None:
        """None without a GPU."""
        return None if self._before is None else self._most - self._before

    def _watch(self) -> None:
        while self._before is not None and not self._ended.wait(0.2):
            self._most = max(self._most, self._now() or 0)

    @staticmethod
    def _now() -> int | None:
        asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        try:
            return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout) << 20  # noqa: S603
        except (OSError, ValueError, subprocess.CalledProcessError):
            return None


def measure(case: Case, device: str, gpus: int) -> dict[str, Any]:
    """A case's row: bytes predicted and measured, or what went wrong."""
    with Used() as used:
        if case.kind == "bench":
            answer, predicted, total, peak = _by_bench(case, device, gpus)
        else:
            answer, predicted, total, peak = _by_command(case)
    row: dict[str, Any] = {"case": case.name, "seconds": answer.seconds}
    if answer.status != 0 or total is None:
        return {**row, "error": f"exit {answer.status}: {answer.said[:160]}"}
    if device == "cpu":
        return {**row, "predicted_bytes": total, "measured_bytes": answer.host_peak_bytes, "judged": False}
    beside = {"predicted_total_bytes": total, "measured_total_bytes": used.bytes}
    return {**row, "predicted_bytes": predicted, "measured_bytes": peak, **beside}


def _by_bench(case: Case, device: str, gpus: int) -> tuple[Answer, int | None, int | None, int | None]:
    words = ["--steps", "1", "--batch", str(case.batch), "--seq", str(case.seq), *settings(*case.settings)]
    words += TINY_STEP if device == "cpu" else ()
    words += ["--gpus", str(gpus)] if gpus > 1 else []
    answer = bench(case.recipe, *words)
    found = answer.result
    each = (found.get("several") or {}).get("peak_memory_bytes_of_each")
    peak = max(each) if each else found.get("peak_memory_bytes")
    return answer, found.get("predicted_allocated_bytes"), found.get("predicted_peak_bytes"), peak


def _by_command(case: Case) -> tuple[Answer, int | None, int | None, int | None]:
    path, command = RECIPES / f"{case.recipe}.yaml", "grpo" if case.kind == "grpo" else "train"
    with tempfile.TemporaryDirectory(prefix="ftcli-memory-") as folder:
        scratch = Path(folder)
        write, counts = (write_prompts, _PROMPTS) if case.kind == "grpo" else (write_texts, _BATCHES)
        given = loaded(path, *case.settings)
        files = [f"data.{name}=[{write(given, scratch / f'{name}.jsonl', n)}]" for name, n in counts.items()]
        words = [str(path), *settings(*case.settings, *files), "--offline"]
        checked = ftcli(["check", *words, "--json"])
        if checked.status != 0:
            return checked, None, None, None
        answer = ftcli([command, *words, "--output-dir", str(scratch / "run"), "--resume", "never"])
        metrics = scratch / "run" / "metrics.jsonl"
        lines = map(json.loads, metrics.read_text().splitlines() if metrics.exists() else ())
        peak = max((line["peak_memory_bytes"] for line in lines if "peak_memory_bytes" in line), default=None)
    memory = checked.result.get("memory") or {}
    return answer, memory.get("allocated_bytes"), memory.get("total_bytes"), peak


def good(row: dict[str, Any]) -> bool:
    """Measured, and predicted within the margin; a process on a CPU is only compared."""
    predicted, measured = row.get("predicted_bytes"), row.get("measured_bytes")
    if "error" in row or predicted is None or measured is None:
        return False
    if not row.get("judged", True):
        return True
    return bool(abs(predicted - measured) <= max(MARGIN * measured, SLACK_BYTES))


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """The row with sizes in GiB and ratios, for the table."""
    sizes = {"predicted": "predicted_bytes", "measured": "measured_bytes"}
    sizes |= {"with CUDA's own: predicted": "predicted_total_bytes", "of the device": "measured_total_bytes"}
    gib = {name: row[key] / GIB for name, key in sizes.items() if row.get(key)}
    if "predicted" in gib and "measured" in gib:
        gib["ratio"] = gib["predicted"] / gib["measured"]
    return {**row, **gib, "": row.get("error") or ("" if good(row) else "OUT OF THE MARGIN")}


def chosen(only: Sequence[str], gpus: int) -> list[Case]:
    """All cases, or those whose names contain one of ``only``."""
    cases = sharded_cases() if gpus > 1 else [*recipe_cases(), *grid_cases()]
    return [case for case in cases if not only or any(word in case.name for word in only)]


def main() -> int:
    """Measures case after case; what --json holds already is not measured again."""
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs="*", default=[], metavar="WORD", help="cases whose name contains a word")
    arguments.add_argument("--gpus", type=int, default=1, help="2 or more: the cases of sharded weights")
    options = arguments.parse_args()
    require_device(options.device)
    kept: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        kept = {row["case"]: row for row in json.loads(options.json.read_text())["rows"] if not row.get("error")}
    columns = {"case": "", "predicted": ".2f", "measured": ".2f", "ratio": ".3f"}
    table = Table({**columns, "with CUDA's own: predicted": ".2f", "of the device": ".2f", "": ""})
    for case in chosen(options.only, options.gpus):
        table.add(**shown(kept.get(case.name) or measure(case, options.device, options.gpus)))
        table.save(options.json)
    within = sum(good(row) for row in table.rows)
    print(f"\n{within} of {len(table.rows)} within {MARGIN:.0%}.")
    return 0 if within == len(table.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
