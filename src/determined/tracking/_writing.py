"""Writing sealed rows: each gets a checksum over all its columns, and is counted."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from . import _tallies
from ._json import encode_json
from ._messages import MetricReport
from ._rows import CHECKPOINT, EXPERIMENT, REPORT, TRIAL, Layout, Row, storable_group


def insert_experiment(connection: sa.Connection, values: Mapping[str, Any]) -> int:
    """Store an experiment and return its id."""
    id = _insert(connection, EXPERIMENT, values)
    _tallies.add(connection, _tallies.EXPERIMENTS, 0, 1)
    _tallies.begin(connection, _tallies.TRIALS, id)
    return id


def insert_trial(connection: sa.Connection, values: Mapping[str, Any]) -> int:
    """Store a trial and return its id."""
    id = _insert(connection, TRIAL, values)
    _tallies.add(connection, _tallies.TRIALS, values["experiment_id"], 1)
    _tallies.begin(connection, _tallies.CHECKPOINTS, id)
    _tallies.begin(connection, _tallies.DELETED, id)
    return id


def insert_checkpoint(connection: sa.Connection, values: Mapping[str, Any]) -> None:
    """Store a checkpoint."""
    _insert(connection, CHECKPOINT, values)
    _tallies.add(connection, _tallies.CHECKPOINTS, values["trial_id"], 1)


def stored_report(trial_id: int, report: MetricReport) -> dict[str, Any]:
    """Return a report as the columns take it."""
    # Spelled out, because there are far more of these than of all other rows.
    return {
        "trial_id": trial_id,
        "group": storable_group(report.group),
        "steps_completed": int(report.steps_completed),
        "time": float(report.time) + 0.0,
        "metrics": encode_json(report.metrics),
    }


def insert_reports(connection: sa.Connection, reports: Sequence[dict[str, Any]]) -> None:
    """Store reports of one trial, given as the columns take them."""
    if not reports:
        return
    table = REPORT.table
    for id, report in zip(_new_ids(connection, table, len(reports)), reports, strict=True):
        report["id"] = id
        report["checksum"] = REPORT.checksum(report)
    _insert_many(connection, reports)
    # In one order, so that no two writers wait for each other.
    for group, count in sorted(Counter(report["group"] for report in reports).items()):
        _tallies.add(connection, _tallies.METRICS, reports[0]["trial_id"], count, group)


def _insert_many(connection: sa.Connection, reports: Sequence[dict[str, Any]]) -> None:
    if connection.dialect.name == "sqlite":
        # Past SQLAlchemy's work on each value, none of which needs any: a third of the time.
        connection.exec_driver_sql(str(_SQLITE_INSERT), [_in_order(report) for report in reports])
    else:
        connection.execute(sa.insert(REPORT.table), reports)


_SQLITE_INSERT = sa.insert(REPORT.table).compile(dialect=sqlite.dialect())
_in_order = operator.itemgetter(*(column.name for column in REPORT.table.columns))


def locked(connection: sa.Connection, layout: Layout, condition: sa.ColumnElement[bool]) -> list[Row]:
    """Return the rows to change, which nobody else can change meanwhile."""
    # Not their keys: those who store rows that belong to these lock them, too.
    query = layout.select().where(condition).with_for_update(key_share=True)
    return [layout.read(row) for row in connection.execute(query)]


def change(connection: sa.Connection, layout: Layout, row: Row, changes: Mapping[str, Any]) -> None:
    """Replace values of a row that is locked."""
    stored = layout.stored(changes)
    stored["checksum"] = layout.checksum(row.stored | stored)
    table = layout.table
    connection.execute(sa.update(table).where(table.c.id == row.id).values(stored))


def _insert(connection: sa.Connection, layout: Layout, values: Mapping[str, Any]) -> int:
    table, stored = layout.table, layout.stored(values)
    id = int(connection.execute(sa.insert(table).values(stored).returning(table.c.id)).scalar_one())
    checksum = layout.checksum({**stored, "id": id})
    connection.execute(sa.update(table).where(table.c.id == id).values(checksum=checksum))
    return id


def _new_ids(connection: sa.Connection, table: sa.Table, count: int) -> Sequence[int]:
    """Return unused ids, which a checksum needs before the rows are stored."""
    if connection.dialect.name == "postgresql":
        sequence = sa.func.pg_get_serial_sequence(table.name, "id")
        several = sa.select(sa.func.nextval(sequence)).select_from(sa.func.generate_series(1, count))
        return connection.execute(several).scalars().all()
    # Nobody else writes to SQLite within this transaction.
    first = (connection.execute(sa.select(sa.func.max(table.c.id))).scalar() or 0) + 1
    return range(first, first + count)
