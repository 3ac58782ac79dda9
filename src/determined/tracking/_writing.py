"""Writing sealed rows: each gets a checksum over all its columns, and is counted."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from . import _tallies
from ._damage import Damage
from ._rows import CHECKPOINT, EXPERIMENT, REPORT, TRIAL, Layout, Row


def insert_experiment(connection: sa.Connection, values: Mapping[str, Any]) -> int:
    """Store an experiment and return its id."""
    (id,) = insert(connection, EXPERIMENT, [values])
    _tallies.add(connection, _tallies.EXPERIMENTS, 0, 1)
    _tallies.begin(connection, _tallies.TRIALS, id)
    if not values["is_local"]:
        _tallies.begin_all(connection, (_tallies.EVENTS, _tallies.VALIDATIONS, _tallies.RUNNERS), [id])
    return id


def insert_trials(connection: sa.Connection, experiment_id: int, trials: Sequence[Mapping[str, Any]]) -> list[int]:
    """Store trials of an experiment and return their ids."""
    ids = insert(connection, TRIAL, [{**values, "experiment_id": experiment_id} for values in trials])
    if ids:
        _tallies.add(connection, _tallies.TRIALS, experiment_id, len(ids))
        _tallies.begin_all(connection, (_tallies.CHECKPOINTS, _tallies.DELETED), ids)
    return ids


def insert_checkpoint(connection: sa.Connection, values: Mapping[str, Any]) -> None:
    """Store a checkpoint."""
    insert(connection, CHECKPOINT, [values])
    _tallies.add(connection, _tallies.CHECKPOINTS, values["trial_id"], 1)


def insert_reports(connection: sa.Connection, reports: Sequence[dict[str, Any]]) -> None:
    """Store reports of one trial, given as the columns take them."""
    if not reports:
        return
    _number_validations(connection, [report for report in reports if report["experiment_id"] is not None])
    _insert_stored(connection, REPORT, reports)
    # In one order, so that no two writers wait for each other.
    for group, count in sorted(Counter(report["group"] for report in reports).items()):
        _tallies.add(connection, _tallies.METRICS, reports[0]["trial_id"], count, group)


def _number_validations(connection: sa.Connection, reports: Sequence[dict[str, Any]]) -> None:
    """Number the reports that a runner looks for in the order in which they become visible to it."""
    if reports:
        last = _tallies.add_numbered(connection, _tallies.VALIDATIONS, reports[0]["experiment_id"], len(reports))
        for number, report in enumerate(reports, last - len(reports) + 1):
            report["number"] = number


def insert(connection: sa.Connection, layout: Layout, rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Store rows, sealed but not counted, and return their ids: new ones where none is given."""
    stored = [layout.complete(values) for values in rows]
    _insert_stored(connection, layout, stored)
    return [row["id"] for row in stored]


def put(connection: sa.Connection, layout: Layout, values: Mapping[str, Any]) -> None:
    """Store a row under the id that it has, in place of one with that id; it is not counted."""
    table, stored = layout.table, layout.complete(values)
    stored["checksum"] = layout.checksum(stored)
    connection.execute(sa.delete(table).where(table.c.id == stored["id"]))
    connection.execute(sa.insert(table), [stored])


def locked(connection: sa.Connection, layout: Layout, *conditions: sa.ColumnElement[bool]) -> list[Row]:
    """Return the rows to change, which nobody else can change meanwhile."""
    # Not their keys: those who store rows that belong to these lock them, too.
    query = layout.select().where(*conditions).with_for_update(key_share=True)
    return [layout.read(row) for row in connection.execute(query)]


def change(connection: sa.Connection, layout: Layout, row: Row, changes: Mapping[str, Any]) -> None:
    """Replace values of a row that is locked."""
    stored = layout.stored(changes)
    stored["checksum"] = layout.checksum(row.stored | stored)
    table = layout.table
    connection.execute(sa.update(table).where(table.c.id == row.id).values(stored))


def _insert_stored(connection: sa.Connection, layout: Layout, rows: Sequence[dict[str, Any]]) -> None:
    """Store rows that are as the columns take them; they get a checksum, and an id where they have none."""
    if not rows:
        return
    nameless = [row for row in rows if row.get("id") is None]
    for id, row in zip(_new_ids(connection, layout.table, len(nameless)), nameless, strict=True):
        row["id"] = id
    for row in rows:
        row["checksum"] = layout.checksum(row)
    if connection.dialect.name == "sqlite":
        # Past SQLAlchemy's work on each value, none of which needs any: a third of the time.
        statement, in_order = _sqlite_insert(layout)
        connection.exec_driver_sql(statement, [in_order(row) for row in rows])
    else:
        connection.execute(sa.insert(layout.table), rows)


@functools.cache
def _sqlite_insert(layout: Layout) -> tuple[str, Callable[[Mapping[str, Any]], tuple[Any, ...]]]:
    statement = sa.insert(layout.table).compile(dialect=sqlite.dialect())
    return str(statement), operator.itemgetter(*(column.name for column in layout.table.columns))


def _new_ids(connection: sa.Connection, table: sa.Table, count: int) -> Sequence[int]:
    """Return unused ids, which a checksum needs before the rows are stored."""
    if connection.dialect.name == "postgresql":
        sequence = sa.func.pg_get_serial_sequence(table.name, "id")
        several = sa.select(sa.func.nextval(sequence)).select_from(sa.func.generate_series(1, count))
        return connection.execute(several).scalars().all()
    # Nobody else writes to SQLite within this transaction.
    found = [connection.execute(sa.select(sa.func.max(table.c.id))).scalar()]
    if table.dialect_options["sqlite"]["autoincrement"]:
        found.append(connection.execute(_HIGHEST_EVER, {"of_table": table.name}).scalar())
    if not {int, type(None)}.issuperset(map(type, found)):
        raise Damage(f"the highest ids of table {table.name!r} are {found!a}")
    last = max(id or 0 for id in found)
    return range(last + 1, last + 1 + count)


# Where SQLite keeps the highest id that a table ever had, if deleted ones must not come back.
_SEQUENCE = sa.table("sqlite_sequence", sa.column("name", sa.Text), sa.column("seq", sa.Integer))
_HIGHEST_EVER = sa.select(_SEQUENCE.c.seq).where(_SEQUENCE.c.name == sa.bindparam("of_table"))
