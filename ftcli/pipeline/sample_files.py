"""Draws answers and judges them, into files that grow by groups of prompts; what is there already is not done again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from ftcli.data.asked import RenderedPrompt
from ftcli.data.reasoning import Answer
from ftcli.evaluate.draw import Drawing, DrawnAnswer, Sampler
from ftcli.job import Job
from ftcli.pipeline.chatting import model_that_answers
from ftcli.pipeline.scoring import Scorer
from ftcli.plain import JsonMap, JsonObject, is_number
from ftcli.run.directory import RunDirectory
from ftcli.run.samples import ANSWERS, GROUP_ANSWERS, SCORES, GroupLog, SampleFolder, key_of


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
        self._answers = GroupLog(path / ANSWERS, keys, group, self._holds_answers, replace=replace)
        drawn_before = keys[: self._answers.count]
        self._scores = GroupLog(path / SCORES, drawn_before, group, self._holds_scores, replace=replace, alone=True)
        if self._answers.count:
            again = ", and are judged again: the judges have changed" if judged_otherwise else ""
            reporter.info(f"{self._answers.count:,} of {len(self._keys):,} prompts were answered before{again}")
        self._judge_drawn()
        if self._answers.count == len(self._keys):
            return None
        sampler = self._sampler()
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

    def _holds_answers(self, record: JsonMap) -> bool:
        found = record.get("answers")
        return (
            isinstance(found, list)
            and len(found) == self._drawing.num_generations
            and all(isinstance(one, dict) and _is_answer(one) for one in found)
        )

    def _holds_scores(self, record: JsonMap) -> bool:
        found = record.get("scores")
        return (
            isinstance(found, list)
            and len(found) == self._drawing.num_generations
            and all(one is None or is_number(one) for one in found)
        )

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

    def _sampler(self) -> Sampler:
        self._scorer.load()
        model = model_that_answers(self._job, self._run, self._weights)
        return Sampler(model, self._job, self._drawing, self._asked)

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


def _is_answer(record: JsonMap) -> bool:
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
