"""Reading the tracking database. Nothing here creates or changes anything but an outdated schema."""

from __future__ import annotations

import pathlib
from collections.abc import Hashable, Mapping
from typing import Any

import sqlalchemy as sa

from determined import errors

from . import _queries
from ._data.changesets import RunRecord
from ._data.messages import CheckpointState, MetricReport
from ._data.records import CheckpointRecord, ExperimentRecord, Overview, TrialOverview, TrialRecord
from ._database import schema as db
from ._database.access import Access

_MIN_PREFIX = 4
_MAX_CANDIDATES = 5


class TrackingReader:
    """Reads the tracking database, by default that of the home folder. It need not exist: then there is nothing in it.

    Holds no connection between calls, so there is nothing to close and any thread may use it.
    """

    def __init__(self, url_or_path: str | pathlib.Path | None = None) -> None:
        self._access = Access(url_or_path)

    def marker(self) -> Hashable:
        """Return what differs from all before it if anything was stored meanwhile; costs next to nothing."""
        return self._access.marker()

    def experiments(self, limit: int | None = None, *, include_archived: bool = False) -> list[ExperimentRecord]:
        """Return the experiments, newest first, at most `limit` of them."""
        conditions = [] if include_archived else [db.experiments.c.archived.is_not(True)]
        with self._access.reading() as connection:
            return _queries.experiments(connection, *conditions, limit=limit)

    def experiment(self, id: int) -> ExperimentRecord:
        """Return one experiment; `NotOnRecordException` if there is none with that id."""
        with self._access.reading() as connection:
            return self._experiment(connection, id)

    def trials(self, experiment_id: int) -> list[TrialRecord]:
        """Return the trials of an experiment in the order in which they were created."""
        with self._access.reading() as connection:
            experiment = self._experiment(connection, experiment_id)
            reports = _queries.reports_by_trial(connection, experiment_id)
            return _queries.trials(connection, experiment, _queries.trial_rows(connection, experiment_id), reports)

    def overview(self, experiment_id: int, *, all_metrics: bool = False) -> Overview:
        """Return an experiment with its trials, their validations and their checkpoints, all of one point in time.

        The summaries and steps of its trials are by validations alone unless `all_metrics`: others can be very many.
        """
        with self._access.reading() as connection:
            experiment = self._experiment(connection, experiment_id)
            rows = _queries.trial_rows(connection, experiment_id)
            validations = _queries.reports_by_trial(connection, experiment_id, "validation")
            reports = _queries.reports_by_trial(connection, experiment_id) if all_metrics else validations
            return Overview(
                experiment=experiment,
                trials=_queries.trials(connection, experiment, rows, reports),
                validations={row.id: validations.get(row.id, []) for row in rows},
                checkpoints=_queries.checkpoints(connection, db.trials.c.experiment_id == experiment_id),
            )

    def trial_ids(self) -> dict[int, set[int]]:
        """Return the ids of all trials, by experiment id."""
        found: dict[int, set[int]] = {}
        with self._access.reading() as connection:
            for experiment_id, id in connection.execute(sa.select(db.trials.c.experiment_id, db.trials.c.id)):
                found.setdefault(experiment_id, set()).add(id)
        return found

    def trial(self, id: int) -> TrialRecord:
        """Return one trial; `NotOnRecordException` if there is none with that id."""
        with self._access.reading() as connection:
            row = self._trial(connection, id)
            experiment = self._experiment(connection, row.experiment_id)
            return _queries.trials(connection, experiment, [row], {id: _queries.reports_of(connection, id)})[0]

    def trial_overview(self, trial_id: int) -> TrialOverview:
        """Return a trial with its experiment, runs, checkpoints and `history`, all of one point in time."""
        with self._access.reading() as connection:
            row = self._trial(connection, trial_id)
            experiment = self._experiment(connection, row.experiment_id)
            reports = _queries.reports_of(connection, trial_id)
            return TrialOverview(
                trial=_queries.trials(connection, experiment, [row], {trial_id: reports})[0],
                experiment=experiment,
                runs=_queries.runs(connection, trial_id),
                checkpoints=_queries.checkpoints(connection, db.trials.c.id == trial_id),
                history=_queries.history(connection, row),
            )

    def runs(self, trial_id: int) -> list[RunRecord]:
        """Return the runs of a trial of a managed experiment, the first one first; a local trial has none."""
        with self._access.reading() as connection:
            self._trial(connection, trial_id)
            return _queries.runs(connection, trial_id)

    def history(self, trial_id: int) -> list[MetricReport]:
        """Return the reports of a trial and, before them, of those that it continues, as if it had been one run.

        What an earlier run reported after the checkpoint from which the next one started is left out.
        """
        with self._access.reading() as connection:
            return _queries.history(connection, self._trial(connection, trial_id))

    def sources(self) -> set[str]:
        """Return the ids of the checkpoints from which some trial was continued."""
        source = db.trials.c.source_checkpoint
        with self._access.reading() as connection:
            return set(connection.execute(sa.select(source).where(source.is_not(None))).scalars())

    def experiment_sources(self) -> set[str]:
        """Return the ids of the checkpoints from which experiments that have not ended are to start their trials.

        Those are the ones that their configs name, and the latest ones of the trials that their configs name.
        """
        columns = db.experiments.c
        running = sa.select(columns.config).where(columns.is_local.is_(False), columns.ended.is_(None))
        with self._access.reading() as connection:
            named = [_source_of(config) for config in connection.execute(running).scalars()]
            trial_ids = {id for _, id in named if id is not None}
            present = _queries.checkpoints(
                connection,
                db.trials.c.id.in_(trial_ids),
                db.checkpoints.c.state == CheckpointState.COMPLETED,
            )
        latest = {one.trial_id: one.uuid for one in sorted(present, key=lambda one: one.steps_completed)}
        return {uuid for uuid, _ in named if uuid is not None} | set(latest.values())

    def registered_checkpoints(self) -> set[str]:
        """Return the ids of the checkpoints that are versions of models in the `Registry`."""
        with self._access.reading() as connection:
            return set(connection.execute(sa.select(db.versions.c.checkpoint)).scalars())

    def checkpoints_of_experiments(self, name: str) -> list[CheckpointRecord]:
        """Return the checkpoints of all experiments with a name, those of the oldest trial first; deleted ones too."""
        with self._access.reading() as connection:
            found = _queries.checkpoints(connection, db.experiments.c.name == name)
        # By trial, since one that a crash kept from the record can get there after those of later trials.
        return sorted(found, key=lambda checkpoint: checkpoint.trial_id)

    def metrics(self, trial_id: int, group: str | None = None) -> list[MetricReport]:
        """Return the reports of a trial, of one group or of all, ordered by step.

        What one run of the trial reported after the step from which a later one started is left out.
        """
        with self._access.reading() as connection:
            self._trial(connection, trial_id)
            return _queries.reports_of(connection, trial_id, group)

    def metrics_by_trial(self, experiment_id: int, group: str | None = None) -> dict[int, list[MetricReport]]:
        """Return what `metrics` does for every trial of an experiment, by trial id, in much less time."""
        with self._access.reading() as connection:
            self._experiment(connection, experiment_id)
            found = _queries.reports_by_trial(connection, experiment_id, group)
            return {row.id: found.get(row.id, []) for row in _queries.trial_rows(connection, experiment_id)}

    def checkpoints(self, experiment_id: int | None = None, trial_id: int | None = None) -> list[CheckpointRecord]:
        """Return checkpoints, all or those of an experiment or trial, oldest first; deleted ones too."""
        conditions = [] if trial_id is None else [db.trials.c.id == trial_id]
        with self._access.reading() as connection:
            if experiment_id is not None:
                self._experiment(connection, experiment_id)
                conditions.append(db.trials.c.experiment_id == experiment_id)
            return _queries.checkpoints(connection, *conditions)

    def checkpoint(self, uuid: str) -> CheckpointRecord:
        """Return the checkpoint with this id, or with the only id that begins so (4 characters or more)."""
        ids = db.checkpoints.c.uuid
        with self._access.reading() as connection:
            found = _queries.checkpoints(connection, ids == uuid)
            if not found and len(uuid) >= _MIN_PREFIX:
                similar = _queries.checkpoints(connection, ids.startswith(uuid, autoescape=True))
                found = [one for one in similar if one.uuid.startswith(uuid)]  # SQLite ignores the case
        if not found:
            self._access.missing(f"checkpoint {uuid!r}", "det checkpoint list")
        if len(found) > 1:
            some = ", ".join(sorted(one.uuid for one in found)[:_MAX_CANDIDATES])
            raise errors.InvalidRequestException(
                f"several checkpoints begin with {uuid!r} ({some}); give more characters of the one you mean."
            )
        return found[0]

    def _experiment(self, connection: sa.Connection, id: int) -> ExperimentRecord:
        for experiment in _queries.experiments(connection, db.experiments.c.id == id):
            return experiment
        return self._access.missing(f"experiment {id}", "det experiment list")

    def _trial(self, connection: sa.Connection, id: int) -> sa.Row[Any]:
        return _queries.trial_row(connection, id) or self._access.missing(f"trial {id}", "det experiment describe ID")


def _source_of(config: Mapping[str, object] | None) -> tuple[str | None, int | None]:
    """Return the checkpoint and the trial that a config names to start trials from."""
    searcher = (config or {}).get("searcher")
    found = searcher if isinstance(searcher, Mapping) else {}
    uuid, trial_id = found.get("source_checkpoint_uuid"), found.get("source_trial_id")
    return uuid if isinstance(uuid, str) else None, trial_id if type(trial_id) is int else None
