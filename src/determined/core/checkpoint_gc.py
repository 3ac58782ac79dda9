"""Bring the record and the store together again after a crash."""

from __future__ import annotations

import contextlib
import json
import pathlib
import warnings
from typing import NamedTuple

from determined import errors, storage, tracking

METADATA_FILE = "metadata.json"


def record_unrecorded(store: storage.FolderStore, database: pathlib.Path) -> list[str]:
    """Record the checkpoints that are complete in the store but not on record, oldest first, and return their ids.

    A process can die between the two. Checkpoints of other databases are left alone; of one that is damaged is warned.
    """
    known = {checkpoint.uuid for checkpoint in tracking.Records(database).checkpoints()}
    found = [_found(store.root / uuid, database) for uuid in store.ids() if uuid not in known]
    # By step rather than by time within a trial, since clocks jump.
    ordered = sorted((one for one in found if one), key=lambda one: (one.trial_id, one.saved.steps_completed))
    return [one.saved.uuid for one in ordered if _record(one, database)]


class _Found(NamedTuple):
    """A checkpoint that is not on record, with the run that it says it is of."""

    experiment_id: int
    trial_id: int
    saved: tracking.CheckpointSaved


def remove_unlisted(store: storage.FolderStore, database: pathlib.Path) -> list[str]:
    """Remove the bytes of checkpoints that are on record as deleted, and return their ids."""
    deleted = {
        checkpoint.uuid
        for checkpoint in tracking.Records(database).checkpoints()
        if checkpoint.state is tracking.CheckpointState.DELETED
    }
    doomed = [uuid for uuid in store.ids() if uuid in deleted]
    for uuid in doomed:
        with contextlib.suppress(errors.CheckpointNotFoundException):  # another process was faster
            store.delete(uuid)
    return doomed


def mark_missing(store: storage.FolderStore, database: pathlib.Path) -> list[str]:
    """Record as deleted the checkpoints whose folder in this store is gone, and return their ids.

    A store with nothing in it is passed over: it may be a disk that is not mounted.
    """
    recorded = tracking.Records(database).checkpoints()
    # Second, since a checkpoint gets into the record after it is in the store.
    present = set(store.ids())
    gone = [
        checkpoint
        for checkpoint in recorded
        if checkpoint.state is tracking.CheckpointState.COMPLETED
        and pathlib.Path(checkpoint.path).parent == store.root
        and checkpoint.uuid not in present
    ]
    if not present:
        return []
    for checkpoint in gone:
        with tracking.Recorder.attach(database, checkpoint.experiment_id, checkpoint.trial_id) as recorder:
            recorder.write([tracking.CheckpointDeleted(uuid=checkpoint.uuid)])
    return [checkpoint.uuid for checkpoint in gone]


def _found(folder: pathlib.Path, database: pathlib.Path) -> _Found | None:
    """Return an intact checkpoint of a run of this database, or None."""
    if not (folder / storage.MANIFEST_FILE).exists():
        return None  # never complete, or not ours
    try:
        manifest = storage.Manifest.read(folder)
        experiment_id, trial_id = (manifest.origin.get(name) for name in ("experiment_id", "trial_id"))
        if (
            manifest.origin.get("database") != str(database)
            or type(experiment_id) is not int
            or type(trial_id) is not int
        ):
            return None
        manifest.verify(folder)
        return _Found(experiment_id, trial_id, _saved(folder, manifest))
    except (errors.InvalidCheckpointException, OSError, ValueError, RecursionError) as error:
        if folder.exists():  # another process may have deleted it meanwhile
            warnings.warn(f"Checkpoint {folder.name} is not on record and is passed over: {error}", stacklevel=3)
        return None


def _saved(folder: pathlib.Path, manifest: storage.Manifest) -> tracking.CheckpointSaved:
    metadata = json.loads(storage.read_plain(folder / METADATA_FILE))
    steps = metadata.get("steps_completed", 0) if isinstance(metadata, dict) else None
    if type(steps) is not int or not 0 <= steps < 2**63:
        raise ValueError(f"its {METADATA_FILE} does not tell how many batches it was saved after")
    return tracking.CheckpointSaved(
        uuid=folder.name,
        steps_completed=steps,
        path=str(folder),
        metadata=metadata,
        resources={name: entry.size for name, entry in manifest.files.items()},
        time=folder.stat().st_mtime,
    )


def _record(found: _Found, database: pathlib.Path) -> bool:
    try:
        with tracking.Recorder.attach(database, found.experiment_id, found.trial_id) as recorder:
            recorder.write([found.saved])
    except errors.TrackingException:
        return False
    return True
