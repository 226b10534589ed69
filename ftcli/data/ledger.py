"""Counts what became of every row and token, so that nothing is cut or masked silently."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate

from ftcli.config.recipe import Recipe
from ftcli.errors import ExitCode, Finding, FtcliError


@dataclass(frozen=True, slots=True)
class DatasetLedger:
    """One dataset's account, in rows and tokens.

    ``rows`` were read, ``bad_rows`` of them skipped as broken (``bad_codes`` says by which code). ``tokens`` are those
    kept (supervised and masked); ``cut_tokens`` were removed by truncation, ``dropped_tokens`` belonged to rows that
    were dropped. Length quantiles are over all rows that could be tokenized, before any cut.

    ``implicit`` is where the first prompt ends that no column holds, and what follows it.

    ``columns_unread`` are the columns in which some row has a value, and that its layout does not read.

    ``counts``, each absent where it is 0: ``chats`` and ``plain_prompts`` are rows written by the chat template and
    prompts with a completion that are not, of which ``prompts_implicit`` stand in no column; ``turns_split`` are
    answers with a row of their own, beyond ``rows``;
    ``pairs_split`` the second answers of pairs whose answers are rows of their own; ``rows_split`` pieces of long rows
    beyond the first;
    ``turns_untrained`` (under ``history: last``), ``turns_opening`` and ``turns_marked`` are answers without loss;
    ``reasoning_dropped`` lost their reasoning; ``answers_joined`` share their first token with the prompt;
    ``images`` and their ``image_tokens``, and those of them that were ``images_turned``, of which the
    ``images_first_frame`` is taken, that are ``images_converted`` or ``images_misnamed``.
    """

    name: str
    layout: str
    rows: int
    kept_rows: int
    dropped_rows: int
    truncated_rows: int
    tokens: int
    supervised_tokens: int
    cut_tokens: int
    dropped_tokens: int
    length_quantiles: dict[str, int]
    bad_rows: int = 0
    bad_codes: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    columns_unread: list[str] = field(default_factory=list)
    implicit: str = ""

    @property
    def made_rows(self) -> int:
        """Rows that were read, and those that were made for answers of their own."""
        return self.rows + sum(self.counts.get(name, 0) for name in ("turns_split", "pairs_split", "rows_split"))

    @property
    def masked_tokens(self) -> int:
        """Kept tokens without loss."""
        return self.tokens - self.supervised_tokens

    @property
    def all_tokens(self) -> int:
        """Tokens of all rows that could be tokenized."""
        return self.tokens + self.cut_tokens + self.dropped_tokens


def merged(before: DatasetLedger, now: DatasetLedger, lengths: Counter[int]) -> DatasetLedger:
    """The account of both together, of one source; ``lengths`` are those of all its rows."""
    summed = {}
    for each in fields(DatasetLedger):
        one, other = getattr(before, each.name), getattr(now, each.name)
        if isinstance(one, int):
            summed[each.name] = one + other
        elif isinstance(one, dict):
            summed[each.name] = dict(sorted((Counter(one) + Counter(other)).items()))
    columns = [*dict.fromkeys([*before.columns_unread, *now.columns_unread])]
    implicit = before.implicit or now.implicit
    return replace(now, **{**summed, "length_quantiles": quantiles(lengths)}, columns_unread=columns, implicit=implicit)


def quantiles(lengths: Counter[int]) -> dict[str, int]:
    """Minimum, median, 90th and 99th percentile (nearest rank) and maximum of lengths, counted by length."""
    if not lengths:
        return {}
    ordered = sorted(lengths)
    ends = list(accumulate(lengths[length] for length in ordered))

    def rank(percent: int) -> int:
        return ordered[bisect_left(ends, -(-percent * ends[-1] // 100))]

    return {"min": ordered[0], "p50": rank(50), "p90": rank(90), "p99": rank(99), "max": ordered[-1]}


def skipped_finding(name: str, rows: int, codes: Mapping[str, int], examples: Sequence[Finding]) -> Finding:
    """FT441: rows of a source that were skipped under ``max_bad_rows``, by code, with the first few reasons."""
    kinds = ", ".join(f"{count:,} of {code}" for code, count in sorted(codes.items()))
    first = "\n".join(f"{f.origin}: {f.code}: {f.message}" for f in examples[:3])
    message = f"{name}: {sum(codes.values()):,} of {rows:,} rows are broken and skipped ({kinds})"
    return Finding("FT441", message, None, f"data.max_bad_rows allows it; fix or remove them\n{first}", "warning")


def chat_findings(ledger: DatasetLedger, history: str) -> list[Finding]:
    """Notes about prompts, answers and images that are trained differently than the rows have them: FT444, FT445,
    FT460.
    """
    counts, found = Counter(ledger.counts), []
    if ledger.implicit:
        message = (
            f"{ledger.name}: {counts['prompts_implicit']:,} rows have no `prompt`: it is what both answers begin with, "
            f"up to a whole word. The first one ends so: {ledger.implicit}"
        )
        help = "write the prompt into a column `prompt` where it ends elsewhere"
        found.append(Finding("FT460", message, None, help, "note"))
    if counts["turns_split"] or counts["turns_untrained"]:
        form = ", even in its training form" if history == "template" else ""
        fate = "have rows of their own, as generation will see them" if counts["turns_split"] else "bear no loss"
        turns = counts["turns_split"] or counts["turns_untrained"]
        message = f"{ledger.name}: the chat template writes earlier answers differently{form}; {turns:,} of them {fate}"
        help = "data.history: last trains the last answers alone, which costs fewer tokens"
        found.append(Finding("FT444", message, None, help if counts["turns_split"] else None, "note"))
    kinds = {
        "turns_opening": "answers that open a conversation bear no loss, since nothing asks for them",
        "reasoning_dropped": "answers are trained without their reasoning (data.reasoning: drop)",
        "answers_joined": "answers begin inside of a token of their prompt, which bears no loss",
        "images_turned": "images are turned upright, as their EXIF says",
        "images_first_frame": "animated images are their first frame",
        "images_converted": "images become RGB of 8 bits a colour",
        "images_misnamed": "images have the ending of another format, and are read as what they are",
    }
    parts = [f"{counts[name]:,} {text}" for name, text in kinds.items() if counts[name]]
    if parts:
        found.append(Finding("FT445", f"{ledger.name}: {'; '.join(parts)}", None, None, "note"))
    return found


def raise_without_images(recipe: Recipe) -> None:
    """Raises FtcliError FT448 (exit 4) where a tower or projector is to be trained; no row has an image."""
    parts = [part for part in recipe.model.train if part != "language"]
    if parts:
        message = f"no row of data.train has an image, from which model.train: {', '.join(parts)} would learn"
        help = "add rows with images, or leave model.train out"
        raise FtcliError.single("FT448", message, exit_code=ExitCode.DATA, help=help)


def rendered_apart(ledgers: Sequence[DatasetLedger]) -> Finding | None:
    """FT446: chats are written by the template and other prompts are not, so that one model learns two forms."""
    kinds = {kind: [one.name for one in ledgers if one.counts.get(kind)] for kind in ("chats", "plain_prompts")}
    if not all(kinds.values()):
        return None
    return Finding(
        "FT446",
        f"the prompts of {', '.join(kinds['plain_prompts'])} are plain text, those of {', '.join(kinds['chats'])} are "
        "rendered by the chat template: the model learns two prompt formats",
        None,
        "write prompt and completion as lists of messages, or leave it so if both forms are wanted",
        "warning",
    )


#: Shares of tokens: prompts are often several times as long as their answers.
_USUAL, _MUCH_LOST, _HALF = 0.1, 0.1, 0.5


def mostly_untrained(ledgers: Sequence[DatasetLedger], loss_on: str) -> Finding | None:
    """FT442 when unusually few of the tokens are trained; a warning when rows were cut, dropped or skipped for it."""
    total = Counter[str]()
    for ledger in ledgers:
        total.update(
            all=ledger.all_tokens,
            trained=ledger.supervised_tokens,
            masked=ledger.masked_tokens,
            cut=ledger.cut_tokens,
            dropped=ledger.dropped_tokens,
            skipped_rows=ledger.bad_rows,
        )
    if not total["all"]:
        return None
    shares = {name: total[name] / total["all"] for name in ("trained", "masked", "cut", "dropped")}
    if shares["trained"] >= (_USUAL if shares["cut"] + shares["dropped"] < _MUCH_LOST else _HALF):
        return None
    parts = [f"{shares['masked']:.0%} are masked (data.loss_on: {loss_on})"]
    parts += [f"{shares[name]:.0%} are {name} (data.overlong)" for name in ("cut", "dropped") if shares[name] > 0]
    lost = shares["cut"] + shares["dropped"] > 0 or total["skipped_rows"] > 0
    return Finding(
        "FT442",
        f"this run trains on {shares['trained']:.0%} of its {total['all']:,} tokens: {'; '.join(parts)}",
        None,
        "`ftcli check RECIPE --show-sample 3` shows which; a longer data.max_seq_len cuts less, and data.loss_on: all "
        "trains prompts too",
        "warning" if lost else "note",
    )
