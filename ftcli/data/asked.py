"""Prompts of tasks and of GRPO: rows as rendered prompts that fit the length they may have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftcli.config.data import DataConfig, DatasetConfig
from ftcli.config.evaluation import GenerateConfig
from ftcli.data.encode import TEXT_ALONE
from ftcli.data.ledger import skipped_finding
from ftcli.data.omissions import split_reasoning
from ftcli.data.prepare import allowed_of
from ftcli.data.template import Renderer, renderer_of
from ftcli.data.tokens import RowImage
from ftcli.data.vision import Vision
from ftcli.errors import ExitCode, Finding, FtcliError, Origin
from ftcli.rows.prompts import Prompt, prompt_maker
from ftcli.rows.reading import iterate, no_rows
from ftcli.rows.row import Misfit, data_error, raise_findings
from ftcli.time_limit import TimeBudget

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Prompts that are tokenized at a time.
_BATCH = 1000


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt, its text as the model sees it, and the images in their places."""

    prompt: Prompt
    text: str
    images: tuple[RowImage, ...] = ()

    @property
    def templated(self) -> bool:
        """True if a chat template wrote the text."""
        return self.prompt.messages is not None


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """Longest prompt in tokens, and the message about a longer one.

    ``cut_to`` is what ``data.overlong: truncate`` leaves of it, from its end; None where prompts are never cut.
    """

    tokens: int
    code: str
    limit: str
    help: str
    cut_to: int | None = None


def uncut(section: str, limit: int) -> PromptLimit:
    """Prompts that are trained on are never cut: ``section.max_prompt_length`` is the recipe's limit."""
    help = f"raise {section}.max_prompt_length, choose data.overlong: drop, or remove the row"
    return PromptLimit(limit, "FT781", f"more than {section}.max_prompt_length {limit}", help)


def room_of_task(data: DataConfig, generate: GenerateConfig) -> PromptLimit:
    """A prompt of a task and at least one token of its answer fit ``data.max_seq_len``; where the window slides, the
    prompt does.
    """
    longest, max_new_tokens = data.max_seq_len, generate.max_new_tokens
    help = "raise data.max_seq_len, or choose data.overlong: drop or truncate"
    if generate.overflow == "sliding":
        return PromptLimit(longest, "FT431", f"more than data.max_seq_len {longest}", help, longest)
    return PromptLimit(
        longest - 1, "FT431", f"which leaves no room for an answer in data.max_seq_len {longest}", help,
        max(1, longest - max_new_tokens),
    )  # fmt: skip


def asked_rows(
    sources: Sequence[DatasetConfig],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    room: PromptLimit,
    *,
    offline: bool,
    max_rows: int | None = None,
    budget: TimeBudget | None = None,
    vision: Vision | str = TEXT_ALONE,
) -> tuple[list[RenderedPrompt], list[Finding]]:
    """Prompts of all sources (the first ``max_rows`` of them), and warnings about rows that are skipped or cut.

    What ``data.max_bad_rows``, ``data.overlong`` and ``data.reasoning`` say of rows to train on holds for these, too.
    Where ``budget`` is spent, what is left is not read. ``vision``: as :class:`ftcli.data.encode.Encoder`.

    Raises FtcliError: exit 4, with what is wrong with all rows of all sources: FT401 to FT407 for files and rows, FT411
    to FT414 for layouts, FT421 to FT427 for templates, and the code of ``room`` for prompts that are too long.
    """
    reader = _Reader(data, tokenizer, room, offline, budget, vision)
    asked: list[RenderedPrompt] = []
    warnings: list[Finding] = []
    failures: list[Finding] = []
    for source in sources:
        left = None if max_rows is None else max_rows - len(asked)
        if left == 0 or (budget is not None and budget.spent()):
            break
        try:
            found, told = reader.read(source, left)
        except FtcliError as error:
            if error.exit_code != ExitCode.DATA:
                raise
            failures += error.findings
        else:
            asked += found
            warnings += told
    raise_findings(list(dict.fromkeys(failures)))
    return asked, warnings


class _Reader:
    """Reads the sources of one call."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        room: PromptLimit,
        offline: bool,
        budget: TimeBudget | None,
        vision: Vision | str,
    ) -> None:
        self._budget = budget
        self._vision = vision
        self._data = data
        self._tokenizer = tokenizer
        self._room = room
        self._offline = offline
        self._renderer: Renderer = renderer_of(tokenizer, data)
        if not isinstance(vision, str):
            self._renderer.written = vision.written

    def read(self, source: DatasetConfig, most: int | None) -> tuple[list[RenderedPrompt], list[Finding]]:
        asked, bad, rows = self._rendered(source, most)
        if not rows and (self._budget is None or not self._budget.stopped):
            raise no_rows(source)
        kept, overlong, told = self._fitting(source, asked)
        whole = self._budget is None or not self._budget.stopped
        refused = bad if len(bad) > allowed_of(self._data.max_bad_rows, rows, whole=whole) else []
        raise_findings(sorted([*refused, *overlong], key=lambda finding: (finding.origin and finding.origin.line) or 0))
        if not kept and whole:
            message = f"no prompt of {source.path} is left: {len(asked):,} too long, {len(bad):,} broken"
            raise data_error("FT404", message, Origin(source.path), "raise data.max_seq_len, or fix the broken rows")
        if bad:
            told.append(skipped_finding(source.path, rows, Counter(finding.code for finding in bad), bad))
        return kept, told

    def _rendered(self, source: DatasetConfig, most: int | None) -> tuple[list[RenderedPrompt], list[Finding], int]:
        """Prompts, what is wrong with other rows, and how many rows were read."""
        asked: list[RenderedPrompt] = []
        bad: list[Finding] = []
        make, rows = None, 0
        for item in iterate(source, offline=self._offline):
            if self._budget is not None and self._budget.spent():
                break
            rows += 1
            if isinstance(item, Finding):
                bad.append(item)
                continue
            make = make or prompt_maker(item, self._data.format)
            try:
                made = make(item)
                if made.value < 0:  # an answer that is called bad is none to compare with
                    continue
                prompt = self._referenced(made)
                text = self._renderer.prompt(prompt)
                images = self._images_of(prompt)
            except FtcliError as error:
                if error.findings[0].code == "FT421":
                    raise
                bad += error.findings
            else:
                asked.append(RenderedPrompt(prompt, text, images))
                if len(asked) == most:
                    break
        return asked, bad, rows

    def _images_of(self, prompt: Prompt) -> tuple[RowImage, ...]:
        """The prompt's images. Raises FtcliError FT412."""
        if not prompt.images:
            return ()
        try:
            if isinstance(self._vision, str):
                raise Misfit(f"the row has images, and {self._vision}")
            return tuple(self._vision.looked_at(source, prompt.row) for source in prompt.images)
        except Misfit as misfit:
            raise data_error("FT412", str(misfit), prompt.row.origin) from misfit

    def _referenced(self, prompt: Prompt) -> Prompt:
        """The prompt, the reasoning in its known answer treated as ``data.reasoning`` says.

        Reasoning that is kept is trained, and is no part of the answer that judges compare with.
        """
        if prompt.messages is None or prompt.reference is None:
            return prompt
        if self._data.reasoning == "keep" and "</think>" not in (self._renderer.source or ""):
            return prompt
        _, reasoning, _, answer = split_reasoning(prompt.reference)
        if self._data.reasoning == "refuse" and reasoning.strip():
            message = "the known answer holds reasoning, which data.reasoning: refuse does not allow"
            help = "remove it from the row, or choose data.reasoning: keep or drop"
            raise data_error("FT427", message, prompt.row.origin, help)
        return replace(prompt, reference=answer)

    def _fitting(
        self, source: DatasetConfig, asked: list[RenderedPrompt]
    ) -> tuple[list[RenderedPrompt], list[Finding], list[Finding]]:
        """Prompts that fit, errors about those that do not, and what was done about them."""
        room, overlong = self._room, self._data.overlong
        lengths = [length for start in range(0, len(asked), _BATCH) for length in self._lengths(asked[start:][:_BATCH])]
        long = sum(length > room.tokens for length in lengths)
        if not long:
            return asked, [], []
        pairs = list(zip(asked, lengths, strict=True))
        fitting = [one for one, length in pairs if length <= room.tokens]
        if overlong == "drop":
            return fitting, [], [self._told(source, long, len(asked), "left out")]
        seeing = any(one.images for one, length in pairs if length > room.tokens)  # what is shown is not cut
        if overlong == "truncate" and room.cut_to is not None and not seeing:
            cut = [one if length <= room.tokens else self._cut(one, room.cut_to) for one, length in pairs]
            return cut, [], [self._told(source, long, len(asked), "asked without their beginning")]
        errors = [
            Finding(room.code, f"the prompt has {length:,} tokens, {room.limit}", one.prompt.row.origin, room.help)
            for one, length in pairs
            if length > room.tokens
        ]
        return fitting, errors, []

    def _told(self, source: DatasetConfig, count: int, rows: int, fate: str) -> Finding:
        message = f"{source.path}: {count:,} of {rows:,} prompts are too long and {fate} (data.overlong: "
        return Finding("FT441", f"{message}{self._data.overlong})", None, self._room.help, "warning")

    def _lengths(self, asked: Sequence[RenderedPrompt]) -> list[int]:
        encoded = self._tokenizer([one.text for one in asked], add_special_tokens=False)["input_ids"]
        return [len(ids) + self._more(one) for ids, one in zip(encoded, asked, strict=True)]

    def _more(self, one: RenderedPrompt) -> int:
        """Tokens of a prompt's images beyond one each."""
        return 0 if isinstance(self._vision, str) else sum(len(self._vision.ids_of(each)) - 1 for each in one.images)

    def _cut(self, one: RenderedPrompt, tokens: int) -> RenderedPrompt:
        """The end of a prompt, after the token that begins every text."""
        bos = str(self._tokenizer.bos_token or "")
        head = bos if bos and one.text.startswith(bos) else ""
        offsets = self._tokenizer(one.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        for count in range(tokens - bool(head), 0, -1):  # what is left may be tokenized differently than it was
            found = replace(one, text=f"{head}{one.text[offsets[-count][0] :]}")
            if self._lengths([found])[0] <= tokens:
                return found
        return replace(one, text=head)
