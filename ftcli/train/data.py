"""Makes a job's data into token ids and epochs of training, and reports what was found and done; tokens.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from ftcli.config.recipe import Recipe
from ftcli.data.collate import lengths_once
from ftcli.data.ledger import DatasetLedger, mostly_untrained
from ftcli.data.order import ComputedTokens, Epochs, computed_by, epochs_of
from ftcli.data.prepare import PreparedData, prepare
from ftcli.data.tokens import TokenTable, digest_of
from ftcli.errors import Finding, Origin
from ftcli.job import Job
from ftcli.plain import FLATTENED, JsonObject
from ftcli.plan.batches import Batches
from ftcli.run.atomic import store_json
from ftcli.tables import layouts


@dataclass(frozen=True, slots=True)
class EpochLayout:
    """The layout of micro-batches, and what the first epoch computes in them."""

    batches: Batches = field(metadata=FLATTENED)
    first_epoch: ComputedTokens = field(metadata=FLATTENED)


def also_trained(train: TokenTable, held_out: TokenTable) -> Iterator[Finding]:
    """FT468: held-out rows that are trained on, token for token. Training rows of other lengths are not read."""
    known = Counter(digest_of(row) for row in held_out)
    found: dict[bytes, Origin] = {}
    for index in np.flatnonzero(np.isin(train.lengths, held_out.lengths)).tolist():
        row = train[index]
        if (digest := digest_of(row)) in known:
            found.setdefault(digest, row.row.origin)
    if found:
        count = sum(known[digest] for digest in found)
        message = f"{count:,} of {len(held_out):,} held-out texts are trained on as well, such as this one"
        help = "take them out of either; what is measured on them says how well they are remembered"
        yield Finding("FT468", message, next(iter(found.values())), help, "warning")


def tokenized(job: Job, name: Literal["train", "eval"]) -> PreparedData:
    """Training or held-out data as token ids."""
    recipe, session = job.recipe, job.session
    sources = recipe.data.train if name == "train" else recipe.data.eval
    prepared = prepare(
        sources,
        recipe.data,
        job.tokenizer,
        job.stops,
        cache_dir=session.cache_dir,
        offline=session.offline,
        reporter=job.reporter,
        vision=job.vision,
    )
    tell_prepared(job, name, prepared)
    return prepared


def tell_prepared(job: Job, name: str, prepared: PreparedData) -> None:
    """Reports what became of the rows."""
    for finding in prepared.findings:
        job.reporter.finding(finding)
    for ledger, cached in zip(prepared.ledgers, prepared.from_cache, strict=True):
        unit = layouts.row(ledger.layout).unit
        job.reporter.info(
            f"data.{name}: {ledger.name}: {ledger.layout}, {ledger.kept_rows // unit:,} of {ledger.made_rows:,} rows, "
            f"{ledger.supervised_tokens:,} of {ledger.tokens:,} tokens trained"
            + (f", {ledger.dropped_rows // unit:,} rows dropped" if ledger.dropped_rows else "")
            + (f", {ledger.truncated_rows:,} rows truncated" if ledger.truncated_rows else "")
            + (" (tokenized earlier)" if cached else "")
        )


def training_epochs(job: Job, prepared: PreparedData) -> Epochs:
    """Makes the epochs of training. Reports mixtures, packing, and data of which little is trained."""
    recipe, epochs = job.recipe, replace(epochs_over(job.recipe, prepared.sequences), stream=prepared.stream)
    weights = None if recipe.data.streaming else recipe.data.weights
    untrained = mostly_untrained(prepared.ledgers, recipe.data.loss_on)
    if untrained is not None:
        job.reporter.finding(untrained)
    for ledger, seen in zip(prepared.ledgers, _seen(epochs, prepared.sequences), strict=True):
        if weights or recipe.data.epochs:
            times = seen / ledger.kept_rows
            job.reporter.info(f"data.train: {ledger.name}: {seen:,} rows an epoch, each seen {times:.2f} times")
    if epochs.packs is not None:
        job.reporter.info(
            f"packing: {len(epochs.packs.rows):,} rows in {len(epochs.packs):,} sequences of up to "
            f"{recipe.data.max_seq_len:,} tokens"
        )
    return epochs


def epochs_over(recipe: Recipe, table: TokenTable) -> Epochs:
    """The epochs of these rows; of a window of a stream, whose sources have their shares of it, each row once."""
    grouped = recipe.train.train_sampling_strategy == "group_by_length"
    return epochs_of(
        table,
        None if recipe.data.streaming else recipe.data.weights,
        packing=recipe.data.packing,
        capacity=recipe.data.max_seq_len,
        seed=recipe.run.seed,
        grouped=recipe.train.per_device_train_batch_size if grouped else 1,
        repeats=recipe.data.epochs,
    )


def computed_with(job: Job, epochs: Epochs, prepared: PreparedData, batches: Batches) -> ComputedTokens:
    """Counts and reports what the first epoch computes in micro-batches of this layout."""
    rows = job.recipe.train.per_device_train_batch_size
    lengths = lengths_once(prepared.sequences) if batches.shares_prompts else prepared.sequences.lengths
    computed = computed_by(epochs, lengths, rows, batches)
    kind = "padding" if batches.layout == "padded" else "filler"
    job.reporter.info(f"batches: {batches.layout} ({batches.reason}), {computed.share:.1%} {kind}")
    if batches.shares_prompts and len(lengths):
        saved = 1 - float(lengths.sum()) / float(prepared.sequences.lengths.sum())
        job.reporter.info(f"shared prompts: {saved:.1%} fewer tokens than with each answer a row of its own")
    return computed


def _seen(epochs: Epochs, table: TokenTable) -> list[int]:
    """Rows of each source in an epoch."""
    if epochs.packs is None:
        return list(epochs.mix.counts)
    starts = np.asarray(table.starts)
    return [int(count) for count in np.histogram(epochs.packs.rows, bins=starts)[0]]


def write_token_counts(
    path: Path, ledgers: Mapping[str, Sequence[DatasetLedger]], epochs: Epochs, computed: ComputedTokens, layout: str
) -> None:
    """Writes tokens.json from the ledgers of each split and what the first epoch computes.

    Raises FtcliError FT723 or FT724 when it cannot be written.
    """
    datasets = [_dataset(split, ledger) for split, some in ledgers.items() for ledger in some]
    store_json(path, {"datasets": datasets, "epoch": _epoch(epochs, computed, layout)})


def _epoch(epochs: Epochs, computed: ComputedTokens, layout: str) -> JsonObject:
    """Sequences and tokens that one epoch computes. A sequence is a row, or several rows when ``packed``.

    ``tokens_padded`` are positions of batches without a token, ``padded_share`` their share of all positions,
    ``tokens_computed``. ``layout`` says whether rows are padded to the longest or laid out without padding, and filled
    up to one of few numbers of tokens; ``shapes`` is the number of different shapes of micro-batches.
    """
    packs = epochs.packs if epochs.packs is not None and len(epochs.packs) < len(epochs.packs.rows) else None
    return {
        "rows": len(epochs) if packs is None else len(packs.rows),
        "sequences": len(epochs),
        "packed": packs is not None,
        "tokens": computed.tokens,
        "tokens_padded": computed.filler,
        "padded_share": computed.share,
        "tokens_computed": computed.tokens + computed.filler,
        "layout": layout,
        "shapes": computed.shapes,
    }


def _dataset(split: str, ledger: DatasetLedger) -> JsonObject:
    """Rows and tokens of one dataset, kept and not.

    ``tokens`` are those of all rows that could be tokenized; ``tokens_kept`` of them are in the batches, of which
    ``tokens_masked`` carry no loss and ``tokens_trained`` do; ``tokens_cut`` were truncated or dropped with their row.
    ``rows_skipped`` were broken, ``skipped_by_code`` says how. Lengths are in tokens, before any cut.
    """
    return {
        "name": ledger.name,
        "split": split,
        "layout": ledger.layout,
        "rows": ledger.rows,
        "rows_kept": ledger.kept_rows,
        "rows_dropped": ledger.dropped_rows,
        "rows_truncated": ledger.truncated_rows,
        "rows_skipped": ledger.bad_rows,
        "skipped_by_code": ledger.bad_codes,
        "tokens": ledger.all_tokens,
        "tokens_kept": ledger.tokens,
        "tokens_cut": ledger.cut_tokens + ledger.dropped_tokens,
        "tokens_masked": ledger.masked_tokens,
        "tokens_trained": ledger.supervised_tokens,
        "longest": ledger.length_quantiles.get("max", 0),
        "length_quantiles": ledger.length_quantiles,
        "counts": ledger.counts,
    }
