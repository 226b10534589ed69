"""The answer of commands for a run that is there already, and tokens.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftcli.config.recipe import Recipe
from ftcli.data.ledger import DatasetLedger
from ftcli.data.order import ComputedTokens, Epochs
from ftcli.plain import JsonObject
from ftcli.reporting import Session
from ftcli.run.atomic import store_json


@dataclass(frozen=True, slots=True)
class CompleteRun:
    """The run is there already: nothing was done."""

    run: str
    already_complete: bool = True


def complete_result(recipe: Recipe, session: Session) -> CompleteRun:
    """The answer when the run is there already."""
    path = Path(str(recipe.run.output_dir))
    session.reporter.info(
        f"{path} holds the finished run of this recipe; use --resume never to train again (the old run is kept)"
    )
    return CompleteRun(str(path))


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
