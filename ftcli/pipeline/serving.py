"""`ftcli serve-check`: a running server's answers held against those of the trained model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.config.load import LoadedRecipe
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.pipeline.chatting import model_that_answers, use_template_of
from ftcli.pipeline.server import Refused, ServedAnswer, Server
from ftcli.pipeline.weights import weights_of
from ftcli.plain import LEFT_OUT
from ftcli.preflight.stages import checked
from ftcli.reporting import Session
from ftcli.rows.row import Message, Switches
from ftcli.run.directory import RunDirectory

if TYPE_CHECKING:
    from ftcli.data.asked import RenderedPrompt
    from ftcli.evaluate.generate import GreedyAnswer
    from ftcli.job import Job
    from ftcli.pipeline.served import ChannelResult, Comparison, Diagnosis, Fault
    from ftcli.train.assembly import Model

#: Answers that differ and are shown, and the characters of one: a server may say anything.
_SHOWN, _MOST_SHOWN = 3, 4000
#: Rows that are read for each prompt that is asked: some have tools or images, or are asked already.
_READ = 4


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of a comparison.

    Attributes:
        model: The server's name for it; None where it serves one alone.
        max_new_tokens: None takes ``eval.generate.max_new_tokens``.
        tolerance: The gap in nats up to which two tokens are equally likely.
    """

    url: str
    model: str | None = None
    prompts: int = 8
    max_new_tokens: int | None = None
    checkpoint: str | None = None
    tolerance: float = 0.25
    key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class DifferentAnswer:
    """A prompt, as the trained model sees it, and two answers to it."""

    asked: str
    prompt: str
    trained: str
    served: str


@dataclass(frozen=True, slots=True)
class ServeCheck:
    """The answer of `ftcli serve-check`: how answers to conversations (``chat``) and completions of given ``tokens``
    compare, None where the server takes none; by how many tokens its conversations are longer, each; what differs; and
    what could not be compared, and why.
    """

    run: str
    url: str
    model: str
    prompts: int
    max_new_tokens: int
    tolerance: float
    chat: ChannelResult | None
    tokens: ChannelResult | None
    prompt_tokens: tuple[int, ...]
    faults: tuple[Fault, ...]
    not_made: tuple[str, ...]
    different: tuple[DifferentAnswer, ...]
    checkpoint: str | None = field(default=None, metadata=LEFT_OUT)

    @property
    def exit_code(self) -> int:
        """1 where something differs."""
        return int(ExitCode.BUG if self.faults else ExitCode.OK)


def check_server(loaded: LoadedRecipe, session: Session, run_dir: Path, options: ServeOptions) -> ServeCheck:
    """Asks both; each fault is told as FT793.

    Raises FtcliError FT790 and FT791 (exit 2) as :class:`Server`, before a weight is loaded; FT792 (exit 4) where no
    prompt can be compared; FT725, FT735, FT749 and FT763 as `ftcli chat`; whatever preflight, rows and loading raise.
    """
    run = RunDirectory(run_dir)
    chosen, weights = weights_of(loaded, run, options.checkpoint, session.reporter, "serve-check")
    server = Server(options.url, options.key)
    name = server.model_named(options.model)
    # Prompts are never cut: a server would be asked something else.
    recipe = loaded.recipe.changed({"data.overlong": "drop", "eval.tasks": (), "eval.lm_eval": ()})
    report = checked(replace(loaded, recipe=recipe), session, "chat")
    from ftcli.job import open_job

    job = open_job(report, session)
    asked = _prompts(job, run, options.prompts)
    limit = options.max_new_tokens or job.recipe.eval.generate.max_new_tokens
    checking = _Checking(job, server, name, asked, limit)
    diagnosis = checking.diagnosed(model_that_answers(job, run, weights), options.tolerance)
    result = ServeCheck(
        run=str(run.path),
        url=server.url,
        model=name,
        prompts=len(asked),
        max_new_tokens=limit,
        tolerance=options.tolerance,
        chat=_summed(diagnosis.chat),
        tokens=_summed(diagnosis.given),
        prompt_tokens=tuple(diagnosis.prompt_tokens),
        faults=tuple(diagnosis.faults()),
        not_made=tuple(checking.not_made),
        different=tuple(checking.different(diagnosis)),
        checkpoint=None if chosen is None else str(chosen),
    )
    for fault in result.faults:
        session.reporter.finding(Finding("FT793", f"{fault.name}: {fault.message}", help=fault.help))
    return result


def _prompts(job: Job, run: RunDirectory, most: int) -> list[RenderedPrompt]:
    """The first prompts of the held-out rows, else of the trained ones, that any server can be asked, each once."""
    from ftcli.data.asked import asked_rows, room_of_task
    from ftcli.data.template import renderer_of

    data = job.recipe.data
    room = replace(room_of_task(data, job.recipe.eval.generate), cut_to=None)
    sources = data.eval or data.train
    rows, told = asked_rows(
        sources, data, job.tokenizer, room, offline=job.session.offline, max_rows=most * _READ, vision=job.vision
    )
    for finding in told:
        job.reporter.finding(finding)
    renderer = renderer_of(job.tokenizer, data)
    use_template_of(run, renderer, job.reporter)
    plain = [row for row in rows if _is_plain(row) and row.templated == rows[0].templated]
    found = {(one := replace(row, text=renderer.prompt(row.prompt))).text: one for row in plain}
    if not found:
        message = f"no prompt of {sources[0].path} can be asked: all have tools, or contents that are no text"
        help = "name other rows, as in --set data.eval=[prompts.jsonl]"
        raise FtcliError.single("FT792", message, exit_code=ExitCode.DATA, help=help)
    return list(found.values())[:most]


def _is_plain(row: RenderedPrompt) -> bool:
    texts = all(isinstance(one.get("content"), str) and not one.get("tool_calls") for one in row.prompt.messages or ())
    return texts and not row.prompt.tools and not row.images


def _summed(found: Sequence[Comparison]) -> ChannelResult | None:
    from ftcli.pipeline.served import summed

    return summed(found) if found else None


class _Checking:
    """Asks the trained model and the server the same. ``not_made``: comparisons that could not be made, and why."""

    def __init__(self, job: Job, server: Server, name: str, asked: Sequence[RenderedPrompt], limit: int) -> None:
        self.not_made: list[str] = []
        self._job = job
        self._server = server
        self._name = name
        self._asked = asked
        self._limit = limit
        self._ids: list[list[int]] = job.tokenizer([one.text for one in asked], add_special_tokens=False)["input_ids"]
        self._templated = asked[0].templated

    def diagnosed(self, model: Model, tolerance: float) -> Diagnosis:
        from ftcli.evaluate.generate import greedy_answers
        from ftcli.pipeline.served import Comparer, Diagnosis, Evidence

        def answers(prompts: Sequence[Sequence[int]]) -> list[GreedyAnswer]:
            return greedy_answers(model, self._job, prompts, self._limit)

        def base(places: Sequence[int]) -> list[GreedyAnswer]:
            with model.disable_adapter():
                return answers([self._ids[at] for at in places])

        own, job = answers(self._ids), self._job
        given, chat = self._given(), self._chat()
        evidence = Evidence(
            own=own,
            chat=chat,
            given=given,
            prompts=self._their_prompts() if chat else [],
            bos=job.tokenizer.bos_token_id,
            answers=answers,
            base=base if hasattr(model, "disable_adapter") else None,
            limit=self._limit,
        )
        if not any(one.stopped for one in own):
            self.not_made.append(f"stop tokens: no answer ended within {self._limit} tokens (--max-new-tokens)")
        if not any(one.log_probs for one in (*chat, *given)):
            self.not_made.append("log-probabilities: the server gives none")
        if chat and not evidence.prompts and all(one.prompt_tokens is None for one in chat):
            self.not_made.append("lengths of prompts: the server does not say usage.prompt_tokens")
        return Diagnosis(evidence, Comparer(job.tokenizer, job.stops, job.reasoning_marks, tolerance))

    def different(self, diagnosis: Diagnosis) -> list[DifferentAnswer]:
        """The first answers that differ."""
        decode = self._job.tokenizer.decode
        ways = (
            ("chat", diagnosis.chat, diagnosis.evidence.chat),
            ("tokens", diagnosis.given, diagnosis.evidence.given),
        )
        return [
            DifferentAnswer(way, self._asked[at].text, str(decode(list(own.tokens))), served[at].whole[:_MOST_SHOWN])
            for way, found, served in ways
            for at, (one, own) in enumerate(zip(found, diagnosis.evidence.own, strict=False))
            if not one.agrees
        ][:_SHOWN]

    def _given(self) -> list[ServedAnswer]:
        """Completions of the prompts' tokens; of their texts where the server takes no token ids and nobody chats."""
        complete = self._server.complete
        try:
            return self._each("asking with tokens", lambda at: complete(self._name, self._ids[at], self._limit))
        except Refused as error:
            self.not_made.append(f"completions of token ids: the server answers {error.status}: {error}")
        if self._templated:
            return []
        try:
            return self._each("asking with texts", lambda at: complete(self._name, self._asked[at].text, self._limit))
        except Refused as error:
            raise self._server.unusable(f"{self._server.url}/completions answers {error.status}: {error}") from error

    def _chat(self) -> list[ServedAnswer]:
        """Answers to conversations under the server's template; none for prompts that are plain texts."""
        if not self._templated:
            return []
        try:
            return self._each("asking with conversations", self._answer)
        except Refused as error:
            raise self._server.unusable(
                f"{self._server.url}/chat/completions answers {error.status}: {error}"
            ) from error

    def _answer(self, at: int) -> ServedAnswer:
        return self._server.chat(self._name, self._messages(at), self._limit, self._switches(at))

    def _their_prompts(self) -> list[list[int]]:
        """The tokens that the server makes of each conversation; none where it does not tell."""
        found = [self._server.prompt_of(self._name, self._messages(0), self._switches(0))]
        if found[0] is not None:
            more = range(1, len(self._asked))
            found += [self._server.prompt_of(self._name, self._messages(at), self._switches(at)) for at in more]
        return [one for one in found if one is not None] if None not in found else []

    def _messages(self, at: int) -> Sequence[Message]:
        return self._asked[at].prompt.messages or ()

    def _switches(self, at: int) -> Switches:
        return {**self._job.recipe.data.chat_template_kwargs, **self._asked[at].prompt.switches}

    def _each(self, what: str, ask: Callable[[int], ServedAnswer]) -> list[ServedAnswer]:
        found = []
        with self._job.reporter.progress(len(self._asked), what) as progress:
            for at in range(len(self._asked)):
                found.append(ask(at))
                progress.advance()
        return found
