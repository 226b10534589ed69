"""An engine: one model, its key-value cache, and the rows that are decoded together."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from ftkernels.sampling import GREEDY, Sampling

from ftcli.facts.generation import EngineLayout, pages_of
from ftcli.facts.precision import DtypePlan
from ftcli.generation.cache import Cache
from ftcli.generation.decoding import DecodeBatch
from ftcli.generation.forward import Forward, cache_dtype, cache_shape
from ftcli.generation.graphs import Stepper
from ftcli.generation.pages import PagePool
from ftcli.generation.requests import Completion, GenerationRequest, StopConditions, Token, collected
from ftcli.generation.scheduler import Scheduler, SchedulerParts
from ftcli.generation.stopping import StopCheck

#: Steps that a GPU is given before the host looks at the first one's tokens. For a row that has ended, so many more are
#: computed and thrown away.
AHEAD = 4


class Engine:
    """Generates with one model, whose weights may change in place between runs.

    Args:
        layout: Rows and pages that there is room for (:func:`ftcli.facts.generation.choose_layout`).
        longest: Most tokens of a sequence, prompt and completion.
        graphs: Decode by CUDA graphs where there is a GPU.
        ahead: As ``AHEAD``; less for someone who waits for each token.
    """

    def __init__(
        self,
        forward: Forward,
        layout: EngineLayout,
        longest: int,
        plan: DtypePlan,
        device: torch.device,
        *,
        graphs: bool = True,
        ahead: int = AHEAD,
    ) -> None:
        dtype = cache_dtype(forward.model, plan)
        on_gpu = device.type == "cuda"
        cache = Cache(cache_shape(forward.model, dtype), layout.pages, dtype, device)
        batch = DecodeBatch(layout.rows, pages_of(longest), device)
        self.layout = layout
        self.stepper = Stepper(forward, cache, batch, graphs=graphs and on_gpu)
        self._longest = longest
        self._tools = SchedulerParts(
            forward, cache, PagePool(layout.pages), batch, self.stepper, layout.rows, device, ahead if on_gpu else 0
        )

    def complete(
        self, requests: Sequence[GenerationRequest], sampling: Sampling = GREEDY, stopping: StopCheck | None = None
    ) -> list[list[Completion]]:
        """The completions of each request, in the order of its seeds. Raises as :meth:`run`."""
        return collected(requests, self.run(requests, sampling, stopping))

    def run(
        self, requests: Sequence[GenerationRequest], sampling: Sampling = GREEDY, stopping: StopCheck | None = None
    ) -> Generator[Token, None, None]:
        """Tokens as they come, those of one completion in order. Closing the iterator ends generation.

        Raises:
            NotFinite: the model's logits are not finite.
            ValueError: a request has more tokens than a sequence of this engine.
        """
        for request in requests:
            if len(request.prompt) + request.limit > self._longest:
                raise ValueError(f"{len(request.prompt)} + {request.limit} tokens do not fit {self._longest}")
        with self._tools.forward.generating():
            scheduler = Scheduler(self._tools, requests, sampling, stopping or StopCheck(StopConditions(), None))
            yield from scheduler.tokens()
