"""Bring the record and the store together again after a crash."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from determined import errors, storage, tracking

METADATA_FILE = "metadata.json"


def record_unrecorded(store: storage.FolderStore, database: pathlib.Path) -> list[str]:
    """Record the checkpoints that are complete in the store but not on record, oldest first, and return their ids.

    A process can die between the two. Checkpoints of other databases are left alone.
    """
    known = {checkpoint.uuid for checkpoint in tracking.Records(database).checkpoints()}
    unknown = [store.path(uuid) for uuid in store.ids() if uuid not in known]
    unknown.sort(key=lambda folder: folder.stat().st_mtime_ns)
    return [folder.name for folder in unknown if _record(folder, database)]


def remove_unlisted(store: storage.FolderStore, database: pathlib.Path) -> list[str]:
    """Remove the bytes of checkpoints that are on record as deleted, and return their ids."""
    deleted = {
        checkpoint.uuid
        for checkpoint in tracking.Records(database).checkpoints()
        if checkpoint.state is tracking.CheckpointState.DELETED
    }
    doomed = [uuid for uuid in store.ids() if uuid in deleted]
    for uuid in doomed:
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


def _record(folder: pathlib.Path, database: pathlib.Path) -> bool:
    try:
        manifest = storage.Manifest.read(folder)
        if manifest.origin.get("database") != str(database):
            return False
        manifest.verify(folder)
        metadata = _metadata(folder)
        steps = metadata.get("steps_completed", 0)
        if type(steps) is not int or steps < 0:
            return False
    except (errors.InvalidCheckpointException, OSError, ValueError, TypeError, RecursionError):
        return False
    origin = manifest.origin
    message = tracking.CheckpointSaved(
        uuid=folder.name,
        steps_completed=steps,
        path=str(folder),
        metadata=metadata,
        resources={name: entry.size for name, entry in manifest.files.items()},
        time=folder.stat().st_mtime,
    )
    try:
        with tracking.Recorder.attach(database, origin["experiment_id"], origin["trial_id"]) as recorder:
            recorder.write([message])
    except (errors.TrackingException, KeyError):
        return False
    return True


def _metadata(folder: pathlib.Path) -> dict[str, Any]:
    metadata = json.loads((folder / METADATA_FILE).read_text())
    return metadata if isinstance(metadata, dict) else {}
