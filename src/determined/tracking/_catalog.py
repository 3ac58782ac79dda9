"""What people add to the record of experiments and checkpoints, and what they delete from it."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from determined import errors

from . import _assembly, _deletion, _schema, _writing
from ._access import Access
from ._rows import CHECKPOINT, EXPERIMENT, Row, storable_text
from ._turns import KEEP, Keep


class Catalog:
    """Changes what is on record of experiments and checkpoints, by default those of the home folder.

    Works on local and driven experiments. Holds no connection between calls, so there is nothing to close and any
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
        given = {
            "name": name,
            "description": description,
            "project": project,
            "workspace": workspace,
            "notes": notes,
            "archived": archived,
        }
        changes: dict[str, Any] = {key: value for key, value in given.items() if value is not KEEP}
        if not isinstance(labels, Keep):
            changes["labels"] = list(labels)
        with self._access.writer() as connection:
            row = self._experiment(connection, id)
            if archived is True:
                _deletion.require_idle(connection, row, "archived")
            _writing.change(connection, EXPERIMENT, row, changes)

    def add_label(self, experiment_id: int, label: str) -> None:
        """Give an experiment one more label; nothing happens if it has it."""
        self._relabel(experiment_id, lambda labels: labels if label in labels else [*labels, label])

    def remove_label(self, experiment_id: int, label: str) -> None:
        """Take a label from an experiment; `TrackingException` if it does not have it."""

        def without(labels: Sequence[str]) -> list[str]:
            if label not in labels:
                raise errors.TrackingException(
                    f"experiment {experiment_id} has no label {label!r}; it has {', '.join(labels) or 'none'}."
                )
            return [one for one in labels if one != label]

        self._relabel(experiment_id, without)

    def change_checkpoint(self, uuid: str, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata of a checkpoint on record; what is in its files stays as it is."""
        with self._access.writer() as connection:
            rows = _writing.locked(connection, CHECKPOINT, _schema.checkpoints.c.uuid == storable_text(uuid))
            if not rows:
                self._access.missing(f"checkpoint {uuid!r}", "det checkpoint list")
            _writing.change(connection, CHECKPOINT, rows[0], {"metadata": metadata})

    def require_deletable(self, id: int, *, force: bool = False) -> None:
        """Raise what `delete_experiment` would, and change nothing: for those who delete its files first."""
        with self._access.writer() as connection:
            _deletion.require_idle(connection, self._experiment(connection, id), "deleted", force=force)
            _deletion.require_unregistered(connection, id)

    def delete_experiment(self, id: int, *, force: bool = False) -> None:
        """Remove an experiment and all that belongs to it from the record; its files are not touched.

        `TrackingException` while a living process is at work on it, or one on another host may be (then `force`
        deletes it), and while one of its checkpoints is a version of a model.
        """
        with self._access.writer() as connection:
            row = self._experiment(connection, id)
            _deletion.require_idle(connection, row, "deleted", force=force)
            _deletion.delete(connection, id)

    def _relabel(self, experiment_id: int, change: Callable[[Sequence[str]], Sequence[str]]) -> None:
        with self._access.writer() as connection:
            row = self._experiment(connection, experiment_id)
            labels = change(_assembly.labels_of(row))
            _writing.change(connection, EXPERIMENT, row, {"labels": list(labels)})

    def _experiment(self, connection: sa.Connection, id: int) -> Row:
        rows = _writing.locked(connection, EXPERIMENT, _schema.experiments.c.id == id)
        return rows[0] if rows else self._access.missing(f"experiment {id}", "det experiment list")
