"""A database file that is deleted, moved or replaced while it is in use.

A connection to it goes on to work: what it writes is where nobody will look for it, and what is there can still be
read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import sqlalchemy as sa

from determined import errors

from . import _database, _schema, _tallies, _writing
from ._changes import TrialRef
from ._messages import CheckpointState
from ._rows import CHECKPOINT, EXPERIMENT, REPORT, TRIAL, Layout, Row

_AT_ONCE = 1000
_METRICS, _CHECKPOINTS = _schema.metrics, _schema.checkpoints


class OpenFile:
    """The file of a database that has just been opened; a server has none, which never moves."""

    def __init__(self, url: sa.URL) -> None:
        self._path = _database.file_of(url)
        self._identity = self._current()

    @property
    def has_moved(self) -> bool:
        """Whether the path now leads to another file, or to none."""
        return self._current() != self._identity

    def require_in_place(self) -> None:
        """Raise `TrackingException` if what is stored would not be at the path."""
        if self.has_moved:
            raise errors.TrackingException(
                f"the tracking database {str(self._path)!r} was deleted, moved or replaced while it was in use; put it "
                "back. Checkpoints are not affected."
            )

    def _current(self) -> tuple[int, int] | None:
        try:
            found = None if self._path is None else os.stat(self._path)
        except OSError:
            return None
        return None if found is None else (found.st_dev, found.st_ino)


def carry_over(source: sa.Connection, target: sa.Connection, of: TrialRef) -> TrialRef:
    """Store in the target what it lacks of a local run, and return where that is; its ids stay the same if possible."""
    (experiment,) = _rows(source, EXPERIMENT, _schema.experiments.c.id == of.experiment_id)
    (trial,) = _rows(source, TRIAL, _schema.trials.c.id == of.trial_id)
    known = [row for row in _rows(target, TRIAL, _schema.trials.c.id == of.trial_id) if _is_same(row, trial)]
    recorded = of if known else _insert(target, experiment, trial)
    stored = sa.select(sa.func.count()).where(_METRICS.c.trial_id == recorded.trial_id)
    count = target.execute(stored).scalar_one()
    for reports in _reports(source, of.trial_id, after=count):
        changes = {"id": None, "trial_id": recorded.trial_id}
        _writing.insert_reports(target, [row.stored | changes for row in reports])
    for row in _rows(source, CHECKPOINT, _CHECKPOINTS.c.trial_id == of.trial_id):
        if not _rows(target, CHECKPOINT, _CHECKPOINTS.c.uuid == row.uuid):
            _writing.insert_checkpoint(target, _values(row) | {"trial_id": recorded.trial_id})
            if row.state == CheckpointState.DELETED:
                _tallies.add(target, _tallies.DELETED, recorded.trial_id, 1)
    return recorded


def _insert(target: sa.Connection, experiment: Row, trial: Row) -> TrialRef:
    experiment_id = _writing.insert_experiment(target, _values(experiment, _free(target, EXPERIMENT, experiment)))
    (trial_id,) = _writing.insert_trials(target, experiment_id, [_values(trial, _free(target, TRIAL, trial))])
    return TrialRef(experiment_id=experiment_id, trial_id=trial_id)


def _free(target: sa.Connection, layout: Layout, row: Row) -> int | None:
    """Return the id of a row unless another one has it there."""
    taken = target.execute(sa.select(layout.table.c.id).where(layout.table.c.id == row.id)).first()
    return None if taken else int(row.id)


def _is_same(one: Row, other: Row) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in ("experiment_id", "started", "pid", "seed"))


def _rows(connection: sa.Connection, layout: Layout, condition: sa.ColumnElement[bool]) -> list[Row]:
    query = layout.select().where(condition).order_by(layout.table.c.id)
    return [layout.read(row) for row in connection.execute(query)]


def _reports(connection: sa.Connection, trial_id: int, after: int) -> Iterator[list[Row]]:
    """Yield the reports of a trial but for the first ones, some at a time."""
    query = REPORT.select().where(_METRICS.c.trial_id == trial_id).order_by(_METRICS.c.id).limit(_AT_ONCE)
    while rows := [REPORT.read(row) for row in connection.execute(query.offset(after))]:
        yield rows
        after += len(rows)


def _values(row: Row, id: int | None = None) -> dict[str, object]:
    return {name: getattr(row, name) for name in row.stored} | {"id": id}
