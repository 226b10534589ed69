"""The meaning of a row: each layout of ``ftcli.tables.layouts`` has code here that turns its rows into examples."""

from __future__ import annotations

from ftcli.errors import Finding, FtcliError
from ftcli.rows.columns import has_label, mapping, other_method
from ftcli.rows.row import Example, Misfit, Row, column_names, data_error
from ftcli.tables import code_of, layouts, methods


def layout_of(row: Row, requested: str) -> str:
    """The layout that ``data.format`` asks for; under `auto` the one that the columns of ``row`` fit.

    Raises FtcliError FT411 when no layout fits, naming the columns found and those expected.
    """
    if requested != "auto":
        return requested
    found = layouts.detect(row.fields)
    if found is None:
        raise _unknown(row)
    return found


def understand(row: Row, layout: str) -> Example:
    """The row as an example. Raises Misfit with the reason when it does not fit ``layout``."""
    known = layouts.row(layout)
    if known.renamed is not None:
        row = code_of(known.renamed)(row)
    missing = [name for name in known.columns if name not in row.fields]
    if missing:
        raise Misfit(f"column {missing[0]!r} is missing{'' if known.imitated else meant_for(row)}")
    example: Example = code_of(known.code)(row)
    return example


def meant_for(row: Row) -> str:
    """Help for a row of another method: answers with a label, or one to imitate."""
    if has_label(row.fields):
        return "; rows with a label are for `train.method: kto`"
    found = layouts.detect(row.fields)
    return (
        "" if found is None else f"; rows with {' and '.join(layouts.row(found).columns)} are for `train.method: sft`"
    )


def misfit_finding(row: Row, misfit: Misfit, layout: str) -> Finding:
    """FT412: why the row does not fit."""
    return Finding("FT412", f"{misfit} (format {layout})", row.origin)


def _unknown(row: Row) -> FtcliError:
    """FT411, with the mapping that the names of the columns suggest, or the method that they are meant for."""
    named, other, guess = column_names(row.fields), other_method(row.fields), mapping(row.fields)
    if other is not None:
        help = methods.offered(other[1])
        help += f"; to train on the chosen answers, write `columns: {guess}` beside `path`" if guess else ""
        return data_error("FT411", f"the columns {named} are {other[0]}", row.origin, help)
    known = ((name, layout.columns) for name, layout in layouts.TABLE.items() if layout.columns)
    expected = "; ".join(f"{name}: {', '.join(columns)}" for name, columns in known)
    rename = f"write `columns: {guess}` beside `path`" if guess else "rename columns with `columns`"
    help = f"{rename}; expected one of {expected}"
    return data_error("FT411", f"the columns {named} fit no known layout", row.origin, help=help)
