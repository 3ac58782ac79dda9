"""Rows as they are stored: values to and from columns, and the checksum that tells when a row has changed by itself."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa

from determined._text import bounded

from . import _schema
from ._damage import Damage
from ._json import decode_document, encode_document

_MOMENTS = (-62_135_510_400, 253_402_214_400)  # the years 1 to 9999, less a day for time zones
LONGEST_GROUP = 400  # characters; databases cannot index names of any length


class Layout:
    """How the rows of one table are stored."""

    def __init__(self, table: sa.Table) -> None:
        self.table = table
        columns = [column for column in table.columns if column.name != "checksum"]
        self._names = [column.name for column in table.columns]
        self._first = [column.name for column in columns if not column.info.get("is_new")]
        self._new = [column.name for column in columns if column.info.get("is_new")]
        self.documents = {column.name: kind for column in columns if (kind := _document(column)) is not None}
        self._store = {column.name: _storing(column) for column in columns}
        self._accept = [(column.name, _accepting(column), bool(column.nullable)) for column in columns]
        # Without the types' own conversions, which raise what they please when a value is none of theirs.
        self._raw: list[sa.Label[Any]] = [
            sa.type_coerce(column, sa.types.NullType()).label(column.name) for column in table.columns
        ]

    def stored(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values as the columns take them."""
        return {name: None if value is None else self._store[name](value) for name, value in values.items()}

    def complete(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values of a new row as the columns take them, with None for those that are not given."""
        return dict.fromkeys(self._names) | self.stored(values)

    def checksum(self, stored: Mapping[str, Any]) -> int:
        """Return the checksum over all columns of a row; those without a value count as NULL.

        Columns that a table got later count where they have a value, so that rows from before keep their checksum.
        """
        new = [(name, value) for name in self._new if (value := stored.get(name)) is not None]
        # In ASCII, since what `repr` escapes depends on the version of Python.
        text = ascii((self.table.name, *map(stored.get, self._first), *new))
        return zlib.crc32(text.encode())

    def select(self) -> sa.Select[Any]:
        """Return the query of all rows, for `read`."""
        query: sa.Select[Any] = sa.select(*self._raw)
        return query

    def read(self, row: sa.Row[Any]) -> Row:
        """Return a row that was selected; `Damage` if it is not what was stored."""
        values = dict(zip(self._names, row, strict=True))
        checksum = values.pop("checksum", None)
        found = Row(self, values, checksum is not None)
        for name, accept, is_optional in self._accept:
            value = values[name]
            if value is not None or not is_optional:
                try:
                    values[name] = accept(value)
                except (ValueError, OverflowError) as error:
                    raise found.damage(name, value) from error
        if checksum is not None and checksum != self.checksum(values):
            raise Damage(f"{found} does not match its checksum")
        return found

    def named(self, values: Mapping[str, Any]) -> str:
        """Return how messages call a row."""
        return f"row {values.get('id')!a} of table {self.table.name!r}"


class Row:
    """An undamaged row; its attributes are the values of its columns."""

    __slots__ = ("_layout", "is_sealed", "stored")

    def __init__(self, layout: Layout, stored: dict[str, Any], is_sealed: bool) -> None:
        self._layout = layout
        self.stored = stored
        self.is_sealed = is_sealed

    def __str__(self) -> str:
        return self._layout.named(self.stored)

    def __getattr__(self, name: str) -> Any:
        value = self.stored[name]
        kind = self._layout.documents.get(name)
        return value if kind is None or value is None else self._decoded(name, value, kind)

    def _decoded(self, name: str, text: str, kind: type) -> Any:
        try:
            value = decode_document(text)
        except (ValueError, RecursionError) as error:
            raise self.damage(name, text) from error
        if not isinstance(value, kind):
            raise self.damage(name, text)
        return value

    def damage(self, name: str, value: Any) -> Damage:
        """Return the exception that says that a value makes no sense."""
        return Damage(f"{self} has {_brief(value)} as {name!r}")


def storable_text(value: Any) -> str:
    """Return text from anywhere as databases take it: lone surrogates and NUL become escapes."""
    text = str(value)
    if text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def storable_group(value: Any) -> str:
    """Return the name of a group as it is stored: the end of a very long one is replaced by its checksum."""
    return bounded(storable_text(value), LONGEST_GROUP)


def _document(column: sa.Column[Any]) -> type | None:
    """Return what the JSON of a column must be; None for columns that hold none."""
    match column.type:
        case _schema.JsonText():
            return dict
        case _schema.JsonList():
            return list
    return None


def _storing(column: sa.Column[Any]) -> Callable[[Any], Any]:
    """Return what makes a value, which is not None, one of a column."""
    match column.type:
        case _schema.JsonText() | _schema.JsonList():
            return encode_document
        case sa.Boolean():
            return bool
        case sa.Integer():
            return int
        case sa.Float():
            return _storable_float
    return storable_group if column.name == "group" else storable_text


def _storable_float(value: Any) -> float:
    return float(value) + 0.0  # databases need not tell the negative zero from the other


def _accepting(column: sa.Column[Any]) -> Callable[[Any], Any]:
    """Return what turns a value from the database into what was stored, or raises `ValueError` if it cannot be that."""
    match column.type:
        case sa.Boolean():
            return _boolean
        case sa.Integer():
            return _integer
        case _schema.Moment():
            return _moment
        case sa.Float():
            return _number
    return _text


def _boolean(value: Any) -> bool:
    if value not in (0, 1) or isinstance(value, float):
        raise ValueError
    return bool(value)


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError
    return float(value)


def _moment(value: Any) -> float:
    number = _number(value)
    if not _MOMENTS[0] < number < _MOMENTS[1]:
        raise ValueError
    return number


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError
    return value


def _brief(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


EXPERIMENT = Layout(_schema.experiments)
TRIAL = Layout(_schema.trials)
REPORT = Layout(_schema.metrics)
CHECKPOINT = Layout(_schema.checkpoints)
EVENT = Layout(_schema.events)
SNAPSHOT = Layout(_schema.snapshots)
RUN = Layout(_schema.runs)
RUNNER = Layout(_schema.runners)
LEASE = Layout(_schema.leases)
MODEL = Layout(_schema.models)
VERSION = Layout(_schema.versions)
