"""Measures N GPUs of one host: training, sharded weights, shared rows, rollouts, stops and kills.

    python kernels/bench/scaling.py FOLDER --gpus 8 [--only ddp,full,preference,context] [--steps 4]
    python kernels/bench/scaling.py FOLDER --device cpu             # two processes of a small model: does it run at all

Random weights of the true shapes, 2 x 4096 tokens a GPU. Five minutes on 2 x H200. FOLDER keeps what the commands
print. ``preference`` is DPO, KTO and reward models on as many tokens: 4 pairs of 512 + 768 tokens, whose prompts are
computed once. ``context`` is rows that all GPUs share (launch.context_parallel_size), --length tokens on one GPU and on
all. ``experts`` is Qwen3-30B-A3B with adapters, ``full9`` Qwen3.5-9B whole, both on sharded weights; ``grpo`` two steps
of GRPO on a 32B shape whose weights are sharded, 8 prompts x 8 completions of 512 + 512 tokens, and ``layered`` one
of 512 + 32 whose tokens gather the weights layer by layer; ``vision`` rows with images for Qwen3-VL-8B, on all GPUs and
on one. ``resume`` is how long a run takes to start, and one on all GPUs that SIGTERM ends and half of them go on with;
``killed`` is a run of which rank 1 is killed. The memory of sharded weights is measured by `memory.py --gpus 2`, GRPO
of a model that each GPU holds by `grpo_step.py --gpus 2`. NVLink multicast stays as the environment has it
(NCCL_NVLS_ENABLE).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import GIB, RECIPES, TINY_STEP, Table, bench, ftcli, parser, require_device, settings
from grpo_step import CASES, TINY, Case, measure
from rows import UNTRAINED

#: Completions that are generated at a time on each GPU.
_ROLLOUTS = 64
#: A step of 8,192 tokens: rows, pairs whose prompts are computed once, and labelled answers.
_ROWS = ("--batch", "2", "--seq", "4096")
_PAIRS = ("--batch", "4", "--seq", "1280", "--prompt", "512")
_LABELLED = ("--batch", "8", "--seq", "1024", "--prompt", "256")
_SMALL = ("data.eval=[]", "eval.every_steps=null", "logging.every_steps=1", "train.gradient_accumulation_steps=1")


@dataclass(frozen=True)
class Host:
    """The machine: ``gpus`` GPUs, or two processes of a small model on a CPU."""

    folder: Path
    gpus: int
    steps: int
    length: int
    tiny: bool
    table: Table

    @property
    def ranks(self) -> list[str]:
        """The words that take all GPUs."""
        return settings("launch.num_processes=2") if self.tiny else ["--gpus", str(self.gpus)]

    def bench(
        self, name: str, recipe: str, *words: str, shape: Sequence[str] = _ROWS, tiny: str = "smoke"
    ) -> dict[str, Any]:
        """The result of `ftcli bench` at ``shape`` a GPU, and how it ended."""
        words = (*(TINY_STEP if self.tiny else shape), "--steps", str(self.steps), *words)
        answer = bench(tiny if self.tiny else recipe, *words, log=self.folder / f"{name}.log")
        return {**answer.result, "exit": answer.status, "said": answer.said}

    def show(self, what: str, value: float | None, aim: str = "", **more: Any) -> None:
        """Adds a row."""
        self.table.add(what=what, value=value, aim=aim, **more)


def in_all(found: dict[str, Any]) -> float | None:
    """Tokens a second of all ranks together."""
    rate: float | None = (found.get("several") or {}).get("tokens_per_second_in_all")
    return rate


def peaks(found: dict[str, Any]) -> str:
    """GiB at the peak of the rank that needed most, and as predicted."""
    most = max((found.get("several") or {}).get("peak_memory_bytes_of_each") or [found.get("peak_memory_bytes") or 0])
    predicted = found.get("predicted_allocated_bytes") or found.get("predicted_peak_bytes") or 0
    return f"{most / GIB:.2f} GiB ({predicted / GIB:.2f} predicted), exit {found['exit']}"


def ddp(host: Host) -> None:
    """Training with adapters: all GPUs together over as many times one of them alone, which is measured first."""
    one = host.bench("ddp-one", "llama3.1-8b")
    together = host.bench("ddp-all", "llama3.1-8b", *host.ranks)
    alone, all_ = one.get("tokens_per_second"), in_all(together)
    share = None if alone is None or all_ is None else all_ / host.gpus / alone
    host.show("8B LoRA, ddp: share of as many single GPUs", share, "0.97", note=peaks(together), found=[one, together])
    host.show("8B LoRA, ddp: tokens/s in all", all_)


def full(host: Host) -> None:
    """Full fine-tuning with the weights sharded over the GPUs."""
    found = host.bench("full", "llama3.1-8b", *settings("lora=null", "launch.engine=fsdp"), *host.ranks)
    _each(host, "8B full, fsdp: tokens/s a GPU", found, "8,200")


def seventy(host: Host) -> None:
    """Adapters on a 70B base in NF4, sharded over the GPUs, every layer checkpointed."""
    changes = ["train.gradient_checkpointing=true", "launch.engine=fsdp"]
    changes += ["quantization.method=nf4"] if host.tiny else []
    found = host.bench("70b", "llama3.1-70b-qlora", *settings(*changes), *host.ranks)
    _each(host, "70B NF4, fsdp: tokens/s a GPU", found, "1,200")


def experts(host: Host) -> None:
    """Adapters on attention and every expert of Qwen3-30B-A3B, sharded over the GPUs."""
    found = host.bench("experts", "qwen3-30b-a3b", *settings("launch.engine=fsdp"), *host.ranks)
    _each(host, "Qwen3-30B-A3B LoRA, fsdp: tokens/s a GPU", found, "")


def full9(host: Host) -> None:
    """Full fine-tuning of Qwen3.5-9B, whose layers are delta nets and attention, sharded over the GPUs."""
    changes = settings("lora=null", "launch.engine=fsdp", "train.optim=adamw_torch_fused")
    found = host.bench("full9", "qwen3.5-9b", *changes, *host.ranks)
    _each(host, "Qwen3.5-9B full, fsdp: tokens/s a GPU", found, "")


#: Qwen3-32B: what its config.json says of the shape.
_32B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600,
    "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151936,
    "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
    "sliding_window": None, "use_sliding_window": False, "dtype": "bfloat16",
}  # fmt: skip


def grpo(host: Host) -> None:
    """Steps of GRPO on a 32B shape, each GPU with a shard of it in training and all of it while it samples."""
    _grpo(host, "grpo", 2, TINY if host.tiny else CASES["bf16"])


def layered(host: Host) -> None:
    """The same where the whole model finds no room: each token gathers layer after layer; completions are short."""
    case = TINY if host.tiny else replace(CASES["bf16"], completion=32)
    _grpo(host, "layered", 1, case, *(() if host.tiny else ("train.memory_budget_gib=90",)))


def _grpo(host: Host, name: str, count: int, case: Case, *more: str) -> None:
    changes = ["launch.engine=fsdp", *more]
    if not host.tiny:
        shape = host.folder / "qwen3-32b"
        shape.mkdir(exist_ok=True)
        (shape / "config.json").write_text(json.dumps(_32B))
        changes += [f"model.name_or_path={shape}", "model.dtype=bfloat16"]
    rows = host.folder / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "7"}\n' * 64)
    asked = (*case.settings(rows, count, host.gpus), *changes)
    words = ["check", str(case.recipe), "--json", "--offline", *settings(*asked), *host.ranks]
    check = ftcli(words, log=host.folder / f"{name}-check.log").result
    predicted = (check.get("memory") or {}).get("allocated_bytes") or 0
    steps = Table({"step": "", "rollout": ".2f", "log_probs": ".2f", "training": ".2f", "peak GiB": ".2f", "note": ""})
    measure("32B", case, count, host.gpus, changes, steps, host.folder / f"{name}.log")
    last = steps.rows[-1]
    taken = (last.get("metrics") or {}).get("step_time")
    note = f"{last.get('peak GiB') or 0:.2f} GiB ({predicted / GIB:.2f} predicted), {last.get('note', '')}"
    host.show(f"32B GRPO, fsdp ({name}): seconds of a step", taken, "", note=note, found=steps.rows)


def vision(host: Host) -> None:
    """Rows with images on all GPUs over as many times one of them alone."""
    rates = []
    for gpus in (host.gpus, 1):
        out = host.folder / f"vision-{gpus}.json"
        words = ["--only", "ours", "--gpus", str(gpus), "--steps", str(host.steps), "--json", str(out)]
        words += ["--device", "cpu"] if host.tiny else []
        script = str(Path(__file__).with_name("vision.py"))
        subprocess.run([sys.executable, script, *words, "--log", str(out.with_suffix(".log"))], check=False)  # noqa: S603
        row = json.loads(out.read_text())["rows"][0] if out.exists() else {}
        rates.append(row.get("tokens/s"))
        note = f"{row.get('peak GiB') or 0:.2f} GiB {row.get('note', '')}"
        host.show(f"Qwen3-VL-8B LoRA on {gpus}: tokens/s in all", rates[-1], note=note, found=row)
    share = rates[0] / host.gpus / rates[1] if rates[0] and rates[1] else None
    host.show("Qwen3-VL-8B LoRA, ddp: share of as many single GPUs", share, "0.97")


def _each(host: Host, what: str, found: dict[str, Any], aim: str) -> None:
    rate = in_all(found)
    host.show(what, None if rate is None else rate / host.gpus, aim, note=peaks(found), found=found)


def preference(host: Host) -> None:
    """DPO on all GPUs over as many times one of them alone, KTO and reward models as a share of each alone, DPO beside
    supervised fine-tuning where weights are sharded, and on rows that all GPUs share.
    """

    def on(name: str, method: str, *changes: str, ranks: Sequence[str] = host.ranks) -> dict[str, Any]:
        shape = {"sft": _ROWS, "kto": _LABELLED}.get(method, _PAIRS)
        recipe, tiny = ("llama3.1-8b", "smoke") if method == "sft" else ("llama3.1-8b-dpo", f"smoke-{method}")
        changes = (f"train.method={method}", *(("preference=null",) if method == "reward" else ()), *changes)
        return host.bench(f"{name}-{method}", recipe, *settings(*changes), *ranks, shape=shape, tiny=tiny)

    one, together = on("one", "dpo", ranks=()), on("ddp", "dpo")
    alone, all_ = one.get("tokens_per_second"), in_all(together)
    share = None if alone is None or all_ is None else all_ / host.gpus / alone
    host.show("8B DPO, ddp: share of as many single GPUs", share, "0.98", note=peaks(together), found=[one, together])
    for method in ("kto", "reward"):
        found = on("ddp", method)
        apart = (found.get("several") or {}).get("tokens_per_second_of_each_alone")
        rate = in_all(found)
        share = rate / sum(apart) if rate and apart else None
        host.show(f"8B {method}, ddp: share of each alone", share, "0.98", note=peaks(found), found=found)
    for what, changes in (("LoRA", ()), ("full", ("lora=null",))):
        for method in ("sft", "dpo"):  # the reference's numbers are there before the first step
            ahead = ("preference.reference_cache=./ahead",) if method == "dpo" else ()
            found = on(f"fsdp-{what}", method, "launch.engine=fsdp", *changes, *ahead)
            _each(host, f"8B {what} {method}, fsdp: tokens/s a GPU", found, "within 10% of sft's")
    found = on("context", "dpo", f"launch.context_parallel_size={host.gpus}")
    _each(host, f"8B DPO on rows that {host.gpus} share: tokens/s a GPU", found, "")


def context(host: Host) -> None:
    """One row of --length tokens a step on one GPU, and shared by all."""
    policy = ("train.gradient_checkpointing=true", "data.packing=false")
    length = "64" if host.tiny else str(host.length)
    words = ["--batch", "1", "--seq", length, "--steps", str(host.steps)]
    words += settings("model.kernels=reference") if host.tiny else []
    for ranks in (1, host.gpus):
        changes = settings(*policy, f"launch.context_parallel_size={ranks}", f"launch.num_processes={ranks}")
        recipe, log = "smoke" if host.tiny else "llama3.1-8b-qlora", host.folder / f"context-{ranks}.log"
        answer = bench(recipe, *words, *changes, log=log)
        found = {**answer.result, "exit": answer.status}
        rate = in_all(found) or found.get("tokens_per_second")
        host.show(f"a row of {length} tokens on {ranks}: tokens/s", rate, note=peaks(found), found=found)


def rollouts(host: Host) -> None:
    """Completions: an engine on each GPU at the same time, over as many times one of them alone."""
    alone, together = _generate(host, [0]), _generate(host, list(range(host.gpus)))
    whole = alone and len(together) == host.gpus
    share = sum(together) / (host.gpus * alone[0]) if whole else None
    host.show("rollouts: share of as many single GPUs", share, "0.95", found=[alone, together])


def _generate(host: Host, gpus: Sequence[int]) -> list[float]:
    """Tokens a second of each GPU, prompts included."""
    script, running = str(Path(__file__).with_name("generation.py")), []
    for gpu in gpus:
        out = host.folder / f"rollouts-{gpu}-of-{len(gpus)}.json"
        words = ["--device", "cpu"] if host.tiny else ["--cases", "merged", "--batches", str(_ROLLOUTS)]
        command = [sys.executable, script, *words, "--json", str(out)]
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
        log = out.with_suffix(".log").open("wb")
        running.append((subprocess.Popen(command, env=env, stdout=log, stderr=log), out))  # noqa: S603
    done = [(process.wait(), out) for process, out in running]
    rows = [json.loads(out.read_text())["rows"][0] for status, out in done if status == 0]
    return [float(row["tokens/s"]) for row in rows]


class Run:
    """A run of `ftcli train` on random weights whose output is read as it comes."""

    def __init__(self, host: Host, name: str, to: str, steps: int, *words: str) -> None:
        self.began = time.perf_counter()
        self.log = host.folder / f"{name}.log"
        recipe = RECIPES / ("smoke.yaml" if host.tiny else "llama3.1-8b.yaml")
        changes = (*UNTRAINED, *_SMALL, "eval.tasks=[]", *(() if host.tiny else ("data.max_seq_len=512",)))
        given = ["--offline", "--resume", "auto", "--output-dir", str(host.folder / to), "--max-steps", str(steps)]
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "ftcli", "train", str(recipe), *settings(*changes), *given, *words]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603

    def until(self, word: str, seconds: float = 240.0) -> float | None:
        """Seconds since the start until ``word`` is printed; None when it never is."""
        while time.perf_counter() - self.began < seconds:
            if word in self.log.read_text(errors="replace"):
                return time.perf_counter() - self.began
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        return None

    def rank(self, number: int) -> int | None:
        """The pid of a rank."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                child = f"PPid:\t{self.process.pid}\n" in (folder / "status").read_text()
                if child and f"RANK={number}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    return int(folder.name)
        return None

    def ended(self, seconds: float = 240.0) -> dict[str, Any]:
        """Exit status, seconds until then, and the last message."""
        began = time.perf_counter()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
        said = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        return {"exit": self.process.wait(), "seconds": time.perf_counter() - began, "said": "".join(said)[:120]}


def resume(host: Host) -> None:
    """Seconds to the first step on one GPU and on all; a run that is preempted goes on with half of the GPUs."""
    one = Run(host, "start-one", "one", 2)
    alone = one.until("train 1/")
    one.ended()
    begun = Run(host, "preempted", "preempted", 24 if host.tiny else 60, *host.ranks)
    first = begun.until("train 1/")
    host.show("seconds to the first step on one GPU", alone)
    host.show("seconds to the first step on all", first, "at most 5 more")
    begun.until("train 4/")
    begun.process.send_signal(signal.SIGTERM)
    stopped = begun.ended()
    host.show("exit of the run that SIGTERM ended", stopped["exit"], "75", note=f"{stopped['seconds']:.1f} s")
    fewer = max(1, host.gpus // 2)
    words = () if fewer == 1 else ("--gpus", str(fewer))
    ended = Run(host, "resumed", "preempted", 24 if host.tiny else 60, *words).ended()
    host.show(f"exit of the run that resumed it on {fewer}", ended["exit"], "0", note=ended["said"])


def killed(host: Host) -> None:
    """Kills rank 1 of a run and looks how the run ends."""
    run = Run(host, "killed", "killed", 4000, *host.ranks)
    run.until("train 5/")
    pid = run.rank(1)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    ended = run.ended(90)
    note = ended["said"] if pid is not None else "rank 1 was not found"
    host.show("exit of a run whose rank 1 was killed", ended["exit"], "75", note=f"{ended['seconds']:.1f} s: {note}")


PARTS: dict[str, Callable[[Host], None]] = {
    "ddp": ddp,
    "full": full,
    "70b": seventy,
    "experts": experts,
    "full9": full9,
    "grpo": grpo,
    "layered": layered,
    "vision": vision,
    "preference": preference,
    "context": context,
    "rollouts": rollouts,
    "resume": resume,
    "killed": killed,
}


def main() -> None:
    """Measures part after part; what fails has a row without a value, and FOLDER says why."""
    arguments = parser(__doc__)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--gpus", type=int, default=2)
    arguments.add_argument("--only", default=",".join(PARTS))
    arguments.add_argument("--steps", type=int, default=4)
    arguments.add_argument("--length", type=int, default=32768, help="tokens of a row that GPUs share")
    options = arguments.parse_args()
    require_device(options.device)
    names = options.only.split(",")
    if unknown := set(names) - set(PARTS):
        arguments.error(f"no such parts: {sorted(unknown)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    table = Table({"what": "", "value": ",.4g", "aim": "", "note": ""})
    tiny = options.device == "cpu"
    folder = options.folder.absolute()
    host = Host(folder, 2 if tiny else options.gpus, options.steps, options.length, tiny, table)
    for name in names:
        PARTS[name](host)
        table.save(options.json)


if __name__ == "__main__":
    main()
