"""Answers of `ftcli sample`: drawn by the engine, judged, and kept in files that grow by groups of prompts.

What is there already is not done again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from ftkernels.sampling import Sampling, row_seed

from ftcli.config.evaluation import RewardConfig, TaskConfig
from ftcli.config.recipe import Recipe
from ftcli.data.asked import RenderedPrompt
from ftcli.data.reasoning import Answer
from ftcli.errors import Finding, FtcliError
from ftcli.evaluate.generate import answering
from ftcli.evaluate.loss import row_too_large
from ftcli.facts.generation import MOST_ROWS
from ftcli.generation.generator import OpenedGenerator, open_generator
from ftcli.generation.requests import Completion, GenerationRequest, StopCheck, StopConditions, cut
from ftcli.job import Job
from ftcli.judges import (
    CALLED_WITH,
    NO_ACCESS,
    JudgeAccess,
    columns_of,
    files_of,
    judge_name,
    judging_tasks,
    open_judge,
)
from ftcli.methods.grpo.rewards import Reward, RewardFailures, build_rewards
from ftcli.pipeline.chatting import model_that_answers
from ftcli.plain import JsonMap, JsonObject, is_number, plain_fields
from ftcli.reporting import Progress, Reporter
from ftcli.run.directory import RunDirectory
from ftcli.run.inputs import fingerprint
from ftcli.run.samples import ANSWERS, GROUP_ANSWERS, SCORES, GroupLog, SampleFolder, key_of
from ftcli.tables import judges

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Drawing:
    """All settings of a drawing: the same values and the same model give the same answers. ``top_k`` 0 and ``top_p`` 1
    are off; a prompt and its answer have at most ``max_length`` tokens.
    """

    num_generations: int
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_strings: tuple[str, ...]
    seed: int
    max_length: int


@dataclass(frozen=True, slots=True)
class DrawnAnswer:
    """One answer, and the ``whole`` of it as it was generated: reasoning and special tokens included, without the
    last.
    """

    said: Answer
    whole: str
    tokens: int


class Sampler:
    """Draws answers of one model to ``prompts``.

    What is drawn for a prompt depends on its place and on the prompts that are drawn with it, which share its batches.
    """

    def __init__(
        self, model: PreTrainedModel | PeftModel, job: Job, drawing: Drawing, prompts: Sequence[RenderedPrompt]
    ) -> None:
        self._model = model
        self._job = job
        self._drawing = drawing
        self._prompts = prompts
        self._ids: list[list[int]] = job.tokenizer([one.text for one in prompts], add_special_tokens=False)["input_ids"]
        self._sampling = Sampling(drawing.temperature, drawing.top_k, drawing.top_p)
        self._stopping = StopCheck(StopConditions(frozenset(job.stops), drawing.stop_strings), job.tokenizer)
        self._marks = job.reasoning_marks
        # A CPU does not say how much memory the cache may take.
        own = job.recipe.eval.per_device_eval_batch_size
        self._rows = min(MOST_ROWS, own) if job.device.type == "cpu" else MOST_ROWS
        self._opened: OpenedGenerator | None = None

    def draw(self, places: Sequence[int], progress: Progress) -> list[list[DrawnAnswer]]:
        """The answers to the prompts at ``places``; ``progress`` counts answers.

        Raises FtcliError FT761 (exit 5) when one answer alone does not fit into memory (where fewer rows at once do,
        they are drawn so, with the warning FT764), FT762 (exit 6) when the model's logits are not finite.
        """
        seed, turns = self._drawing.seed, range(self._drawing.num_generations)
        requests = [
            GenerationRequest(tuple(self._ids[at]), self._limit(at), tuple(row_seed(seed, at, turn) for turn in turns))
            for at in places
        ]
        with answering(self._model):
            while (found := self._completed(requests, progress)) is None:
                self._fewer_rows()
        return [
            [self._read(one.tokens, self._prompts[at]) for one in completions]
            for completions, at in zip(found, places, strict=True)
        ]

    def _limit(self, at: int) -> int:
        """Most tokens of an answer to the prompt at ``at``, which is shorter than ``max_length``."""
        return min(self._drawing.max_new_tokens, self._drawing.max_length - len(self._ids[at]))

    def _completed(self, requests: Sequence[GenerationRequest], progress: Progress) -> list[list[Completion]] | None:
        """The completions of each request; None where memory ran out."""
        found = [[Completion() for _ in request.seeds] for request in requests]
        try:
            for token in self._open().generator.run(requests, self._sampling, self._stopping):
                found[token.request][token.completion].add(token)
                if token.ended is not None:
                    progress.advance(1)
        except torch.OutOfMemoryError:
            return None
        return found

    def _open(self) -> OpenedGenerator:
        """The generator, which is kept: of all prompts, so that it does not depend on which come first."""
        if self._opened is None:
            job = self._job
            self._opened = open_generator(
                self._model,
                job.dtypes,
                job.device,
                rows=self._rows,
                longest=max(len(ids) + self._limit(at) for at, ids in enumerate(self._ids)),
                pad=job.pad_token_id,
                kernels=job.recipe.model.kernels,
                own_settings=False,  # answers are the model's own, without a penalty that training knows nothing of
            )
            job.reporter.info(self._opened.summary)
        return self._opened

    def _fewer_rows(self) -> None:
        if self._rows == 1:
            raise row_too_large("generation", None)
        self._opened, self._rows = None, self._rows // 2
        message = f"out of memory in generation: going on with {self._rows} answers at a time"
        help = "shorter answers (--max-new-tokens) leave room for more of them"
        self._job.reporter.finding(Finding("FT764", message, help=help, severity="warning"))
        if self._job.device.type == "cuda":
            torch.cuda.empty_cache()

    def _read(self, tokens: list[int], prompt: RenderedPrompt) -> DrawnAnswer:
        strings = self._drawing.stop_strings
        said = self._marks.split(tokens, prompt.text, templated=prompt.templated)
        ended = bool(tokens) and self._stopping.stopped(tokens)
        kept = tokens[:-1] if tokens and tokens[-1] in self._stopping.ids else tokens
        whole = cut(str(self._job.tokenizer.decode(kept, skip_special_tokens=False)), strings)
        return DrawnAnswer(replace(said, text=cut(said.text, strings), cut=not ended), whole, len(tokens))


#: Answers that judges get at once, about: whole groups, since a function may compare answers of one prompt.
_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one answer: the weighted sum, None if no judge had an opinion, and each judge's verdict."""

    value: float | None
    parts: tuple[float | None, ...]


class Scorer:
    """Scores by the recipe's rewards, summed by weight; without any by the judges of its tasks, as their mean.

    Raises FtcliError as :func:`ftcli.methods.grpo.rewards.build_rewards`; FT453 (exit 4) also for a task that compares
    with known answers where a row has none.
    """

    def __init__(
        self, recipe: Recipe, asked: Sequence[RenderedPrompt], reporter: Reporter, access: JudgeAccess = NO_ACCESS
    ) -> None:
        self._recipe = recipe
        self._asked = asked
        self._reporter = reporter
        self._told: set[str] = set()
        prompts = [one.prompt for one in asked]
        self._columns = columns_of(prompts)
        self._configs: tuple[RewardConfig | TaskConfig, ...] = recipe.rewards or judging_tasks(recipe)
        most = 1.0 if recipe.grpo is None or not recipe.rewards else recipe.grpo.reward_failures.max_fraction
        self._failures = RewardFailures(most, reporter)
        if recipe.rewards:
            self._judges = build_rewards(recipe.rewards, self._columns, access)
            return
        tasks = judging_tasks(recipe)
        _require_answers(tasks, asked)
        lent = {name: values for name, values in self._columns.items() if name not in CALLED_WITH}
        self._columns = {"answer": [prompt.reference for prompt in prompts], **lent}
        self._judges = [
            Reward(task.label, 1 / len(tasks), open_judge(task), "answer" if _compares(task) else None)
            for task in tasks
        ]

    @property
    def names(self) -> Sequence[str]:
        """Names of the parts of a score."""
        return [judge.name for judge in self._judges]

    @property
    def full(self) -> float | None:
        """The score of an answer that passes everything; None where scores have no such bound, as those of models."""
        if any(one.file is not None or judges.row(judge_name(one)).model for one in self._configs):
            return None
        return math.fsum(max(judge.weight, 0.0) for judge in self._judges)

    def settings(self) -> JsonObject:
        """All that scores depend on, beside prompts and answers: the judges' settings, and their files by content."""
        configs = [config.model_dump(mode="json", exclude={"data", "max_rows"}) for config in self._configs]
        files = [plain_fields(fingerprint(name, path)) for name, path in files_of(self._recipe).items()]
        return {"judges": configs, "files": [[one["name"], one["sha256"]] for one in files]}

    def load(self) -> None:
        """Loads reward models, which take memory, before whoever takes what is left."""
        first = self._asked[0]
        for judge, config in zip(self._judges, self._configs, strict=True):
            if config.file is None and judges.row(judge_name(config)).model:
                lent = {name: values[:1] for name, values in self._columns.items()}
                judge.scores([first.text], [""], lent, [first.prompt.row.origin], [None], [first.prompt])

    def scores(self, places: Sequence[int], groups: Sequence[Sequence[Answer]]) -> list[list[Score]]:
        """A score for each answer to the prompts at ``places``. Raises FtcliError FT455, FT765 (exit 4) where a judge
        fails and its `on_error` is `stop`, FT456 where a reward fails on more answers than the recipe lets pass.
        """
        each = max(1, _AT_ONCE // max(len(groups[0]), 1))
        found: list[list[Score]] = []
        for start in range(0, len(places), each):
            found += self._batch(places[start : start + each], groups[start : start + each])
        return found

    def _batch(self, places: Sequence[int], groups: Sequence[Sequence[Answer]]) -> list[list[Score]]:
        rows = [place for place, group in zip(places, groups, strict=True) for _ in group]
        said = [one for group in groups for one in group]
        lent = {name: [values[row] for row in rows] for name, values in self._columns.items()}
        origins = [self._asked[row].prompt.row.origin for row in rows]
        texts, reasoning = [one.text for one in said], [one.reasoning for one in said]
        prompts, asked = [self._asked[row].text for row in rows], [self._asked[row].prompt for row in rows]
        by_judge: list[Sequence[float | None]] = []
        for judge in self._judges:
            scored = judge.scores(prompts, texts, lent, origins, reasoning, asked)
            self._note(judge, len(texts), len(scored.failed), scored.example)
            by_judge.append(scored.values)
        flat = iter([self._score(parts) for parts in zip(*by_judge, strict=True)])
        return [[next(flat) for _ in group] for group in groups]

    def _score(self, parts: tuple[float | None, ...]) -> Score:
        known = [judge.weight * part for judge, part in zip(self._judges, parts, strict=True) if part is not None]
        return Score(math.fsum(known) if known else None, parts)

    def _note(self, judge: Reward, judged: int, failed: int, example: str | None) -> None:
        if example is not None and judge.name not in self._told:
            self._told.add(judge.name)
            help = f"the answer {judge.becomes}; this is said once, and the result counts what was not judged"
            self._reporter.finding(Finding("FT768", example, help=help, severity="warning"))
        self._failures.add(judge.name, judged, failed)


def _compares(task: TaskConfig) -> bool:
    return task.file is None and judges.row(task.kind).compares


def _require_answers(tasks: Sequence[TaskConfig], asked: Sequence[RenderedPrompt]) -> None:
    comparing = next((task for task in tasks if _compares(task)), None)
    without = next((one.prompt.row for one in asked if one.prompt.reference is None), None)
    if comparing is not None and without is not None:
        message = f"the task {comparing.label} compares with known answers, and this row has none"
        help = "add the column `answer`, or judge without one: a task with `file`, `use: regex` or `use: length`"
        raise FtcliError.single("FT453", message, origin=without.origin, help=help)


class AnswerFiles:
    """The answers to all prompts and their scores, in the files of one folder."""

    def __init__(
        self,
        job: Job,
        asked: Sequence[RenderedPrompt],
        drawing: Drawing,
        scorer: Scorer,
        folder: SampleFolder,
        run: RunDirectory | None,
        weights: Path | None,
    ) -> None:
        self._job = job
        self._asked = asked
        self._drawing = drawing
        self._scorer = scorer
        self._folder = folder
        self._run = run
        self._weights = weights
        self._keys = [key_of(one.text) for one in asked]
        self._group = max(1, GROUP_ANSWERS // drawing.num_generations)
        self._answers: GroupLog
        self._scores: GroupLog

    def draw(self, drawn: JsonMap, *, replace: bool) -> float | None:
        """Draws and judges what is missing; how many tokens a second were drawn."""
        reporter, each = self._job.reporter, self._drawing.num_generations
        judged_otherwise = self._folder.begin(drawn, self._scorer.settings(), replace=replace)
        path, keys, group = self._folder.path, self._keys, self._group
        answered = partial(self._holds, "answers", _is_answer)
        scored = partial(self._holds, "scores", lambda value: value is None or is_number(value))
        self._answers = GroupLog(path / ANSWERS, keys, group, answered, replace=replace)
        drawn_before = keys[: self._answers.count]
        self._scores = GroupLog(path / SCORES, drawn_before, group, scored, replace=replace, alone=True)
        if self._answers.count:
            again = ", and are judged again: the judges have changed" if judged_otherwise else ""
            reporter.info(f"{self._answers.count:,} of {len(self._keys):,} prompts were answered before{again}")
        self._judge_drawn()
        if self._answers.count == len(self._keys):
            return None
        self._scorer.load()
        model = model_that_answers(self._job, self._run, self._weights)
        sampler = Sampler(model, self._job, self._drawing, self._asked)
        tokens, seconds = 0, 0.0
        left = (len(self._keys) - self._answers.count) * each
        with reporter.progress(left, "sampling") as progress:
            while self._answers.count < len(self._keys):
                places = self._next(self._answers)
                began = time.perf_counter()
                answers = sampler.draw(places, progress)
                seconds += time.perf_counter() - began
                tokens += sum(one.tokens for group in answers for one in group)
                self._answers.append(
                    self._record(at, answers=[_record_of(one) for one in group])
                    for at, group in zip(places, answers, strict=True)
                )
                self._judge(places, [[one.said for one in group] for group in answers])
        return tokens / seconds if seconds > 0 else None

    def _holds(self, key: str, good: Callable[[object], bool], record: JsonMap) -> bool:
        """True if a line has as many good values under ``key`` as a prompt has answers."""
        found = record.get(key)
        return isinstance(found, list) and len(found) == self._drawing.num_generations and all(map(good, found))

    def _next(self, log: GroupLog) -> range:
        """The next group of a file."""
        return range(log.count, min(log.count + self._group, len(self._keys)))

    def _record(self, at: int, **said: object) -> JsonObject:
        return {"key": self._keys[at], "row": str(self._asked[at].prompt.row.origin), **said}

    def _judge_drawn(self) -> None:
        """Judges the answers that are there and have no scores."""
        drawn = self._answers.count
        records = self._answers.read(range(self._scores.count, drawn))
        while self._scores.count < drawn:
            places = self._next(self._scores)
            group = islice(records, len(places))
            self._judge(places, [[one.said for one in answers_in(record)] for record in group])

    def _judge(self, places: Sequence[int], answers: Sequence[Sequence[Answer]]) -> None:
        names, scored = self._scorer.names, self._scorer.scores(places, answers)
        several = names if len(names) > 1 else ()
        parts = [
            {"judges": {name: [one.parts[at] for one in group] for at, name in enumerate(several)}} if several else {}
            for group in scored
        ]
        self._scores.append(
            self._record(at, scores=[one.value for one in group], **more)
            for at, group, more in zip(places, scored, parts, strict=True)
        )

    def read(self) -> Iterator[tuple[RenderedPrompt, list[DrawnAnswer], list[float | None]]]:
        """Each prompt with its answers and their scores."""
        every = range(len(self._keys))
        records = zip(self._asked, self._answers.read(every), self._scores.read(every), strict=True)
        for asked, answers, scores in records:
            yield asked, answers_in(answers), scores["scores"]


def answers_in(record: JsonMap) -> list[DrawnAnswer]:
    """The answers of a line of answers.jsonl."""
    return [
        DrawnAnswer(
            Answer(one["text"], one.get("reasoning"), one["truncated"]), one.get("whole", one["text"]), one["tokens"]
        )
        for one in record["answers"]
    ]


def _is_answer(record: object) -> bool:
    if not isinstance(record, dict):
        return False
    texts = record.get("text"), record.get("whole", ""), record.get("reasoning", "")
    return (
        all(isinstance(text, str) for text in texts)
        and isinstance(record.get("truncated"), bool)
        and isinstance(record.get("tokens"), int)
    )


def _record_of(drawn: DrawnAnswer) -> JsonObject:
    said = drawn.said
    reasoning = {} if said.reasoning is None else {"reasoning": said.reasoning}
    whole = {} if drawn.whole == said.text else {"whole": drawn.whole}
    return {"text": said.text, **reasoning, **whole, "truncated": said.cut, "tokens": drawn.tokens}
