"""What people add to the record of experiments and checkpoints, and what they delete from it."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from determined import errors

from . import _queries
from ._data.changesets import KEEP, Keep, given
from ._data.messages import RunState
from ._data.process import RunProcess
from ._database import schema as db
from ._database.access import Access

_EXPERIMENTS, _TRIALS = db.experiments, db.trials


class Catalog:
    """Changes what is on record of experiments and checkpoints, by default those of the home folder.

    Works on local and managed experiments. Holds no connection between calls, so there is nothing to close and any
    thread may use it.
    """

    def __init__(self, url_or_path: str | pathlib.Path | None = None) -> None:
        self._access = Access(url_or_path)

    def change_experiment(
        self,
        id: int,
        *,
        name: str | Keep = KEEP,
        description: str | Keep | None = KEEP,
        labels: Sequence[str] | Keep = KEEP,
        project: str | Keep | None = KEEP,
        workspace: str | Keep | None = KEEP,
        notes: str | Keep | None = KEEP,
        archived: bool | Keep = KEEP,
    ) -> None:
        """Replace what is given of an experiment; one that a living process is at work on cannot be archived."""
        texts = given(name=name, description=description, project=project, workspace=workspace, notes=notes)
        with self._access.writing() as connection:
            row = self._locked(connection, id)
            if archived is True:
                _require_idle(connection, row, "archived")
            changes = texts | given(labels=labels, archived=archived)
            _queries.update(connection, _EXPERIMENTS, changes, _EXPERIMENTS.c.id == id)

    def add_label(self, experiment_id: int, label: str) -> None:
        """Give an experiment one more label; nothing happens if it has it."""
        self._relabel(experiment_id, lambda labels: labels if label in labels else [*labels, label])

    def remove_label(self, experiment_id: int, label: str) -> None:
        """Take a label from an experiment; `InvalidRequestException` if it does not have it."""

        def without(labels: list[str]) -> list[str]:
            if label not in labels:
                raise errors.InvalidRequestException(
                    f"experiment {experiment_id} has no label {label!r}; it has {', '.join(labels) or 'none'}."
                )
            return [one for one in labels if one != label]

        self._relabel(experiment_id, without)

    def change_checkpoint(self, uuid: str, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata of a checkpoint on record; what is in its files stays as it is."""
        update = sa.update(db.checkpoints).where(db.checkpoints.c.uuid == uuid).values(metadata=metadata)
        with self._access.writing() as connection:
            if not connection.execute(update).rowcount:
                self._access.missing(f"checkpoint {uuid!r}", "det checkpoint list")

    def require_deletable(self, id: int, *, force: bool = False) -> None:
        """Raise what `delete_experiment` would, and change nothing: for those who delete its files first."""
        with self._access.writing() as connection:
            _require_idle(connection, self._locked(connection, id), "deleted", force=force)
            _require_unregistered(connection, id)

    def delete_experiment(self, id: int, *, force: bool = False) -> None:
        """Remove an experiment and all that belongs to it from the record; its files are not touched.

        `ConflictException` while a living process is at work on it, or one on another host may be (then `force`
        deletes it), and while one of its checkpoints is a version of a model.
        """
        with self._access.writing() as connection:
            _require_idle(connection, self._locked(connection, id), "deleted", force=force)
            _require_unregistered(connection, id)
            _delete(connection, id)

    def _relabel(self, experiment_id: int, change: Callable[[list[str]], list[str]]) -> None:
        with self._access.writing() as connection:
            row = self._locked(connection, experiment_id)
            labels = {"labels": change(row.labels or [])}
            _queries.update(connection, _EXPERIMENTS, labels, _EXPERIMENTS.c.id == experiment_id)

    def _locked(self, connection: sa.Connection, id: int) -> sa.Row[Any]:
        query = sa.select(_EXPERIMENTS).where(_EXPERIMENTS.c.id == id).with_for_update(key_share=True)
        row = connection.execute(query).one_or_none()
        return row or self._access.missing(f"experiment {id}", "det experiment list")


def _require_idle(connection: sa.Connection, experiment: sa.Row[Any], done: str, *, force: bool = False) -> None:
    """Raise `ConflictException` if a process is at work on an experiment, or may be on another host."""
    for process in _processes(connection, experiment.id):
        if process.is_gone:
            continue
        if process.is_here:
            raise errors.ConflictException(
                f"experiment {experiment.id} cannot be {done}: process {process.pid} is at work on it; end it first by "
                f"`det experiment kill {experiment.id}`, or wait for it."
            )
        if not force:
            raise errors.ConflictException(
                f"experiment {experiment.id} cannot be {done}: process {process.pid} on {process.host!r} may be at "
                "work on it, which cannot be asked from here; end it there, or if it is gone for certain, add --force "
                "(in Python force=True)."
            )


def _processes(connection: sa.Connection, experiment_id: int) -> Iterator[RunProcess]:
    """Yield the processes that should be at work on an experiment."""
    if (runner := _queries.runner_of(connection, experiment_id)) is not None:
        yield runner
    final = [state for state in RunState if not state.has_process]
    query = sa.select(_TRIALS).where(_TRIALS.c.experiment_id == experiment_id, _TRIALS.c.state.not_in(final))
    for row in connection.execute(query):
        if (process := _queries.process_of(row)) is not None:
            yield process


def _delete(connection: sa.Connection, experiment_id: int) -> None:
    """Remove an experiment and what belongs to it."""
    trial_ids = sa.select(_TRIALS.c.id).where(_TRIALS.c.experiment_id == experiment_id)
    for table in (db.metrics, db.checkpoints, db.runs):
        connection.execute(sa.delete(table).where(table.c.trial_id.in_(trial_ids)))
    for table in (db.leases, db.events, _TRIALS):
        connection.execute(sa.delete(table).where(table.c.experiment_id == experiment_id))
    for table in (db.snapshots, db.runners, _EXPERIMENTS):
        connection.execute(sa.delete(table).where(table.c.id == experiment_id))


def _require_unregistered(connection: sa.Connection, experiment_id: int) -> None:
    """Raise `ConflictException` if a checkpoint of an experiment is a version of a model."""
    query = (
        sa.select(db.models.c.name, db.versions.c.number)
        .join(db.versions, db.versions.c.model_id == db.models.c.id)
        .join(db.checkpoints, db.checkpoints.c.uuid == db.versions.c.checkpoint)
        .join(_TRIALS, _TRIALS.c.id == db.checkpoints.c.trial_id)
        .where(_TRIALS.c.experiment_id == experiment_id)
    )
    if found := connection.execute(query.limit(1)).first():
        raise errors.ConflictException(
            f"experiment {experiment_id} cannot be deleted: one of its checkpoints is version {found.number} of model "
            f"{found.name!r}; delete that version first: client.get_model({found.name!r}).get_version({found.number})"
            ".delete() in Python, with `from determined.experimental import client`."
        )
