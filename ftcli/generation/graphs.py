"""Decoding steps as CUDA graphs: one for each number of rows that steps are made with, and each way to sample.

A step of few tokens is bound by the host, which would launch hundreds of small kernels; a graph launches them at once.
The first steps of a size run as usual, which compiles and chooses whatever is chosen on first use; then one is
captured. All graphs share one pool of memory: they never run at the same time, and their results lie outside of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from ftkernels.sampling import Sampling

from ftcli.generation.cache import Cache
from ftcli.generation.decoding import DecodeBatch
from ftcli.generation.forward import Forward

#: Steps of a size and sampling that run as usual before one is captured.
_BEFORE = 2


@dataclass(slots=True)
class StepStatus:
    """What became of the graphs of an engine: sizes captured, steps by graphs and without, why they were given up."""

    sizes: list[int] = field(default_factory=list)
    replays: int = 0
    without: int = 0
    stopped: str | None = None


class Stepper:
    """Runs the steps of a batch, by graphs where ``graphs``."""

    def __init__(self, forward: Forward, cache: Cache, batch: DecodeBatch, *, graphs: bool) -> None:
        self.status = StepStatus(stopped=None if graphs else "CUDA graphs need a GPU")
        self._forward = forward
        self._cache = cache
        self._batch = batch
        self._pool: Any = None
        self._before: dict[tuple[int, Sampling], int] = {}
        self._graphs: dict[tuple[int, Sampling], torch.cuda.CUDAGraph] = {}

    def step(self, sampling: Sampling) -> None:
        """One token of each row of the batch."""
        key = (self._batch.size, sampling)
        graph = self._graphs.get(key) or self._captured(key)
        if graph is None:
            self.status.without += 1
            self._run(key)
        else:
            self.status.replays += 1
            graph.replay()

    def _run(self, key: tuple[int, Sampling]) -> None:
        size, sampling = key
        longest = self._batch.longest if self._pool is None else None
        self._batch.step(self._forward, self._cache, sampling, size, longest)

    def _captured(self, key: tuple[int, Sampling]) -> torch.cuda.CUDAGraph | None:
        """A graph of steps like this one; None where it runs as usual. Capturing does not run anything."""
        if self.status.stopped is not None:
            return None
        self._before[key] = self._before.get(key, 0) + 1
        if self._before[key] <= _BEFORE:
            return None
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._run(key)
        except torch.OutOfMemoryError:
            self.give_up("no memory was left for another CUDA graph")
            return None
        self._graphs[key] = graph
        self.status.sizes.append(key[0])
        return graph

    def give_up(self, reason: str) -> None:
        """Frees what graphs keep to themselves; steps go on without them."""
        self.status.stopped = reason
        self._graphs.clear()
        self._pool = None
        torch.cuda.empty_cache()
