"""Reading the tracking database. Nothing here creates or changes anything but an outdated schema."""

from __future__ import annotations

import pathlib
from collections.abc import Hashable, Iterable, Mapping

from determined import errors

from . import _assembly, _model_rows, _runs
from ._access import Access
from ._messages import CheckpointState, MetricReport
from ._reading import Reader
from ._rows import Row
from ._turns import RunRecord
from ._views import CheckpointRecord, ExperimentRecord, Overview, TrialOverview, TrialRecord

_SHORTEST_PREFIX = 4
_MOST_CANDIDATES = 5


class TrackingReader:
    """Reads the tracking database, by default that of the home folder. It need not exist: then there is nothing in it.

    Holds no connection between calls, so there is nothing to close and any thread may use it. What it returns is as it
    was recorded, and complete: damage to the database is a `TrackingException`.
    """

    def __init__(self, url_or_path: str | pathlib.Path | None = None) -> None:
        self._access = Access(url_or_path)

    def marker(self) -> Hashable:
        """Return what differs from all before it if anything was stored meanwhile; costs next to nothing."""
        return self._access.marker()

    def experiments(self, limit: int | None = None, *, include_archived: bool = False) -> list[ExperimentRecord]:
        """Return the experiments, newest first, at most `limit` of them."""
        with self._access.reader() as reader:
            rows = reader.experiments(limit, with_archived=include_archived)
            return _assembly.experiments(reader, rows[::-1])

    def experiment(self, id: int) -> ExperimentRecord:
        """Return one experiment; `TrackingException` if there is none with that id."""
        with self._access.reader() as reader:
            return _assembly.experiments(reader, [self._experiment(reader, id)])[0]

    def trials(self, experiment_id: int) -> list[TrialRecord]:
        """Return the trials of an experiment in the order in which they were created."""
        with self._access.reader() as reader:
            experiment, trials = self._experiment(reader, experiment_id), reader.trials([experiment_id])
            return _assembly.trials(reader, experiment, trials, reader.reports(trials))

    def overview(self, experiment_id: int) -> Overview:
        """Return an experiment with its trials, their validations and their checkpoints, all of one moment.

        What its trials tell of their metrics and steps is by validations alone: others can be very many.
        """
        with self._access.reader() as reader:
            experiment, trials = self._experiment(reader, experiment_id), reader.trials([experiment_id])
            validations = reader.reports(trials, "validation")
            return Overview(
                experiment=_assembly.experiments(reader, [experiment])[0],
                trials=_assembly.trials(reader, experiment, trials, validations),
                validations=validations,
                checkpoints=_assembly.checkpoints(reader, trials),
            )

    def trial(self, id: int) -> TrialRecord:
        """Return one trial; `TrackingException` if there is none with that id."""
        with self._access.reader() as reader:
            trial = self._trial(reader, id)
            experiment = self._experiment(reader, trial.experiment_id)
            return _assembly.trials(reader, experiment, [trial], reader.reports([trial]))[0]

    def trial_overview(self, trial_id: int) -> TrialOverview:
        """Return a trial with its experiment, runs, checkpoints and `history`, all of one moment."""
        with self._access.reader() as reader:
            trial = self._trial(reader, trial_id)
            experiment, reports = self._experiment(reader, trial.experiment_id), reader.reports([trial])
            return TrialOverview(
                trial=_assembly.trials(reader, experiment, [trial], reports)[0],
                experiment=_assembly.experiments(reader, [experiment])[0],
                runs=[_runs.record_of(run) for run in reader.runs([trial])[trial_id]],
                checkpoints=_assembly.checkpoints(reader, [trial]),
                history=_assembly.history(reader, trial, reports[trial_id]),
            )

    def runs(self, trial_id: int) -> list[RunRecord]:
        """Return the runs of a trial of a driven experiment, the first one first; a local trial has none."""
        with self._access.reader() as reader:
            trial = self._trial(reader, trial_id)
            return [_runs.record_of(run) for run in reader.runs([trial])[trial.id]]

    def history(self, trial_id: int) -> list[MetricReport]:
        """Return the reports of a trial and, before them, of those that it continues, as if it had been one run.

        What an earlier run reported after the checkpoint from which the next one started is left out.
        """
        with self._access.reader() as reader:
            trial = self._trial(reader, trial_id)
            return _assembly.history(reader, trial, reader.reports([trial])[trial_id])

    def sources(self) -> set[str]:
        """Return the ids of the checkpoints from which some trial was continued."""
        with self._access.reader() as reader:
            return {trial.source_checkpoint for trial in reader.trials() if trial.source_checkpoint is not None}

    def experiment_sources(self) -> set[str]:
        """Return the ids of the checkpoints from which experiments that have not ended are to start their trials.

        Those are the ones that their configs name, and the latest ones of the trials that their configs name.
        """
        with self._access.reader() as reader:
            running = [row for row in reader.experiments() if not row.is_local and row.ended is None]
            named = [_source_of(row.config) for row in running]
            trials = {trial.id: trial for _, id in named if id is not None and (trial := reader.trial(id)) is not None}
            present = [
                one for one in _assembly.checkpoints(reader, trials.values()) if one.state is CheckpointState.COMPLETED
            ]
            latest = {one.trial_id: one.uuid for one in sorted(present, key=lambda one: one.steps_completed)}
            return {uuid for uuid, _ in named if uuid is not None} | set(latest.values())

    def registered_checkpoints(self) -> set[str]:
        """Return the ids of the checkpoints that are versions of models in the `Registry`."""
        with self._access.reader() as reader:
            models = [model.id for model in _model_rows.models(reader)]
            return {version.checkpoint for version in _model_rows.versions(reader, models)}

    def checkpoints_of_experiments(self, name: str) -> list[CheckpointRecord]:
        """Return the checkpoints of all experiments with a name, those of the oldest trial first; deleted ones too."""
        with self._access.reader() as reader:
            trials = reader.trials([row.id for row in reader.experiments() if row.name == name])
            # By trial, since one that a crash kept from the record can get there after those of later trials.
            return sorted(_assembly.checkpoints(reader, trials), key=lambda checkpoint: checkpoint.trial_id)

    def metrics(self, trial_id: int, group: str | None = None) -> list[MetricReport]:
        """Return the reports of a trial, of one group or of all, ordered by step.

        What one run of the trial reported after the step from which a later one started is left out.
        """
        with self._access.reader() as reader:
            return reader.reports([self._trial(reader, trial_id)], group)[trial_id]

    def metrics_by_trial(self, experiment_id: int, group: str | None = None) -> dict[int, list[MetricReport]]:
        """Return what `metrics` does for every trial of an experiment, by trial id, in much less time."""
        with self._access.reader() as reader:
            self._experiment(reader, experiment_id)
            return reader.reports(reader.trials([experiment_id]), group)

    def checkpoints(self, experiment_id: int | None = None, trial_id: int | None = None) -> list[CheckpointRecord]:
        """Return checkpoints, all or those of an experiment or trial, oldest first; deleted ones too."""
        with self._access.reader() as reader:
            if experiment_id is not None:
                self._experiment(reader, experiment_id)
            if trial_id is None:
                trials = reader.trials(None if experiment_id is None else [experiment_id])
            else:
                trial = reader.trial(trial_id)
                trials = [trial] if trial is not None and experiment_id in (None, trial.experiment_id) else []
            return _assembly.checkpoints(reader, trials)

    def checkpoint(self, uuid: str) -> CheckpointRecord:
        """Return the checkpoint with this id, or with the only id that begins so (4 characters or more)."""
        with self._access.reader() as reader:
            if (row := reader.checkpoint(uuid)) is not None:
                return _assembly.checkpoint(row, _assembly.trial_of(reader, row).experiment_id)
            return self._beginning_with(uuid, _assembly.checkpoints(reader, reader.trials()))

    def _beginning_with(self, uuid: str, checkpoints: Iterable[CheckpointRecord]) -> CheckpointRecord:
        is_long = len(uuid) >= _SHORTEST_PREFIX
        found = [one for one in checkpoints if one.uuid == uuid or (is_long and one.uuid.startswith(uuid))]
        if not found:
            self._access.missing(f"checkpoint {uuid!r}", "det checkpoint list")
        if len(found) > 1:
            some = ", ".join(sorted(one.uuid for one in found)[:_MOST_CANDIDATES])
            raise errors.TrackingException(
                f"several checkpoints begin with {uuid!r} ({some}); give more characters of the one you mean."
            )
        return found[0]

    def _experiment(self, reader: Reader, id: int) -> Row:
        return reader.experiment(id) or self._access.missing(f"experiment {id}", "det experiment list")

    def _trial(self, reader: Reader, id: int) -> Row:
        return reader.trial(id) or self._access.missing(f"trial {id}", "det experiment describe ID")


def _source_of(config: Mapping[str, object] | None) -> tuple[str | None, int | None]:
    """Return the checkpoint and the trial that a config names to start trials from."""
    searcher = (config or {}).get("searcher")
    found = searcher if isinstance(searcher, Mapping) else {}
    uuid, trial_id = found.get("source_checkpoint_uuid"), found.get("source_trial_id")
    return uuid if isinstance(uuid, str) else None, trial_id if type(trial_id) is int else None
