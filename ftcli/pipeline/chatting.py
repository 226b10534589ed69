"""`ftcli chat`: a run's model, or its base, asked turn by turn under the chat template of training."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.config.load import LoadedRecipe
from ftcli.config.recipe import Recipe
from ftcli.data.answers import OPENED_REASONING
from ftcli.data.asked import PromptLimit
from ftcli.data.omissions import split_reasoning
from ftcli.data.reasoning import Answer, ReasoningMarks
from ftcli.data.template import Renderer, renderer_of
from ftcli.data.tokens import RowImage
from ftcli.data.vision import Vision
from ftcli.errors import Finding, FtcliError, Origin
from ftcli.facts.weights import ADAPTER_CONFIG
from ftcli.pipeline.weights import checkpoint_of, refuse_training, result_of
from ftcli.plain import LEFT_OUT
from ftcli.preflight.stages import checked
from ftcli.reporting import Reporter, Session
from ftcli.rows.prompts import Prompt
from ftcli.rows.row import IMAGE, ImageSource, Message, Misfit, Row, data_error
from ftcli.run.atomic import read_json_object
from ftcli.run.directory import RunDirectory, is_run_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ftcli.evaluate.generate import CompletionEnd, StopReason, StreamSettings
    from ftcli.generation.generator import OpenedGenerator
    from ftcli.job import Job
    from ftcli.train.assembly import Model


#: Where a person talks and the recipe does not sample: varied, and never far from what is likely.
TEMPERATURE = 0.7
#: The recipe's own limit is that of tasks, whose answers are short.
MAX_NEW_TOKENS = 512

_PROBE = "Hello"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of a chat; None takes the recipe's value, or the default for a person. Without a ``prompt`` a person
    talks; ``raw`` text is continued without the chat template; ``checkpoint`` is a step or ``best``.
    """

    prompt: str | None = None
    base: bool = False
    checkpoint: str | None = None
    system: str | None = None
    raw: bool = False
    temperature: float | None = None
    top_p: float | None = None
    max_new_tokens: int | None = None
    seed: int | None = None
    images: tuple[str, ...] = ()

    @property
    def interactive(self) -> bool:
        """True if a person talks."""
        return self.prompt is None


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The answer of `ftcli chat` to one prompt, control characters included, and the ``reasoning`` before it by the
    marks of the chat template. ``stop``: for a token or string that ends a turn, else the limit that ended it;
    ``seconds`` are those of generation; ``seed`` is None where nothing is drawn.
    """

    completion: str
    reasoning: str | None
    stop: StopReason
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    model: str
    base: bool
    run: str | None
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    checkpoint: str | None = field(default=None, metadata=LEFT_OUT)

    @property
    def limit(self) -> str | None:
        """The limit that ended the answer before the model did, for people."""
        if self.stop == "stop":
            return None
        limit = f"--max-new-tokens {self.max_new_tokens}" if self.stop == "max_new_tokens" else "data.max_seq_len"
        return f"{limit}, while reasoning" if self.reasoning is not None and not self.completion else limit


@dataclass(frozen=True, slots=True)
class Chat:
    """A model that is ready to answer, and what has been said to it."""

    job: Job
    model: Model
    conversation: Conversation
    sampling: StreamSettings
    seed: int
    base: bool
    run: Path | None
    checkpoint: Path | None
    opened: OpenedGenerator

    def ask(self, text: str) -> Generator[str, None, ChatAnswer]:
        """The answer to the next turn, piece by piece; the generator's value is all of it.

        The turn becomes part of the history, also when the generator is closed, unless nothing of the answer has come.
        Raises FtcliError as :meth:`Conversation.question` (exit 4), the history unchanged; FT762 (exit 6) for logits
        that are not finite.
        """
        from ftcli.evaluate.generate import stream
        from ftcli.generation.requests import cut

        question = self.conversation.question(text)
        job, began = self.job, time.perf_counter()
        pieces: list[str] = []
        completed: CompletionEnd | None = None
        generation = stream(
            self.model,
            job.tokenizer,
            question.text,
            self.sampling,
            plan=job.dtypes,
            device=job.device,
            stops=job.stops,
            max_length=job.recipe.data.max_seq_len,
            opened=self.opened,
            slides=job.recipe.eval.generate.overflow == "sliding",
            images=self.conversation.images,
            pixels=job.pixel_reader(),
        )
        try:
            while True:
                try:
                    piece = next(generation)
                except StopIteration as end:
                    completed = end.value
                    break
                pieces.append(piece)
                yield piece
        finally:
            generation.close()
            if pieces or completed is not None:
                self.conversation.answered(question, "".join(pieces))
        assert completed is not None  # the loop has no other end
        said = self.conversation.told_apart(question, completed.ids)
        whole = said.reasoning is None
        return ChatAnswer(
            completion="".join(pieces) if whole else cut(said.text, self.sampling.stop_strings),
            reasoning=said.reasoning,
            stop=completed.stop,
            prompt_tokens=question.tokens,
            completion_tokens=completed.tokens,
            seconds=time.perf_counter() - began,
            model=job.recipe.model.name_or_path,
            base=self.base,
            run=None if self.run is None else str(self.run),
            checkpoint=None if self.checkpoint is None else str(self.checkpoint),
            max_new_tokens=self.sampling.max_new_tokens,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            seed=self.seed if self.sampling.temperature > 0 else None,
        )


def open_chat(loaded: LoadedRecipe, session: Session, run_dir: Path, options: ChatOptions) -> Chat:
    """Loads what is to answer. What can be said against the first turn is said before a weight is loaded.

    Raises FtcliError FT158 (exit 2) for options that contradict each other, FT763 when ``run_dir`` holds no finished
    run and the base was not asked for, FT725 when it has no such checkpoint, FT735 when the base is not the run's,
    FT749 when the command line changes how it was trained; whatever preflight and loading raise.
    """
    if options.base and options.checkpoint is not None:
        raise cannot_chat(
            f"--checkpoint {options.checkpoint} belongs to the run, and --base asks its base model",
            help="leave one of them out",
        )
    run = RunDirectory(run_dir) if not options.base or is_run_directory(run_dir) else None
    if run is not None:
        refuse_training(loaded, run, "a talk")
    chosen = None if run is None else checkpoint_of(run, options.checkpoint, session.reporter)
    weights = None if run is None or options.base else chosen or result_of(run, session.reporter)
    # Without what is held out: nothing of it is read, and one row is in the model at a time.
    recipe = loaded.recipe.changed({"eval.tasks": (), "eval.lm_eval": (), "eval.per_device_eval_batch_size": 1})
    report = checked(replace(loaded, recipe=recipe), session, "chat")
    from ftcli.evaluate.generate import listening
    from ftcli.job import open_job

    job = open_job(report, session)
    conversation = _conversation(job, run, options)
    conversation.question(options.prompt if options.prompt is not None else _PROBE)
    model = model_that_answers(job, run, weights)
    sampling = sampling_of(loaded.recipe, options)
    seed = _seeded(loaded.recipe, options)
    opened = listening(
        model,
        job.tokenizer,
        plan=job.dtypes,
        device=job.device,
        max_length=loaded.recipe.data.max_seq_len,
    )
    if opened.reason is not None:
        job.reporter.info(opened.summary)
    path = None if run is None else run.path
    return Chat(job, model, conversation, sampling, seed, options.base, path, chosen, opened)


def sampling_of(recipe: Recipe, options: ChatOptions) -> StreamSettings:
    """The options; what they leave open is the recipe's (``eval.generate``), or for a person to talk with."""
    from ftcli.evaluate.generate import StreamSettings

    own = recipe.eval.generate
    temperature = own.temperature if own.do_sample else TEMPERATURE if options.interactive else 0.0
    longest = max(own.max_new_tokens, MAX_NEW_TOKENS) if options.interactive else own.max_new_tokens
    return StreamSettings(
        max_new_tokens=longest if options.max_new_tokens is None else options.max_new_tokens,
        temperature=temperature if options.temperature is None else options.temperature,
        top_p=1.0 if options.top_p is None else options.top_p,
        stop_strings=own.stop_strings,
    )


def cannot_chat(message: str, help: str, option: str = "command line") -> FtcliError:
    """FT158: there is nothing to answer, or options contradict each other."""
    return FtcliError.single("FT158", message, origin=Origin(option), help=help)


def _conversation(job: Job, run: RunDirectory | None, options: ChatOptions) -> Conversation:
    data = job.recipe.data
    renderer = renderer_of(job.tokenizer, data)
    if run is not None:
        use_template_of(run, renderer, job.reporter)
    raw = options.raw
    if not raw and renderer.source is None and not job.tokenizer.chat_template:
        job.reporter.warn("the tokenizer has no chat template: each text is continued as it stands, without a history")
        raw = True
    if raw and options.system is not None:
        raise cannot_chat(
            "there is no chat template in use, so nothing can write a system prompt",
            help="put it at the beginning of the text, or name a template with --set data.chat_template=NAME",
            option="--system",
        )
    limit = f"which leaves no room for an answer in data.max_seq_len {data.max_seq_len}"
    help = (
        "shorten it, start over (/reset), raise the limit with --set data.max_seq_len=N, or let the oldest tokens go "
        "with --set eval.generate.overflow=sliding"
    )
    longest = sys.maxsize if job.recipe.eval.generate.overflow == "sliding" else data.max_seq_len - 1
    return Conversation(
        job.tokenizer,
        renderer,
        PromptLimit(longest, "FT431", limit, help),
        system=options.system,
        raw=raw,
        refuses_reasoning=data.reasoning == "refuse",
        images=_images(job, renderer, options),
        vision=job.vision,
    )


def _images(job: Job, renderer: Renderer, options: ChatOptions) -> tuple[RowImage, ...]:
    """The images of ``--image``, measured. Raises FtcliError FT158 (exit 2) for what cannot be shown."""
    if not options.images:
        return ()
    help = "name a PNG, JPEG, WEBP, GIF, BMP or TIFF file, and a model of docs/vision.md"
    if isinstance(job.vision, str) or options.raw:
        why = job.vision if isinstance(job.vision, str) else "--raw has no place for an image"
        raise cannot_chat(f"no image can be shown: {why}", help, "--image")
    renderer.written = job.vision.written
    row, found = Row(_WHERE, 1, {}), []
    for name in options.images:
        try:
            found.append(job.vision.looked_at(ImageSource(content=Path(name).read_bytes()), row))
        except (Misfit, OSError) as error:
            raise cannot_chat(f"{name} cannot be shown: {error}", help, "--image") from error
    return tuple(found)


def use_template_of(run: RunDirectory, renderer: Renderer, reporter: Reporter) -> None:
    """The run was trained under the template in its manifest; another one is told, and not used."""
    inputs = read_json_object(run.manifest_path).get("inputs")
    trained = inputs.get("chat_template") if isinstance(inputs, dict) else None
    if isinstance(trained, str) and trained != renderer.source:
        renderer.use(trained)
        message = f"the chat template is not that of {run.path}; the one of training is used"
        help = "nothing needs to be done; without the run, --base asks the base model under the recipe's template"
        reporter.finding(Finding("FT734", message, help=help, severity="warning"))


def model_that_answers(job: Job, run: RunDirectory | None, weights: Path | None) -> Model:
    """The model that answers, on the kernels: the base, with the run's adapter, or the run's full fine-tune."""
    from ftcli.model.lora import load_adapter
    from ftcli.pipeline.evaluation import freeze_on_kernels
    from ftcli.train.assembly import begin_reading, build_base, hold

    adapter = weights is not None and (weights / ADAPTER_CONFIG).is_file()
    read = begin_reading(job) if run is not None and (adapter or weights is None) else None
    model: Model = build_base(job, weights=None if adapter else weights)
    if run is not None:
        hold(job, model, run, read)
    if adapter and weights is not None:
        model = load_adapter(model, weights)
    freeze_on_kernels(job, model, ())
    return model


def _seeded(recipe: Recipe, options: ChatOptions) -> int:
    """Seeds torch: as asked, by the recipe's seed for a script, and anew each time for a person."""
    import torch

    if options.seed is None and options.interactive:
        return torch.seed()
    seed = recipe.run.seed if options.seed is None else options.seed
    torch.manual_seed(seed)
    return seed


_WHERE = "chat"


@dataclass(frozen=True, slots=True)
class Question:
    """A turn as the model sees it: everything said up to where its answer begins, and how many tokens that is."""

    said: str
    text: str
    tokens: int


class Conversation:
    """Turns that were asked and answered, and the next one rendered after them. Without a ``renderer`` every turn is
    plain text, to be continued; ``room`` is the longest prompt; under ``refuses_reasoning`` reasoning of earlier
    answers is no part of the history; ``images`` are shown before the first turn's text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        renderer: Renderer,
        room: PromptLimit,
        *,
        system: str | None = None,
        raw: bool = False,
        refuses_reasoning: bool = False,
        images: tuple[RowImage, ...] = (),
        vision: Vision | str = "",
    ) -> None:
        self.images = images
        self._more = 0 if isinstance(vision, str) else sum(len(vision.ids_of(image)) - 1 for image in images)
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._room = room
        self._raw = raw
        self._refuses_reasoning = refuses_reasoning
        self._first: tuple[Message, ...] = () if system is None else ({"role": "system", "content": system},)
        self._turns: list[Message] = []

    @property
    def turns(self) -> tuple[Message, ...]:
        return (*self._first, *self._turns)

    def reset(self) -> None:
        self._turns.clear()

    def question(self, text: str) -> Question:
        """The next turn, not yet part of the history. Raises FtcliError (exit 4) FT412, FT422, FT425 and FT426 as
        :meth:`ftcli.data.template.Renderer.prompt`, FT431 when it leaves no room for an answer.
        """
        row = Row(_WHERE, len(self._turns) // 2 + 1, {})
        text = text if self._turns else IMAGE * len(self.images) + text
        messages = None if self._raw else (*self.turns, {"role": "user", "content": text})
        rendered = self._renderer.prompt(Prompt(row, messages, text if self._raw else None, None))
        count = len(self._tokenizer(rendered, add_special_tokens=False)["input_ids"]) + self._more
        if count > self._room.tokens or not count:
            message = f"the conversation has {count:,} tokens, {self._room.limit}" if count else "nothing is asked"
            raise data_error("FT431", message, row.origin, self._room.help)
        return Question(text, rendered, count)

    def told_apart(self, question: Question, tokens: Sequence[int]) -> Answer:
        """The answer and the reasoning before it, by the marks of the template that wrote the question."""
        marks = ReasoningMarks(self._tokenizer, self._renderer.source)
        return marks.split(tokens, question.text, templated=not self._raw)

    def answered(self, question: Question, completion: str) -> None:
        """Adds the turn and its answer, as far as that came, to the history."""
        if self._raw:
            return
        content = completion
        if OPENED_REASONING.search(question.text):  # it began in the prompt, and gets both of its tags
            content = f"<think>\n{completion}" + ("" if "</think>" in completion else "\n</think>\n\n")
        if self._refuses_reasoning:
            content = split_reasoning(content)[3]
        self._turns += [{"role": "user", "content": question.said}, {"role": "assistant", "content": content}]
