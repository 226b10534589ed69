"""What the drills of tests/e2e/test_resilience_*.py share: recipes, runs, and what is compared between runs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from tests.e2e.conftest import NARROW, recipe_of
from tests.e2e.drill import Drill, Server

#: What depends on the clock and on the machine's memory, and on nothing else.
TIMED = ("tokens_per_second", "peak_memory_bytes", "step_time", "seconds/", "throughput/")
STEP = "ftcli.methods.sft.train:SftObjective.loss"
SAVE = "ftcli.train.loop:save_weights"
SAVE_RESULT = "ftcli.model.trained_weights:save_weights"
EVALUATE = "ftcli.evaluate.suite:Evaluator.loss"

#: In recipes of drills that ask nothing of evaluation, which would take a fifth of their time.
NO_EVAL: dict[str, Any] = {"data": {"eval": []}}

Preparation = tuple[Any, ...]


@dataclass(frozen=True)
class Drills:
    """Runs `ftcli train` in ``folder``."""

    folder: Path
    server: Server

    def recipe(self, name: str, **change: Any) -> str:
        """Writes a recipe whose run directory is ``<folder>/<name>``; returns its path."""
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(recipe_of(NARROW, self.folder / name, change)), encoding="utf-8")
        return str(path)

    def whole(self, command: str = "train", **change: Any) -> Path:
        """The directory of a run of this recipe that nothing has disturbed; it is made once for all tests."""
        key = json.dumps([command, change], sort_keys=True)
        if key not in self.server.references:
            folder = Path(self.server.socket).parent / f"whole-{len(self.server.references)}"
            folder.mkdir()
            recipe = Drills(folder, self.server).recipe("whole", **change)
            words, environment = (command, recipe, "--offline"), {"FTCLI_CACHE": self.server.cache}
            drill = self.server.start(*words, cwd=folder, environment=environment)
            assert drill.wait() == 0, drill.said
            assert "Traceback" not in drill.said
            self.server.references[key] = folder / "whole"
        return self.server.references[key]

    def start(self, recipe: str, *words: str, prepared: tuple[Preparation, ...] = (), command: str = "train") -> Drill:
        """Starts training."""
        return self.server.start(command, recipe, "--offline", *words, cwd=self.folder, preparations=prepared)

    def run(
        self,
        recipe: str,
        *words: str,
        status: int = 0,
        prepared: tuple[Preparation, ...] = (),
        command: str = "train",
    ) -> str:
        """Trains and returns what was printed; it has to end with ``status``."""
        drill = self.start(recipe, *words, prepared=prepared, command=command)
        assert drill.wait() == status, drill.said
        assert "Traceback" not in drill.said
        return drill.said

    def paused(
        self,
        recipe: str,
        target: str,
        call: int = 1,
        *,
        also: tuple[Preparation, ...] = (),
        command: str = "train",
    ) -> Drill:
        """Trains up to a pause in the ``call``-th call of ``target``."""
        drill = self.start(recipe, prepared=(("pause", target, call), *also), command=command)
        drill.until_reached()
        return drill

    def stopped(self, recipe: str, target: str, call: int, number: int, status: int) -> str:
        """Trains, sends a signal in the ``call``-th call of ``target``, and returns what was printed."""
        drill = self.paused(recipe, target, call)
        drill.signal(number)
        drill.release()
        assert drill.wait() == status, drill.said
        assert "Traceback" not in drill.said
        return drill.said

    def status(self, name: str | Path) -> dict[str, Any]:
        """A run's status.json."""
        found: dict[str, Any] = json.loads((self.folder / name / "status.json").read_text())
        return found

    def metrics(self, name: str | Path) -> list[dict[str, Any]]:
        """A run's metrics without what the clock decides."""
        lines = [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in line.items() if not key.startswith(TIMED)} for line in lines]

    def checkpoints(self, name: str | Path) -> list[str]:
        """Names in a run's checkpoints/."""
        return sorted(entry.name for entry in (self.folder / name / "checkpoints").iterdir())

    def require_same_run(self, name: str, other: Path) -> None:
        """Result, metrics and the last checkpoint are equal to the last bit."""
        assert self.metrics(name) == self.metrics(other)
        for result in ("adapter", "model"):
            if (other / result).is_dir():
                require_same_weights(self.folder / name / result, other / result)
        last = self.checkpoints(other)[-1]
        require_same_checkpoint(*(self.folder / run / "checkpoints" / last for run in (name, other)))


def require_same_weights(folder: Path, other: Path) -> None:
    """All tensors of two folders' safetensors are equal to the last bit."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert names
    assert names == sorted(path.name for path in other.glob("*.safetensors"))
    for name in names:
        require_equal(load_file(folder / name), load_file(other / name), name)


def require_same_checkpoint(folder: Path, other: Path) -> None:
    """Parameters, optimizer, schedule, random states and progress are equal to the last bit."""
    require_same_weights(folder, other)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        require_equal(*(torch.load(path / name, weights_only=False) for path in (folder, other)), name)
    for name in ("trainer_state.json", "ftcli_state.json"):
        states = [json.loads((path / name).read_text()) for path in (folder, other)]
        if any(state.get("evaluation_due") for state in states):  # saved by a stop, and evaluated by who resumed
            states = [{k: v for k, v in each.items() if k not in ("evaluation_due", "best")} for each in states]
        for state in states:
            state.pop("seconds", None)
            gathered = state.get("extra", {}).get("metrics", {})
            for name in [name for name in gathered if name.startswith(TIMED)]:
                del gathered[name]
            state.pop("log_history", None)  # transformers' own, which begins anew in each process
        assert states[0] == states[1], name


def require_equal(one: Any, two: Any, where: str) -> None:
    """Deep equality, of tensors and arrays to the last bit."""
    assert type(one) is type(two), where
    if isinstance(one, dict):
        assert list(one) == list(two), where
        for key in one:
            require_equal(one[key], two[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(two), where
        for index, (a, b) in enumerate(zip(one, two, strict=True)):
            require_equal(a, b, f"{where}[{index}]")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == two.dtype, where
        assert torch.equal(one, two), where
    elif hasattr(one, "tobytes"):
        assert one.tobytes() == two.tobytes(), where
    else:
        assert one == two, where


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """A disk of its own on ``folder``: memory that the system lends. Raises OSError where it may not be mounted."""
    _mount("-t", "tmpfs", "-o", f"size={megabytes}m", "ftcli-drill", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing can be written into ``folder``; for the superuser, whom permissions do not stop, by a mount over it.

    Raises OSError where that may not be made.
    """
    if os.geteuid() != 0:
        folder.chmod(0o555)
        try:
            yield
        finally:
            folder.chmod(0o755)
        return
    _mount("-t", "tmpfs", "-o", "ro", "ftcli-drill", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(done.stderr.strip())
