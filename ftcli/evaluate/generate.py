"""Completions of prompts, many at once, in the recipe's chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from ftkernels.sampling import GREEDY, Sampling, row_seed

from ftcli.config.evaluation import GenerateConfig
from ftcli.data.reasoning import Answer, ReasoningMarks
from ftcli.errors import ExitCode, FtcliError
from ftcli.evaluate.batching import halved, row_too_large
from ftcli.evaluate.window import Window
from ftcli.generation.generator import open_generator
from ftcli.generation.requests import Completion, GenerationRequest, NotFinite, StopCheck, StopConditions, cut
from ftcli.model.backbone import base_of
from ftcli.plan.precision import DtypePlan
from ftcli.reporting import Progress, Reporter

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: Of the likeliest tokens so many are sampled from where the model's generation_config does not say: transformers' own.
_TOP_K = 50


def generate(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    config: GenerateConfig,
    *,
    batch_size: int,
    plan: DtypePlan,
    device: torch.device,
    reporter: Reporter,
    stops: Sequence[int],
    max_length: int | None = None,
    marks: ReasoningMarks | None = None,
    templated: Sequence[bool] = (),
) -> list[Answer]:
    """One completion for each prompt text, special tokens removed, in the order given. As :func:`complete`.

    It ends before the first of ``config.stop_strings``.

    Args:
        marks: Tell answers from their reasoning; without them all of it is the answer.
        templated: Whether a template wrote each prompt; empty where one wrote all.

    Raises:
        FtcliError: FT761 (exit 5) when one prompt alone does not fit, FT762 (exit 6) when the model's logits are not
            finite.
    """
    if not prompts:
        return []
    ids: list[list[int]] = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]  # the template wrote them
    stopping = StopCheck(StopConditions(frozenset(stops), config.stop_strings), tokenizer)
    generated = complete(
        model,
        ids,
        config,
        pad=int(tokenizer.pad_token_id),
        batch_size=batch_size,
        plan=plan,
        device=device,
        reporter=reporter,
        stopping=stopping,
        max_length=max_length,
    )
    marks = marks or ReasoningMarks(tokenizer, None)
    answers = []
    for tokens, prompt, by_template in zip(generated, prompts, templated or [True] * len(prompts), strict=True):
        said = marks.split(tokens, prompt, templated=by_template)
        text, ended = cut(said.text, config.stop_strings), bool(tokens) and stopping.stopped(tokens)
        answers.append(replace(said, text=text, cut=not ended))
    return answers


def complete(
    model: PreTrainedModel | PeftModel,
    prompts: Sequence[Sequence[int]],
    config: GenerateConfig,
    *,
    pad: int,
    batch_size: int,
    plan: DtypePlan,
    device: torch.device,
    reporter: Reporter,
    stopping: StopCheck,
    max_length: int | None = None,
) -> list[list[int]]:
    """The tokens of one completion for each prompt, that which ended it among them, in the order given.

    What is sampled depends on torch's random numbers and on the prompt's place among ``prompts``, not on the others.

    Args:
        batch_size: Most rows at once. Where so many do not fit into memory it is halved, with the warning FT764.
        max_length: Most tokens of a prompt and its completion, which ends there; how many did is told. Every prompt is
            shorter. Where ``config.overflow`` is ``sliding`` a completion goes on, and the model sees so many of the
            last tokens.

    Raises:
        FtcliError: FT761 (exit 5) when one prompt alone does not fit, FT762 (exit 6) when the model's logits are not
            finite.
    """
    seed = int(torch.randint(2**62, ())) if config.do_sample else 0
    asked = _Asked(model, plan, device, pad, _sampling(model, config), stopping, reporter)
    window = Window(config.max_new_tokens, max_length, sliding=config.overflow == "sliding")
    generated: list[list[int]] = [[] for _ in prompts]
    going, cut, turn = list(range(len(prompts))), 0, 0

    def request(at: int) -> GenerationRequest:
        seen, limit = window.next([*prompts[at], *generated[at]], len(generated[at]))
        return GenerationRequest(seen, limit, (row_seed(seed + turn, at),))

    with answering(model), reporter.progress(len(prompts), "generating") as progress:
        while going:
            done = _complete(asked, [request(at) for at in going], min(batch_size, len(going)), progress)
            limited = []
            for at, found in zip(going, done, strict=True):
                generated[at] += found.tokens
                if found.ended == "limit" and len(generated[at]) < config.max_new_tokens:
                    limited.append(at)
            going, turn = (limited, turn + 1) if window.slides else ([], turn)
            cut = len(limited)
    if cut and not window.slides:
        reporter.warn(f"{cut:,} of {len(prompts):,} answers were ended by data.max_seq_len {max_length}")
    return generated


@contextmanager
def answering(model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """A block in which ``model`` generates, in evaluation mode.

    Raises FtcliError FT762 (exit 6) when its logits are not finite.
    """
    was_training = model.training
    model.eval()
    try:
        yield
    except NotFinite as error:
        raise FtcliError.single(
            "FT762",
            "the model's logits are not finite, so it has no answers",
            exit_code=ExitCode.DIVERGED,
            help="take an earlier checkpoint (--checkpoint STEP), or train again with a lower train.learning_rate",
        ) from error
    finally:
        if was_training:
            model.train()


@dataclass(frozen=True, slots=True)
class _Asked:
    """Everything about a generation but its prompts."""

    model: PreTrainedModel | PeftModel
    plan: DtypePlan
    device: torch.device
    pad: int
    sampling: Sampling
    stopping: StopCheck
    reporter: Reporter


def _complete(asked: _Asked, requests: Sequence[GenerationRequest], rows: int, progress: Progress) -> list[Completion]:
    """All requests, ``rows`` at once and fewer where they do not fit. Raises FtcliError FT761 when one does not."""
    done: dict[int, Completion] = {}
    while len(done) < len(requests):
        # The longest come first: what does not fit is seen at once.
        left = sorted({*range(len(requests))} - {*done}, key=lambda at: -len(requests[at].prompt))
        if _finished(asked, requests, left, rows, done, progress):
            break
        if rows == 1:
            raise row_too_large("generation", None)
        asked.reporter.finding(halved("generation", rows, rows // 2))
        rows //= 2
        if asked.device.type == "cuda":
            torch.cuda.empty_cache()
    return [done[at] for at in range(len(requests))]


def _finished(
    asked: _Asked,
    requests: Sequence[GenerationRequest],
    left: Sequence[int],
    rows: int,
    done: dict[int, Completion],
    progress: Progress,
) -> bool:
    """Completes the requests that are left; False when memory ran out, with those in ``done`` that were complete."""
    chosen = [requests[at] for at in left]
    longest = max(len(one.prompt) + one.limit for one in chosen)
    found = [Completion() for _ in chosen]
    try:
        # Without a copy of the weights: it may be between two steps of training.
        opened = open_generator(
            asked.model, asked.plan, asked.device, rows=rows, longest=longest, pad=asked.pad, merge=False
        )
        if opened.reason is not None:
            asked.reporter.info(opened.summary)
        for token in opened.generator.run(chosen, asked.sampling, asked.stopping):
            found[token.request].add(token)
            if token.ended is not None:
                done[left[token.request]] = found[token.request]
                progress.advance(1)
    except torch.OutOfMemoryError:
        return False
    return True


def _sampling(model: PreTrainedModel | PeftModel, config: GenerateConfig) -> Sampling:
    """The recipe's temperature; what it does not know is the model's generation_config's."""
    if not config.do_sample:
        return GREEDY
    own = base_of(model).generation_config
    top_k, top_p, min_p = (getattr(own, name, None) for name in ("top_k", "top_p", "min_p"))
    return Sampling(config.temperature, _TOP_K if top_k is None else top_k, top_p or 1.0, min_p or 0.0)
