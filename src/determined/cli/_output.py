"""How `det` shows things: tables for people, JSON and CSV for programs."""

from __future__ import annotations

import csv
import dataclasses
import enum
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from determined import _text, tracking
from determined.experiment.wording import MAX_CELL, cell, masked, when

_TIMES = ("started", "ended", "time", "created", "updated")
_PIPE_WIDTH = 1000  # columns of a table that no terminal cuts off


class Format(enum.Enum):
    """How to print a listing."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def chosen_format(json: bool, csv: bool) -> Format:
    """Return the format that the options ask for; both at once is a usage error."""
    if json and csv:
        raise typer.BadParameter("--json and --csv exclude each other; give one of them.")
    if json:
        return Format.JSON
    return Format.CSV if csv else Format.TABLE


def plain(value: Any, limit: int = MAX_CELL) -> str:
    """Return a string of bounded length for a terminal, with control characters escaped."""
    return _text.plain(value, limit)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None) -> None:
    """Print rows under their column names; numbers are right-aligned."""
    from rich import box, table, text

    grid = table.Table(box=box.SIMPLE_HEAD, title=text.Text(plain(title)) if title else None)
    grid.title_justify = "left"
    for index, name in enumerate(columns):
        is_numeric = all(isinstance(row[index], int | float | None) for row in rows)
        # Text, not str: a name such as "[red]" is a name, not markup.
        grid.add_column(text.Text(plain(name)), justify="right" if is_numeric else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(text.Text(cell(value)) for value in row))
    _print(grid)


def print_fields(fields: Mapping[str, Any]) -> None:
    """Print names and values in two columns."""
    from rich import table, text

    grid = table.Table(box=None, show_header=False, pad_edge=False)
    for name, value in fields.items():
        grid.add_row(text.Text(plain(name), style="bold"), text.Text(cell(value)))
    _print(grid)


def _print(renderable: Any) -> None:
    from rich import console

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    console.Console(width=width, highlight=False, soft_wrap=False).print(renderable)


def print_csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a header and rows; numbers in full, mappings as JSON, an empty field for None."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([plain(name) for name in columns])
    writer.writerows([[_csv_field(value) for value in row] for row in rows])


def _csv_field(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, Mapping | list | tuple):
        return tracking.encode_json(value)
    return plain(value, limit=sys.maxsize)


def print_json(value: Any) -> None:
    """Print a value, which may contain records, as JSON; NaN and infinities are strings."""
    typer.echo(tracking.encode_json(as_data(value), indent=2))


def print_listing(
    format: Format, columns: Sequence[str], rows: Sequence[Sequence[Any]], records: Sequence[Any]
) -> None:
    """Print rows as a table or CSV, or the records they were made of as JSON."""
    if format is Format.JSON:
        print_json(records)
    elif format is Format.CSV:
        print_csv(columns, rows)
    else:
        print_table(columns, rows)


def as_data(value: Any) -> Any:
    """Return records as plain data, with ISO times, and `is_lost` where they have it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        data = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if hasattr(value, "is_lost"):
            data["is_lost"] = value.is_lost
        return {name: _dated(name, item) for name, item in data.items()}
    if isinstance(value, Mapping):
        return {key: as_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_data(item) for item in value]
    return value


def _dated(name: str, value: Any) -> Any:
    if name == "config":
        return masked(value)
    return when(value) if name in _TIMES else as_data(value)


def print_left_out(names: Sequence[str]) -> None:
    """Print which metrics were left out of a plot."""
    if names:
        typer.echo(f"Not plotted, for lack of space: {plain(', '.join(names), 1000)}", err=True)


def open_records() -> tracking.TrackingReader:
    """Return the records in the home folder."""
    from determined import _home

    return tracking.TrackingReader(_home.home().database)
