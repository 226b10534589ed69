"""tokens.json: what became of every row and token of a run's data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ftcli.data.ledger import DatasetLedger
from ftcli.data.order import Epochs, padding_of
from ftcli.data.tokens import Ints
from ftcli.run.atomic import storage_errors, write_json


def write_tokens(
    path: Path, ledgers: Mapping[str, Sequence[DatasetLedger]], epochs: Epochs, lengths: Ints, batch_size: int
) -> None:
    """Writes ``datasets`` (rows and tokens of each, by split) and ``epoch`` (what one epoch of training holds).

    Raises FtcliError FT723 or FT724 when it cannot be written.
    """
    datasets = [_dataset(split, ledger) for split, some in ledgers.items() for ledger in some]
    with storage_errors(path):
        write_json(path, {"datasets": datasets, "epoch": epoch_account(epochs, lengths, batch_size)})


def epoch_account(epochs: Epochs, lengths: Ints, batch_size: int) -> dict[str, Any]:
    """Rows, sequences, real tokens and padding of the first epoch; ``padded_share`` is of all positions computed."""
    real, padding = padding_of(epochs, lengths, batch_size)
    return {
        "rows": len(epochs) if epochs.packs is None else len(epochs.packs.rows),
        "sequences": len(epochs),
        "packed": epochs.packs is not None,
        "tokens": real,
        "tokens_padded": padding,
        "padded_share": padding / (real + padding),
    }


def _dataset(split: str, ledger: DatasetLedger) -> dict[str, Any]:
    """One data set's account, under the names that reports read."""
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
    }
