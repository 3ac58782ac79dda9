"""Reading within one transaction: what comes back is complete and undamaged, or `Damage` is raised."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import sqlalchemy as sa

from . import _runs, _schema, _tallies
from ._damage import Damage
from ._messages import CheckpointState, MetricReport
from ._rows import CHECKPOINT, EXPERIMENT, REPORT, RUN, RUNNER, TRIAL, Layout, Row, storable_group, storable_text
from ._tallies import CHECKPOINTS, DELETED, EXPERIMENTS, METRICS, RUNNERS, RUNS, TRIALS, Key, Tally

_METRICS = _schema.metrics
_AT_ONCE = 200


class Reader:
    """Reads rows by id or by what they belong to, in the order of their ids."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    def experiments(self, limit: int | None = None, *, with_archived: bool = True) -> list[Row]:
        """Return all experiments, or as many of the newest."""
        ids = self.ids(_schema.experiments)
        tallies = self.tallies(EXPERIMENTS, [0])
        if len(set(ids)) != tallies[0, ""].count:
            raise Damage(f"it has {len(set(ids))} experiments where {tallies[0, ''].count} were stored")
        found: list[Row] = []
        for row in self._from_newest(ids, tallies):
            if limit is not None and len(found) >= limit:
                break
            if with_archived or not row.archived:
                found.append(row)
        return found[::-1]

    def _from_newest(self, ids: list[int], tallies: dict[Key, Tally]) -> Iterator[Row]:
        for end in range(len(ids), 0, -_AT_ONCE):
            chosen = ids[max(end - _AT_ONCE, 0) : end]
            rows = self.rows(EXPERIMENT, _schema.experiments.c.id, chosen)
            if [row.id for row in rows] != chosen:
                raise Damage(f"{len(chosen) - len(rows)} of {len(chosen)} experiments cannot be found")
            _tallies.require_seals([((0, ""), row) for row in rows], tallies)
            yield from reversed(rows)

    def experiment(self, id: int) -> Row | None:
        """Return one experiment, if there is one of that id."""
        rows = self.rows(EXPERIMENT, _schema.experiments.c.id, [id])
        _tallies.require_seals([((0, ""), row) for row in rows], self.tallies(EXPERIMENTS, [0]))
        return rows[0] if rows else None

    def runners(self, experiment_ids: Collection[int]) -> dict[int, Row]:
        """Return who runs which of these experiments, all of which are driven."""
        return {row.id: row for row in self.owned(RUNNERS, RUNNER, _schema.runners.c.id, experiment_ids)}

    def trials(self, experiment_ids: Collection[int] | None = None) -> list[Row]:
        """Return the trials of experiments, or all."""
        owners = [row.id for row in self.experiments()] if experiment_ids is None else experiment_ids
        return self.owned(TRIALS, TRIAL, _schema.trials.c.experiment_id, owners)

    def trial(self, id: int) -> Row | None:
        """Return one trial, if there is one of that id."""
        rows = self.rows(TRIAL, _schema.trials.c.id, [id])
        for row in rows:
            owner = row.experiment_id
            _tallies.require_seals([((owner, ""), row)], self.tallies(TRIALS, [owner]))
        return rows[0] if rows else None

    def runs(self, trials: Collection[Row]) -> dict[int, list[Row]]:
        """Return the runs of trials by trial, in their order."""
        by_trial: dict[int, list[Row]] = {trial.id: [] for trial in trials}
        driven = [trial.id for trial in trials if trial.run_id is not None]
        for run in self.rows(RUN, _schema.runs.c.trial_id, driven):
            if run.trial_id not in by_trial:
                raise run.damage("trial_id", run.trial_id)
            by_trial[run.trial_id].append(_tallies.require_seal(self._connection, RUNS, run))
        for trial in trials:
            by_trial[trial.id].sort(key=lambda run: int(run.run_id))
            _runs.require_complete(trial, by_trial[trial.id])
        return by_trial

    def checkpoints(self, trial_ids: Collection[int]) -> list[Row]:
        """Return the checkpoints of trials."""
        rows = self.owned(CHECKPOINTS, CHECKPOINT, _schema.checkpoints.c.trial_id, trial_ids)
        deleted = [((row.trial_id, ""), row) for row in rows if row.state == CheckpointState.DELETED]
        _tallies.verify("deleted checkpoints", deleted, self.tallies(DELETED, trial_ids))
        return rows

    def checkpoint_counts(self, trial_ids: Collection[int]) -> dict[int, int]:
        """Return how many checkpoints each trial has that are not deleted."""
        saved, deleted = (self.tallies(kind, trial_ids) for kind in (CHECKPOINTS, DELETED))
        return {owner: tally.count - deleted[owner, ""].count for (owner, _), tally in saved.items()}

    def checkpoint(self, uuid: str) -> Row | None:
        """Return one checkpoint by its id; None if there is none, or if what is damaged is the index of ids."""
        for row in self.rows(CHECKPOINT, _schema.checkpoints.c.uuid, [storable_text(uuid)]):
            if row.uuid == storable_text(uuid):
                _tallies.require_seals([((row.trial_id, ""), row)], self.tallies(CHECKPOINTS, [row.trial_id]))
                return row
        return None

    def all_checkpoints(self) -> list[Row]:
        """Return the checkpoints of all trials."""
        return self.checkpoints([trial.id for trial in self.trials()])

    def reports(self, trials: Collection[Row], group: str | None = None) -> dict[int, list[MetricReport]]:
        """Return the reports of trials that stand, of one group or of all, by trial; in the order of their steps."""
        standing = self.standing(trials, group)
        return {id: [_report(row) for row in sorted(rows, key=_by_step)] for id, rows in standing.items()}

    def standing(self, trials: Collection[Row], group: str | None = None) -> dict[int, list[Row]]:
        """Return the reports of trials by trial, without those that a later run of the trial has replaced."""
        runs = self.runs(trials)
        by_trial: dict[int, list[Row]] = {id: [] for id in runs}
        for row in self._all_reports(list(runs), group):
            by_trial[row.stored["trial_id"]].append(row)
        return {id: _runs.standing(rows, runs[id]) for id, rows in by_trial.items()}

    def _all_reports(self, trial_ids: Collection[int], group: str | None) -> list[Row]:
        stored = None if group is None else storable_group(group)
        of_rows, of_tallies = ([] if stored is None else [t.c.group == stored] for t in (_METRICS, _schema.tallies))
        rows = self.rows(REPORT, _METRICS.c.trial_id, trial_ids, *of_rows)
        tallies = _tallies.read(self._connection, METRICS, trial_ids, *of_tallies)
        _tallies.verify(METRICS, [((row.stored["trial_id"], row.stored["group"]), row) for row in rows], tallies)
        return rows

    def owned(self, kind: str, layout: Layout, column: sa.Column[Any], owners: Collection[int]) -> list[Row]:
        """Return all rows of owners, as many as are counted."""
        rows = self.rows(layout, column, owners)
        keyed = [((row.stored[column.name], ""), row) for row in rows]
        _tallies.verify(kind, keyed, self.tallies(kind, owners))
        return rows

    def ids(self, table: sa.Table) -> list[int]:
        """Return the ids of a table's rows."""
        return sorted(self._connection.execute(sa.select(table.c.id)).scalars())

    def tallies(self, kind: str, owners: Collection[int]) -> dict[Key, Tally]:
        """Return how many rows of a kind the owners have; `Damage` if that is not known of one of them."""
        found = _tallies.read(self._connection, kind, owners)
        for owner in owners:
            if (owner, "") not in found:
                raise Damage(f"the tally of the {kind} of {owner} is gone")
        return found

    def rows(
        self, layout: Layout, column: sa.Column[Any], values: Collection[Any], *conditions: sa.ColumnElement[bool]
    ) -> list[Row]:
        """Return the rows in whose column is one of the values; they may be incomplete."""
        found: list[Row] = []
        for condition in _tallies.among(column, values):
            found += map(layout.read, self._connection.execute(layout.select().where(condition, *conditions)))
        return sorted(found, key=lambda row: int(row.stored["id"]))


def _by_step(row: Row) -> tuple[int, int]:
    return row.stored["steps_completed"], row.stored["id"]


def _report(row: Row) -> MetricReport:
    stored = row.stored
    steps, time = stored["steps_completed"], stored["time"]
    return MetricReport(group=stored["group"], steps_completed=steps, metrics=row.metrics, time=time)


class NoReader(Reader):
    """Finds nothing: what reads a database that is not there."""

    def __init__(self) -> None:
        """Need no connection."""

    def experiments(self, limit: int | None = None, *, with_archived: bool = True) -> list[Row]:
        """Return nothing."""
        return []

    def ids(self, table: sa.Table) -> list[int]:
        """Return nothing."""
        return []

    def tallies(self, kind: str, owners: Collection[int]) -> dict[Key, Tally]:
        """Return nothing."""
        return {}

    def rows(
        self, layout: Layout, column: sa.Column[Any], values: Collection[Any], *conditions: sa.ColumnElement[bool]
    ) -> list[Row]:
        """Return nothing."""
        return []
