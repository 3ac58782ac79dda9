"""Reading within one transaction: what comes back is complete and undamaged, or `Damage` is raised."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from . import _schema, _tallies
from ._damage import Damage
from ._messages import CheckpointState, MetricReport
from ._rows import CHECKPOINT, EXPERIMENT, REPORT, TRIAL, Layout, Row, storable_group, storable_text
from ._tallies import CHECKPOINTS, DELETED, EXPERIMENTS, METRICS, TRIALS, Key, Tally

_METRICS = _schema.metrics


class Reader:
    """Reads rows by id or by what they belong to, in the order of their ids."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    def experiments(self, limit: int | None = None) -> list[Row]:
        """Return all experiments, or as many of the newest."""
        ids = sorted(self._connection.execute(sa.select(_schema.experiments.c.id)).scalars())
        tallies = self._tallies(EXPERIMENTS, [0])
        if len(set(ids)) != tallies[0, ""].count:
            raise Damage(f"it has {len(set(ids))} experiments where {tallies[0, ''].count} were stored")
        chosen = ids[len(ids) - limit :] if limit is not None and limit < len(ids) else ids
        rows = self._rows(EXPERIMENT, _schema.experiments.c.id, chosen)
        if [row.id for row in rows] != chosen:
            raise Damage(f"{len(chosen) - len(rows)} of the last {len(chosen)} experiments cannot be found")
        _tallies.require_seals([((0, ""), row) for row in rows], tallies)
        return rows

    def experiment(self, id: int) -> Row | None:
        """Return one experiment, if there is one of that id."""
        rows = self._rows(EXPERIMENT, _schema.experiments.c.id, [id])
        _tallies.require_seals([((0, ""), row) for row in rows], self._tallies(EXPERIMENTS, [0]))
        return rows[0] if rows else None

    def trials(self, experiment_ids: Collection[int] | None = None) -> list[Row]:
        """Return the trials of experiments, or all."""
        owners = [row.id for row in self.experiments()] if experiment_ids is None else experiment_ids
        return self._owned(TRIALS, TRIAL, _schema.trials.c.experiment_id, owners)

    def trial(self, id: int) -> Row | None:
        """Return one trial, if there is one of that id."""
        rows = self._rows(TRIAL, _schema.trials.c.id, [id])
        for row in rows:
            owner = row.experiment_id
            _tallies.require_seals([((owner, ""), row)], self._tallies(TRIALS, [owner]))
        return rows[0] if rows else None

    def checkpoints(self, trial_ids: Collection[int]) -> list[Row]:
        """Return the checkpoints of trials."""
        rows = self._owned(CHECKPOINTS, CHECKPOINT, _schema.checkpoints.c.trial_id, trial_ids)
        deleted = [((row.trial_id, ""), row) for row in rows if row.state == CheckpointState.DELETED]
        _tallies.verify("deleted checkpoints", deleted, self._tallies(DELETED, trial_ids))
        return rows

    def checkpoint_counts(self, trial_ids: Collection[int]) -> dict[int, int]:
        """Return how many checkpoints each trial has that are not deleted."""
        saved, deleted = (self._tallies(kind, trial_ids) for kind in (CHECKPOINTS, DELETED))
        return {owner: tally.count - deleted[owner, ""].count for (owner, _), tally in saved.items()}

    def checkpoint(self, uuid: str) -> Row | None:
        """Return one checkpoint by its id; None if there is none, or if what is damaged is the index of ids."""
        for row in self._rows(CHECKPOINT, _schema.checkpoints.c.uuid, [storable_text(uuid)]):
            if row.uuid == storable_text(uuid):
                _tallies.require_seals([((row.trial_id, ""), row)], self._tallies(CHECKPOINTS, [row.trial_id]))
                return row
        return None

    def all_checkpoints(self) -> list[Row]:
        """Return the checkpoints of all trials."""
        return self.checkpoints([trial.id for trial in self.trials()])

    def reports(self, trial_ids: Collection[int], group: str | None = None) -> dict[int, list[MetricReport]]:
        """Return the reports of trials, of one group or of all, by trial; in the order of their steps."""
        stored = None if group is None else storable_group(group)
        of_rows, of_tallies = ([] if stored is None else [t.c.group == stored] for t in (_METRICS, _schema.tallies))
        rows = self._rows(REPORT, _METRICS.c.trial_id, trial_ids, *of_rows)
        tallies = _tallies.read(self._connection, METRICS, trial_ids, *of_tallies)
        _tallies.verify(METRICS, [((row.stored["trial_id"], row.stored["group"]), row) for row in rows], tallies)
        by_trial: dict[int, list[MetricReport]] = {id: [] for id in trial_ids}
        for row in sorted(rows, key=lambda row: (row.stored["steps_completed"], row.stored["id"])):
            by_trial[row.trial_id].append(_report(row))
        return by_trial

    def _owned(self, kind: str, layout: Layout, column: sa.Column[Any], owners: Collection[int]) -> list[Row]:
        rows = self._rows(layout, column, owners)
        keyed = [((row.stored[column.name], ""), row) for row in rows]
        _tallies.verify(kind, keyed, self._tallies(kind, owners))
        return rows

    def _tallies(self, kind: str, owners: Collection[int]) -> dict[Key, Tally]:
        found = _tallies.read(self._connection, kind, owners)
        for owner in owners:
            if (owner, "") not in found:
                raise Damage(f"the tally of the {kind} of {owner} is gone")
        return found

    def _rows(
        self, layout: Layout, column: sa.Column[Any], values: Collection[Any], *conditions: sa.ColumnElement[bool]
    ) -> list[Row]:
        """Return the rows in whose column is one of the values."""
        found: list[Row] = []
        for condition in _tallies.among(column, values):
            found += map(layout.read, self._connection.execute(layout.select().where(condition, *conditions)))
        return sorted(found, key=lambda row: int(row.stored["id"]))


def _report(row: Row) -> MetricReport:
    stored = row.stored
    steps, time = stored["steps_completed"], stored["time"]
    return MetricReport(group=stored["group"], steps_completed=steps, metrics=row.metrics, time=time)


class NoReader(Reader):
    """Finds nothing: what reads a database that is not there."""

    def __init__(self) -> None:
        """Need no connection."""

    def experiments(self, limit: int | None = None) -> list[Row]:
        """Return nothing."""
        return []

    def _tallies(self, kind: str, owners: Collection[int]) -> dict[Key, Tally]:
        return {}

    def _rows(
        self, layout: Layout, column: sa.Column[Any], values: Collection[Any], *conditions: sa.ColumnElement[bool]
    ) -> list[Row]:
        return []
