"""The process that runs the cases of ``memory.py``, one after the other, and tells what each one's peak was."""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import string
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from memory_cases import Case

from ftcli import pipeline
from ftcli.config.load import LoadedRecipe
from ftcli.data.template import Renderer
from ftcli.facts.device import probe_device
from ftcli.model.tokenizer import load_tokenizer
from ftcli.reporting import Progress, Session, SilentReporter
from ftcli.rows.prompts import prompts_of
from ftcli.rows.row import Row

#: More than this left allocated after a case would be counted in the next one's peak: the process ends instead.
LEFT_BYTES = 8 * 2**20
#: Batches of text for two steps of two micro-batches and for an evaluation; prompts for GRPO's.
_BATCHES, _PROMPTS = {"train": 4, "eval": 1}, {"train": 8, "eval": 8}


class Spans(SilentReporter):
    """Hears when a part of a run begins and ends, and keeps the peaks of each: ``allocated`` and ``reserved`` bytes.

    ``otherwise`` is what lies outside every part: loading, the self-check, saving.
    """

    def __init__(self) -> None:
        self.allocated: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        self._within = ["otherwise"]

    @contextmanager
    def progress(self, total: int | None, description: str) -> Iterator[Progress]:
        """A part of the run."""
        self.note()
        self._within.append("steps" if " steps of " in description else description)
        try:
            with super().progress(total, description) as progress:
                yield progress
        finally:
            self.note()
            self._within.pop()

    def note(self) -> None:
        """Books the peaks since the last call to the part that they fell into."""
        if not torch.cuda.is_available():
            return
        torch.cuda.synchronize()
        part = self._within[-1]
        self.allocated[part] = max(self.allocated.get(part, 0), torch.cuda.max_memory_allocated())
        self.reserved[part] = max(self.reserved.get(part, 0), torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()


def main(connection: Connection, log: Path) -> None:
    """Answers until it is told None, or until an answer says that it does not stay.

    What goes wrong in a case ends the process; ``log`` then says what it was.
    """
    for stream in (1, 2):  # libraries write to both
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), stream)
    # Others use the device at the same time, and none may be refused or planned for what happens to be free.
    connection.send(replace(probe_device(), free_bytes=None))
    while (wanted := connection.recv()) is not None:
        if wanted == "footprint":
            connection.send(footprint())
            continue
        result = run_case(wanted)
        clear()
        stays = torch.cuda.is_available() and torch.cuda.memory_allocated() <= LEFT_BYTES
        connection.send({**result, "stays": stays})
        if not stays:
            return


def run_case(case: Case) -> dict[str, Any]:
    """Peaks in bytes by part of the run, and seconds. Whatever the case raises goes on its way."""
    clear()
    spans, began = Spans(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ftcli-memory-") as scratch:
        _run(case, Path(scratch), Session(reporter=spans, offline=True))
        spans.note()
    seconds = time.perf_counter() - began
    if not torch.cuda.is_available():
        # Of the life of this process, which on a CPU runs one case alone.
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"allocated": {"process": resident}, "reserved": {"process": resident}, "seconds": seconds}
    return {"allocated": spans.allocated, "reserved": spans.reserved, "seconds": seconds}


def _run(case: Case, scratch: Path, session: Session) -> None:
    if case.kind in ("bench", "evaluation"):
        pipeline.bench(case.loaded(device=probe_device()), session, case.options)
        return
    output = f"run.output_dir={scratch / 'run'}"
    write, counts = (write_prompts, _PROMPTS) if case.kind == "grpo" else (write_texts, _BATCHES)
    files = [f"data.{name}=[{write(case.loaded(), scratch / f'{name}.jsonl', n)}]" for name, n in counts.items()]
    command = "grpo" if case.kind == "grpo" else "train"
    pipeline.train(case.loaded(output, *files, device=probe_device()), session, command)


def write_texts(loaded: LoadedRecipe, path: Path, count: int) -> Path:
    """Plain text for ``count`` batches: rows as long as the recipe allows, but for their first and last token."""
    recipe = loaded.recipe
    rows = max(recipe.train.per_device_train_batch_size, recipe.eval.per_device_eval_batch_size)
    lines = [json.dumps({"text": letters(recipe.data.max_seq_len - 2, i)}) for i in range(rows * count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def letters(count: int, seed: int) -> str:
    """Random text: of one letter alone gradients would vanish, and the self-check would compare rounding errors."""
    return "".join(random.Random(seed).choices(string.ascii_lowercase, k=count))


def write_prompts(loaded: LoadedRecipe, path: Path, count: int) -> Path:
    """``count`` prompts; in the recipe's chat template every other one takes ``grpo.max_prompt_length`` tokens, and the
    ones between some less, so that batches are padded as they are in any real run.
    """
    grpo = loaded.recipe.grpo
    assert grpo is not None
    tokenizer = load_tokenizer(loaded.recipe.model, offline=True)
    renderer = Renderer(tokenizer, loaded.recipe.data.chat_template)
    for length in range(grpo.max_prompt_length, 0, -1):
        fields = {"prompt": letters(length, 0), "answer": "7"}
        (prompt,) = prompts_of([Row(str(path), 1, fields)], loaded.recipe.data.format)
        text = renderer.prompt(prompt)
        if len(tokenizer(text, add_special_tokens=False)["input_ids"]) <= grpo.max_prompt_length:
            sizes = [length - length // 4 if i % 2 else length for i in range(count)]
            lines = [json.dumps({**fields, "prompt": letters(size, i)}) for i, size in enumerate(sizes)]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            return path
    raise ValueError(f"the chat template alone takes more than {grpo.max_prompt_length} tokens")


def clear() -> None:
    """Gives everything that a case left behind back to the driver, cuBLAS' workspaces and pinned memory included."""
    gc.collect()
    if not torch.cuda.is_available():
        return
    torch.cuda.synchronize()
    for name in ("_cuda_clearCublasWorkspaces", "_host_emptyCache"):
        if hasattr(torch._C, name):  # private, and what stays is noticed: see LEFT_BYTES
            getattr(torch._C, name)()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def footprint() -> dict[str, int]:
    """Bytes in use on the whole device as the driver counts them, and what this process' allocator holds of them."""
    clear()
    free, total = torch.cuda.mem_get_info()
    return {"used": total - free, "reserved": torch.cuda.memory_reserved()}
