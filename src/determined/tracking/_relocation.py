"""A local run whose database was deleted, moved or replaced goes on in the one that is at the path now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from ._changes import TrialRef
from ._data.records import searcher_metric
from ._database import schema as db

_BATCH_SIZE = 1000


def insert(connection: sa.Connection, experiment: Mapping[str, Any], trial: Mapping[str, Any]) -> TrialRef:
    """Store a local experiment with its trial, under new ids where they have none."""
    experiment_id = _insert_row(connection, db.experiments, experiment)
    trial_id = _insert_row(connection, db.trials, {**trial, "experiment_id": experiment_id})
    metric, _ = searcher_metric(experiment["config"]) or (None, True)
    return TrialRef(experiment_id=experiment_id, trial_id=trial_id, metric=metric)


def _insert_row(connection: sa.Connection, table: sa.Table, values: Mapping[str, Any]) -> int:
    return int(connection.execute(sa.insert(table).returning(table.c.id), dict(values)).scalar_one())


def carry_over(source: sa.Connection, target: sa.Connection, of: TrialRef) -> TrialRef:
    """Store in the target what it lacks of a local run, and return where that is; its ids stay the same if possible."""
    experiment, trial = _row(source, db.experiments, of.experiment_id), _row(source, db.trials, of.trial_id)
    if (there := _row(target, db.trials, of.trial_id)) and _is_same(there, trial):
        carried = of
    else:
        of_experiment = _with_free_id(target, db.experiments, experiment)
        carried = insert(target, of_experiment, _with_free_id(target, db.trials, trial))
    _copy_reports(source, target, of, carried)
    _copy_checkpoints(source, target, of.trial_id, carried.trial_id)
    return carried


def _copy_reports(source: sa.Connection, target: sa.Connection, of: TrialRef, carried: TrialRef) -> None:
    """Copy all but those that are there already, which are the first ones."""
    columns = db.metrics.c
    count = sa.select(sa.func.count()).where(columns.trial_id == carried.trial_id)
    after = target.execute(count).scalar_one()
    query = sa.select(db.metrics).where(columns.trial_id == of.trial_id).order_by(columns.id).limit(_BATCH_SIZE)
    while rows := source.execute(query.offset(after)).all():
        target.execute(sa.insert(db.metrics), [_carried_report(row._asdict(), carried) for row in rows])
        after += len(rows)


def _carried_report(row: Mapping[str, Any], carried: TrialRef) -> dict[str, Any]:
    experiment_id = None if row["experiment_id"] is None else carried.experiment_id
    return _without_id(row) | {"trial_id": carried.trial_id, "experiment_id": experiment_id}


def _copy_checkpoints(source: sa.Connection, target: sa.Connection, trial_id: int, new_trial_id: int) -> None:
    uuid = db.checkpoints.c.uuid
    query = sa.select(db.checkpoints).where(db.checkpoints.c.trial_id == trial_id).order_by(db.checkpoints.c.id)
    for row in source.execute(query):
        if target.execute(sa.select(uuid).where(uuid == row.uuid)).one_or_none() is None:
            target.execute(sa.insert(db.checkpoints), _without_id(row._asdict()) | {"trial_id": new_trial_id})


def _row(connection: sa.Connection, table: sa.Table, id: int) -> dict[str, Any]:
    row = connection.execute(sa.select(table).where(table.c.id == id)).one_or_none()
    return {} if row is None else row._asdict()


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("experiment_id", "started", "pid", "seed"))


def _with_free_id(target: sa.Connection, table: sa.Table, row: Mapping[str, Any]) -> dict[str, Any]:
    return _without_id(row) if _row(target, table, row["id"]) else dict(row)


def _without_id(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "id"}
