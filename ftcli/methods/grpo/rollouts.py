"""Completions that methods train on: sampled by the engine with the weights of now, gathered from all ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from io import BytesIO
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from ftkernels.sampling import Sampling, row_seed
from torch import Tensor

from ftcli.data.tokens import Ints
from ftcli.errors import ExitCode, FtcliError
from ftcli.facts.generation import MOST_ROWS, MOST_WAITING
from ftcli.generation.generator import Completer, OpenedGenerator, generating, open_generator
from ftcli.generation.requests import (
    Completion,
    GenerationRequest,
    NotFinite,
    PromptImages,
    StopCheck,
    StopConditions,
    Turns,
)
from ftcli.job import Job
from ftcli.methods.grpo.spans import Spans
from ftcli.model.backbone import compute_context, root_of
from ftcli.model.gradient_checkpointing import without_checkpointing
from ftcli.plain import JsonObject
from ftcli.plan.memory.terms import FORWARD, GENERATION
from ftcli.run.metrics import MetricsLine
from ftcli.run.process_group import gather_bytes, gather_json
from ftcli.train.loop import Objective

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.methods.distill.settings import DistillConfig
    from ftcli.methods.grpo.served import ServedGenerator
    from ftcli.methods.grpo.settings import GrpoConfig
    from ftcli.run.process_group import RankGroup
    from ftcli.train.loop import StepMonitor

    DrawnBy: TypeAlias = GrpoConfig | DistillConfig


class SampledObjective(Objective):
    """An objective over completions of prompts: which prompts a step completes, its clock, and what is averaged from
    one line of metrics to the next.

    Args:
        prompts, at_once: How many there are, and how many are completed together.
    """

    def __init__(self, job: Job, prompts: int, at_once: int, spans: Spans, group: RankGroup | None) -> None:
        self._job, self._spans, self._group = job, spans, group
        self._rank, self._ranks = (0, 1) if group is None else (group.rank, group.size)
        self._prompts, self._at_once = prompts, at_once
        self._metrics: defaultdict[str, list[float]] = defaultdict(list)
        self._metrics_before: dict[str, list[float]] = {}

    def prompts_of(self, rollout: int) -> list[int]:
        """The prompts that are completed together, in an order of each epoch; what does not fill up is left out."""
        epoch, chunk = divmod(rollout, self._prompts // self._at_once)
        generator = torch.Generator().manual_seed(self._job.recipe.run.seed)
        for _ in range(epoch + 1):
            order = torch.randperm(self._prompts, generator=generator)
        found: list[int] = order[chunk * self._at_once : (chunk + 1) * self._at_once].tolist()
        return found

    def begin(self, step: int) -> None:
        """Notes the metrics gathered so far."""
        self._spans.begin_step(step + 1)
        self._metrics_before = {name: list(values) for name, values in self._metrics.items()}

    def undo(self, step: int) -> None:
        """Restores them."""
        self._spans.forget_after(step)
        self._metrics.clear()
        self._metrics.update({name: list(values) for name, values in self._metrics_before.items()})

    def end(self, step: int) -> None:
        """Nothing of the step is left to be timed."""
        self._spans.enter(None)

    def metrics(self) -> MetricsLine:
        """The mean of each number since the last line, None where there is none."""
        self._take_spans()
        known = {name: [one for one in values if not math.isnan(one)] for name, values in self._metrics.items()}
        self._metrics.clear()
        return {name: sum(values) / len(values) if values else None for name, values in known.items()}

    def metrics_state(self) -> dict[str, list[float]]:
        """All that is averaged, for a checkpoint."""
        self._take_spans()
        return {name: [float(one) for one in values] for name, values in self._metrics.items()}

    def restore_metrics(self, state: Mapping[str, Sequence[float]]) -> None:
        """Resumes with what :meth:`metrics_state` gave."""
        self._metrics.update({name: list(values) for name, values in state.items()})

    def _take_spans(self) -> None:
        """Adds the time of each finished step to what is averaged."""
        for numbers in self._spans.take():
            for name, value in numbers.items():
                self._metrics[name].append(value)


@contextmanager
def sampling(job: Job, model: PreTrainedModel | PeftModel, step: int, monitor: StepMonitor) -> Iterator[None]:
    """A block in which completions of a step are sampled; random numbers that it draws leave training's as they were.

    Raises FtcliError FT702 (exit 6) where the model's logits are not finite.
    """
    monitor.enter(GENERATION)
    monitor.check_finite()  # sampling waits for the device anyway, and would fail on what came of it
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            without_checkpointing(model),
            compute_context(job.device, job.dtypes.compute, job.dtypes.autocast),
        ):
            yield
    except NotFinite as error:
        raise FtcliError.single(
            "FT702",
            f"the model's logits are not finite when completions of step {step + 1} are sampled: training has diverged",
            exit_code=ExitCode.DIVERGED,
            help="lower train.learning_rate, add train.warmup_steps, or lower train.max_grad_norm",
        ) from error
    finally:
        monitor.enter(FORWARD)


class Rollouts:
    """Completes prompts for one run.

    What the engine holds stays from one step to the next where the memory estimate leaves room for it while the model
    trains; else it is made anew for each step's completions. Ranks that hold shards of the weights gather all of them
    for a step's completions where there is room, else layer by layer for each token.

    Args:
        served: A server that completes them in place of the engine.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        job: Job,
        grpo: DrawnBy,
        group: RankGroup | None = None,
        served: ServedGenerator | None = None,
    ) -> None:
        #: Completions of a later step, on their way; and whether the last ones were sampled by earlier weights.
        self._ahead: dict[int, Future[list[list[Completion]]]] = {}
        self.stale, self._served = False, served
        self._model, self._group = model, group
        self._job = job
        self._grpo = grpo
        #: What ends a completion.
        self.stopping = StopCheck(
            StopConditions(frozenset(job.stops), grpo.stop_strings), job.tokenizer if grpo.stop_strings else None
        )
        self._opened: OpenedGenerator | None = None
        self._told = False
        self._step = -1
        self._in_step = 0

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        step: int,
        own: slice | Sequence[int] | None = None,
        turns: Callable[[Mapping[tuple[int, int], int]], Turns] | None = None,
        shown: Sequence[PromptImages | None] = (),
    ) -> list[Completion]:
        """One completion for each of the ``own`` prompts, all of them where it is None, its stop token included. Equal
        neighbours are computed once. All ranks call this.

        Args:
            prompts: All of the step: what is drawn for one does not depend on who draws it.
            step: Of training; with the run's seed and the row's place it decides what is drawn.
            turns: Gives what has them go on where a turn has ended, for the place of each completion among the own ones
                by its request and number; None: they have one turn.
            shown: What each of ``prompts`` shows; empty where none does.

        Raises NotFinite: the model's logits are not finite.
        """
        self._in_step = self._in_step + 1 if step == self._step else 0
        self._step = step
        requests = self._requests(prompts, step, self._in_step, own, shown)
        mine = sum(len(one.seeds) for one in requests)
        if self._served is not None:
            return self._by_server(self._served, requests, turns)
        memory = self._job.report.memory

        def completed(model: PreTrainedModel | PeftModel) -> list[Completion]:
            waiting = 0 if turns is None else min(max(mine - MOST_ROWS, 0), MOST_WAITING)
            return self._completed(self._open(model, min(mine, MOST_ROWS), waiting).generator, requests, turns)

        whole = memory is not None and memory.generator == "whole"
        dtype = getattr(torch, self._job.dtypes.compute) if self._job.device.type == "cuda" else None
        compute = completed if mine else None
        return generating(self._group, self._model, compute, whole=whole, merged_in=dtype) or []

    def _requests(
        self,
        prompts: Sequence[Sequence[int]],
        step: int,
        in_step: int,
        own: slice | Sequence[int] | None = None,
        shown: Sequence[PromptImages | None] = (),
    ) -> list[GenerationRequest]:
        seed, every = self._job.recipe.run.seed, range(len(prompts))
        places = every if own is None else every[own] if isinstance(own, slice) else own
        seeds = iter([row_seed(seed, step, in_step, row) for row in places])
        mine = [(tuple(prompts[row]), shown[row] if shown else None) for row in places]
        limit = self._grpo.max_completion_length
        return [
            GenerationRequest(first[0], limit, tuple(next(seeds) for _ in (first, *same)), first[1])
            for _, same in groupby(mine, key=lambda one: (one[0], id(one[1])))
            for first in [next(same)]
        ]

    # -- a server --------------------------------------------------------------------------------------------

    def begin(self, prompts: Sequence[Sequence[int]], step: int) -> None:
        """Has the server complete the prompts of a later step meanwhile, by the weights of now."""
        assert self._served is not None
        self._served.push(self._model)
        sampling = Sampling(self._grpo.temperature)
        self._ahead = {step: self._served.later(self._requests(prompts, step, 0), sampling, self.stopping)}

    def ahead(self) -> dict[int, list[list[JsonObject]]]:
        """Completions of a later step, for a checkpoint; they are waited for, and left out where they have failed."""
        made = {step: one.result() for step, one in self._ahead.items() if one.exception() is None}
        return {step: [[asdict(one) for one in each] for each in every] for step, every in made.items()}

    def restore_ahead(self, state: Mapping[int, Sequence[Sequence[JsonObject]]]) -> None:
        """Goes on with what :meth:`ahead` gave."""
        self._ahead = {step: Future() for step in state}
        for step, made in self._ahead.items():
            made.set_result([[Completion(**one) for one in each] for each in state[step]])

    def _by_server(
        self,
        served: ServedGenerator,
        requests: Sequence[GenerationRequest],
        turns: Callable[[Mapping[tuple[int, int], int]], Turns] | None,
    ) -> list[Completion]:
        if not self._told:
            self._job.reporter.info(served.summary)
            self._told = True
        ahead = None if self._in_step else self._ahead.get(self._step)
        self.stale = ahead is not None
        if ahead is not None:
            return [one for each in ahead.result() for one in each]
        served.push(self._model)
        return self._completed(served, requests, turns)

    def _completed(
        self,
        generator: Completer,
        requests: Sequence[GenerationRequest],
        turns: Callable[[Mapping[tuple[int, int], int]], Turns] | None,
    ) -> list[Completion]:
        sampling = Sampling(self._grpo.temperature, self._grpo.top_k, self._grpo.top_p)
        if turns is None:
            completions = generator.complete(requests, sampling, self.stopping)
        else:
            named = [(number, at) for number, one in enumerate(requests) for at in range(len(one.seeds))]
            acting = turns({where: place for place, where in enumerate(named)})
            completions = generator.converse(requests, sampling, self.stopping, acting)
        return [one for each in completions for one in each]

    def _open(self, model: PreTrainedModel | PeftModel, rows: int, waiting: int) -> OpenedGenerator:
        if self._opened is not None:
            self._opened.refresh()
            return self._opened
        grpo, job, memory = self._grpo, self._job, self._job.report.memory
        held = "each step" if memory is None else memory.generator
        opened = open_generator(
            model,
            job.dtypes,
            job.device,
            rows=rows,
            longest=grpo.max_prompt_length + grpo.max_completion_length,
            pad=job.pad_token_id,
            kernels=job.recipe.model.kernels,
            own_settings=False,  # log-probabilities know nothing of them
            merge=held == "merged",
            waiting=min(waiting, memory.waiting) if memory is not None and held in ("kept", "merged") else waiting,
        )
        if not self._told:
            gathered = "" if root_of(self._model) is None else ", weights gathered layer by layer for each token"
            if model is not self._model:
                gathered = ", all weights gathered once a step"
            job.reporter.info(opened.summary + gathered)
            self._told = True
        if held in ("kept", "merged"):
            self._opened = opened
        return opened


def gather_completions(group: RankGroup | None, mine: Sequence[Completion]) -> list[tuple[list[int], list[float]]]:
    """Tokens of all ranks' completions and what is known of their log-probabilities, in order."""
    found = [(one.tokens, one.logprobs) for one in mine]
    if group is None:
        return found
    return [one for said in gather_bytes(group, "rollouts", _packed(found)) for one in _unpacked(said)]


def gather_rest(group: RankGroup | None, mine: list[Any]) -> list[Any]:
    """What all ranks have to say of their completions, in order."""
    return mine if group is None else [one for said in gather_json(group, "rest of", mine) for one in said]


def gather_rows(group: RankGroup, where: str, mine: Tensor) -> Tensor:
    """All ranks' rows of a float32 matrix, in order, on the device of ``mine``."""
    told = gather_bytes(group, where, mine.cpu().float().contiguous().numpy().tobytes())
    parts = [torch.from_numpy(np.frombuffer(said, np.float32).copy()).view(-1, mine.shape[1]) for said in told]
    return torch.cat(parts).to(mine.device)


def _packed(completions: Sequence[tuple[list[int], list[float]]]) -> bytes:
    """The numbers of tokens and of log-probabilities of each (completions, 2), and all of both."""
    sizes = np.array([[len(each) for each in one] for one in completions], np.int64).reshape(-1, 2)
    tokens = np.array([token for one, _ in completions for token in one], np.int64)
    known = np.array([number for _, one in completions for number in one], np.float64)
    held = BytesIO()
    np.savez(held, sizes=sizes, tokens=tokens, known=known)
    return held.getvalue()


def _unpacked(said: bytes) -> list[tuple[list[int], list[float]]]:
    held = np.load(BytesIO(said))
    sizes: Ints = held["sizes"]
    tokens, known = (np.split(held[name], sizes[:, at].cumsum()) for at, name in enumerate(("tokens", "known")))
    return [(one.tolist(), other.tolist()) for one, other in zip(tokens[:-1], known[:-1], strict=True)]
