"""What is wrong with a home folder after a process died in it. Looks without touching anything."""

from __future__ import annotations

import json
import pathlib
import shutil
import tempfile
from collections.abc import Iterable
from typing import Any

from determined import errors, storage, tracking

Row = tuple[str, int, Any]
"""Group, step and metrics of one report."""


def store_of(home: pathlib.Path) -> storage.FolderStore:
    return storage.FolderStore(home / "checkpoints")


def leftovers(home: pathlib.Path) -> list[str]:
    """Return the names of what is staged but not committed."""
    return sorted(path.name for path in (home / "checkpoints").glob("*.partial"))


def unreadable(home: pathlib.Path) -> list[str]:
    """Return what is wrong with checkpoints that the store or the record lists."""
    store = store_of(home)
    listed = {c.uuid for c in checkpoints(home) if c.state is tracking.CheckpointState.COMPLETED}
    return [fault for uuid in sorted(listed | set(store.list())) if (fault := _fault(store, uuid))]


def _fault(store: storage.FolderStore, uuid: str) -> str | None:
    try:
        store.open(uuid).verify()
    except errors.InvalidCheckpointException as error:
        return str(error)
    return None


def checkpoints(home: pathlib.Path) -> list[tracking.CheckpointRecord]:
    with _Copy(home) as records:
        return records.checkpoints()


def rows(home: pathlib.Path) -> list[Row]:
    """Return all reports that are on record, of all trials."""
    with _Copy(home) as records:
        trials = [trial.id for one in reversed(records.experiments()) for trial in records.trials(one.id)]
        return [(r.group, r.steps_completed, r.metrics) for trial in trials for r in records.metrics(trial)]


def saved_steps(home: pathlib.Path) -> int:
    """Return the steps of the newest complete checkpoint in the store, recorded or not."""
    store = store_of(home)
    return max((_steps(store.path(uuid)) for uuid in store.list()), default=0)


def _steps(folder: pathlib.Path) -> int:
    return int(json.loads((folder / "metadata.json").read_text())["steps_completed"])


def lost(home: pathlib.Path, expected: Iterable[Row]) -> list[Row]:
    """Return the reports of steps up to the newest checkpoint that are not on record.

    A stop abandons the validation that is under way and saves, so that one of the newest checkpoint may be to come.
    """
    steps, found = saved_steps(home), rows(home)
    return [row for row in expected if row[1] + (row[0] == "validation") <= steps and row not in found]


class _Copy:
    """Records of a copy of the database: reading would already repair what a crash left."""

    def __init__(self, home: pathlib.Path) -> None:
        self._home = home

    def __enter__(self) -> tracking.TrackingReader:
        self._folder = tempfile.TemporaryDirectory(prefix="records-")
        for path in self._home.glob("tracking.db*"):
            shutil.copy(path, self._folder.name)
        return tracking.TrackingReader(pathlib.Path(self._folder.name) / "tracking.db")

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()
