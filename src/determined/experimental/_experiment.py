"""Experiments in the client."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from typing import Any

from determined import errors, experiment
from determined._home import Home
from determined._secrets import mask_variables
from determined.experimental import _listing
from determined.experimental._checkpoint import Checkpoint
from determined.experimental._orders import CheckpointSortBy, OrderBy, TrialSortBy, checked, ordered, strings
from determined.experimental._states import ExperimentState
from determined.experimental._trial import Trial
from determined.experimental._workspace import project_id_of
from determined.tracking import Catalog, ExperimentRecord, TrackingReader, TrialRecord

_INTERVAL_S = 0.1


class Experiment:
    """The trials of one program. A snapshot of the database; `reload` and all methods with effects update it."""

    def __init__(self, record: ExperimentRecord, home: Home) -> None:
        self._record = record
        self._home = home

    @property
    def id(self) -> int:
        """Its id."""
        return self._record.id

    @property
    def name(self) -> str:
        """Its name."""
        return self._record.name

    @property
    def description(self) -> str | None:
        """Its description."""
        return self._record.description

    @property
    def notes(self) -> str | None:
        """Its notes."""
        return self._record.notes

    @property
    def labels(self) -> set[str]:
        """Its labels. A copy: change them with `add_label`, `remove_label` and `set_labels`."""
        return set(self._record.labels)

    @property
    def project_id(self) -> str | None:
        """The `id` of its project, if it has one."""
        return project_id_of(self._record)

    @property
    def config(self) -> dict[str, Any]:
        """Its config, with every default filled in. A copy; empty for the run of a script without a config.

        The values of `environment_variables` are masked.
        """
        return mask_variables(copy.deepcopy(dict(self._record.config or {})))

    @property
    def state(self) -> ExperimentState:
        """Its state."""
        return ExperimentState[self._record.state.name]

    @property
    def progress(self) -> float | None:
        """The finished fraction, from 0 to 1."""
        return self._record.progress

    @property
    def archived(self) -> bool:
        """Whether it is hidden from listings."""
        return self._record.is_archived

    def reload(self) -> Experiment:
        """Read it from the database again, and return it."""
        self._record = TrackingReader(self._home.database).experiment(self.id)
        return self

    # Control

    def activate(self) -> None:
        """Run it, or continue it if it was paused or its runner is gone."""
        experiment.control.activate(self.id, self._home)
        self.reload()

    def pause(self) -> None:
        """Save a checkpoint of every trial and stop; `activate` continues it."""
        experiment.control.pause(self.id, self._home)
        self.reload()

    def cancel(self) -> None:
        """Ask it to stop; its trials save a last checkpoint. `wait` returns when it has ended."""
        experiment.control.cancel(self.id, self._home)
        self.reload()

    def kill(self) -> None:
        """Ask it to stop at once. `wait` returns when it has ended."""
        experiment.control.kill(self.id, self._home)
        self.reload()

    def continue_(self, overrides: Iterable[str] = ()) -> list[int]:
        """Continue it after its end: trials that did not complete continue. Returns their ids.

        `overrides` change the config, such as "searcher.max_length.epochs=20" for a `single` search.
        """
        reopened = experiment.control.continue_experiment(self.id, self._home, overrides=overrides)
        self.reload()
        return reopened

    def wait(self, interval: float | None = None, timeout: float | None = None) -> ExperimentState:
        """Wait until it has ended, and return its state; `TimeoutError` after `timeout` seconds.

        `ConflictException` if it has no runner, for example when it is paused. `interval` is accepted and ignored.
        """
        experiment.control.wait(self.id, timeout, self._home)
        return self.reload().state

    def await_first_trial(self, interval: float = _INTERVAL_S) -> Trial:
        """Wait until it has a trial, and return the trial; checks every `interval` seconds."""
        while not (trials := self.list_trials()):
            if not experiment.control.is_run(self.id, self._home):
                raise errors.ConflictException(f"experiment {self.id} has no trial and no runner; call activate().")
            time.sleep(interval)
        return trials[0]

    def delete(self) -> None:
        """Delete it with its trials, checkpoints, program, logs and TensorBoard files, permanently.

        `ConflictException` while it runs, and while one of its checkpoints is a version of a model or a source of
        another experiment.
        """
        experiment.control.delete(self.id, self._home)

    # Details

    def archive(self) -> None:
        """Hide it from listings; refused while it runs."""
        self._change(archived=True)

    def unarchive(self) -> None:
        """Show it in listings again."""
        self._change(archived=False)

    def set_name(self, name: str) -> None:
        """Change its name."""
        self._change(name=name)

    def set_description(self, description: str) -> None:
        """Change its description."""
        self._change(description=description)

    def set_notes(self, notes: str) -> None:
        """Replace the notes."""
        self._change(notes=notes)

    def set_labels(self, labels: Iterable[str]) -> None:
        """Replace all labels."""
        self._change(labels=sorted(set(strings("set_labels", "labels", labels))))

    def add_label(self, label: str) -> None:
        """Add a label, unless it has it already."""
        Catalog(self._home.database).add_label(self.id, label)
        self.reload()

    def remove_label(self, label: str) -> None:
        """Remove a label; `ConflictException` if it does not have it."""
        Catalog(self._home.database).remove_label(self.id, label)
        self.reload()

    def _change(self, **changes: Any) -> None:
        Catalog(self._home.database).change_experiment(self.id, **changes)
        self.reload()

    # Trials and checkpoints

    def list_trials(self, sort_by: TrialSortBy = TrialSortBy.ID, order_by: OrderBy = OrderBy.ASCENDING) -> list[Trial]:
        """Return its trials; those without the value to sort by come last."""
        checked("list_trials", "sort_by", sort_by, TrialSortBy)
        checked("list_trials", "order_by", order_by, OrderBy)
        records = ordered(TrackingReader(self._home.database).trials(self.id), lambda one: _key(one, sort_by), order_by)
        return [Trial(record, self._home) for record in records]

    get_trials = list_trials

    def list_checkpoints(
        self,
        sort_by: CheckpointSortBy | str | None = None,
        order_by: OrderBy | None = None,
        max_results: int | None = None,
    ) -> list[Checkpoint]:
        """Return its existing checkpoints, at most `max_results`.

        The default order is by the searcher's metric, best first. `sort_by` is a `CheckpointSortBy`, or the name of a
        validation metric with `order_by` (ASCENDING: smallest first). Those without a finite metric come last.
        """
        return _listing.listed(self._home, self.id, None, sort_by, order_by, max_results)

    def top_checkpoint(self, sort_by: str | None = None, smaller_is_better: bool | None = None) -> Checkpoint:
        """Return its best checkpoint by the searcher's metric, or by another metric and direction."""
        return self.top_n_checkpoints(1, sort_by, smaller_is_better)[0]

    def top_n_checkpoints(
        self, limit: int, sort_by: str | None = None, smaller_is_better: bool | None = None
    ) -> list[Checkpoint]:
        """Return its best checkpoints, at most `limit`; `CheckpointNotFoundException` if none can be compared."""
        if limit < 1:
            raise ValueError(f"top_n_checkpoints(limit={limit}): pass a number of at least 1.")
        return _listing.best(self._home, self.id, None, limit, sort_by, smaller_is_better)

    def __repr__(self) -> str:
        return f"Experiment(id={self.id}, name={self.name!r}, state={self.state.name})"


def _key(trial: TrialRecord, sort_by: TrialSortBy) -> Any:
    if sort_by is TrialSortBy.BEST_VALIDATION_METRIC:
        return None if trial.best_validation is None else trial.best_validation.value
    return getattr(trial, sort_by.value)
