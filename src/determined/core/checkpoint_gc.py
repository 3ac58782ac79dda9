"""Garbage collection of checkpoints: repair after crashes, and retention. For the other packages of determined."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import pathlib
import warnings
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from determined import errors, storage, tracking

logger = logging.getLogger("determined.core")

METADATA_FILE = "metadata.json"
"""The file of a checkpoint that holds its metadata."""


def record_unrecorded(store: storage.FolderStore, database: pathlib.Path) -> list[str]:
    """Record the checkpoints that are complete in the store but not on record, oldest first, and return their ids.

    A run can die between saving and recording. Skips checkpoints of other databases, and damaged ones with a warning.
    """
    known = {checkpoint.uuid for checkpoint in tracking.Records(database).checkpoints()}
    found = [_read_unrecorded(store.root / uuid, database) for uuid in store.ids() if uuid not in known]
    # By step rather than by time within a trial, since clocks jump.
    ordered = sorted((one for one in found if one), key=lambda one: (one.trial_id, one.saved.steps_completed))
    return [one.saved.uuid for one in ordered if _record(one, database)]


def remove_unlisted(store: storage.FolderStore, database: pathlib.Path) -> list[str]:
    """Remove the folders of checkpoints that are recorded as deleted, and return their ids."""
    deleted = {
        checkpoint.uuid
        for checkpoint in tracking.Records(database).checkpoints()
        if checkpoint.state is tracking.CheckpointState.DELETED
    }
    to_delete = [uuid for uuid in store.ids() if uuid in deleted]
    for uuid in to_delete:
        with contextlib.suppress(errors.CheckpointNotFoundException):  # another process was faster
            store.delete(uuid)
    return to_delete


def mark_missing(store: storage.FolderStore, database: pathlib.Path) -> list[str]:
    """Record as deleted the checkpoints whose folder in this store is gone, and return their ids.

    Does nothing for an empty store: it may be a disk that is not mounted.
    """
    recorded = tracking.Records(database).checkpoints()
    # Read second, since a checkpoint is recorded after it is in the store.
    present = set(store.ids())
    if not present:
        return []
    missing = [
        checkpoint
        for checkpoint in recorded
        if checkpoint.state is tracking.CheckpointState.COMPLETED
        and pathlib.Path(checkpoint.path).parent == store.root
        and checkpoint.uuid not in present
    ]
    for checkpoint in missing:
        with tracking.Recorder.attach(database, checkpoint.experiment_id, checkpoint.trial_id) as recorder:
            recorder.write([tracking.CheckpointDeleted(uuid=checkpoint.uuid)])
    return [checkpoint.uuid for checkpoint in missing]


def expired_checkpoints(
    records: tracking.Records,
    stored: Collection[str],
    experiment_id: int,
    keep: storage.Retention,
    metric: tuple[str, bool] | None,
) -> list[tracking.CheckpointRecord]:
    """Return the checkpoints of an experiment that retention lets go, out of those with `stored` ids.

    `metric` is (name, smaller_is_better). Keeps registered checkpoints, and those that some trial continues or
    starts from.
    """
    present = [
        one
        for one in records.checkpoints(experiment_id)
        if one.state is tracking.CheckpointState.COMPLETED and one.uuid in stored
    ]
    validations = {
        (trial_id, report.steps_completed): report.metrics
        for trial_id, reports in records.metrics_by_trial(experiment_id, "validation").items()
        for report in reports
    }
    if metric is None and validations and keep.save_experiment_best + keep.save_trial_best:
        logger.warning(
            "All checkpoints are kept, because no metric says which of them are the best. Set metric and "
            "smaller_is_better in exp_conf['searcher'], or pass fit(best_metric='...', smaller_is_better=...)."
        )
        return []
    candidates = [
        storage.Candidate(
            uuid=one.uuid,
            trial_id=one.trial_id,
            steps_completed=one.steps_completed,
            score=_score(validations.get((one.trial_id, one.steps_completed)), metric),
        )
        for one in present
    ]
    needed = records.sources() | records.experiment_sources() | records.registered_checkpoints()
    ids = set(storage.doomed(candidates, keep, needed))
    return [one for one in present if one.uuid in ids]


def _score(validation: Mapping[str, Any] | None, metric: tuple[str, bool] | None) -> float | None:
    """Return the compared metric, smaller being better; infinity if it is not a finite number."""
    if validation is None or metric is None:
        return None
    name, smaller_is_better = metric
    value: Any = validation.get(name)
    if not tracking.is_comparable(value):
        return math.inf
    return float(value) if smaller_is_better else -float(value)


class _Unrecorded(NamedTuple):
    """A checkpoint that is not on record, and the run that it names."""

    experiment_id: int
    trial_id: int
    saved: tracking.CheckpointSaved


def _read_unrecorded(folder: pathlib.Path, database: pathlib.Path) -> _Unrecorded | None:
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
        return _Unrecorded(experiment_id, trial_id, _saved(folder, manifest))
    except (errors.InvalidCheckpointException, OSError, ValueError, RecursionError) as error:
        if folder.exists():  # another process may have deleted it meanwhile
            warnings.warn(f"Checkpoint {folder.name} is not on record and is passed over: {error}", stacklevel=3)
        return None


def _saved(folder: pathlib.Path, manifest: storage.Manifest) -> tracking.CheckpointSaved:
    metadata = json.loads(storage.read_plain(folder / METADATA_FILE))
    steps = metadata.get("steps_completed", 0) if isinstance(metadata, dict) else None
    if type(steps) is not int or not 0 <= steps < 2**63:
        raise ValueError(f"its {METADATA_FILE} does not say after how many batches it was saved")
    return tracking.CheckpointSaved(
        uuid=folder.name,
        steps_completed=steps,
        path=str(folder),
        metadata=metadata,
        resources={name: entry.size for name, entry in manifest.files.items()},
        time=folder.stat().st_mtime,
    )


def _record(found: _Unrecorded, database: pathlib.Path) -> bool:
    try:
        with tracking.Recorder.attach(database, found.experiment_id, found.trial_id) as recorder:
            recorder.write([found.saved])
    except errors.TrackingException:
        return False
    return True
