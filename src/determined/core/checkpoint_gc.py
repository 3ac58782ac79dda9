"""Garbage collection of checkpoints: repair after crashes, and retention. For the other packages of determined."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from determined import errors, storage, tracking
from determined._database_location import DatabaseLocation, name_of
from determined._home import Home
from determined.tracking import CheckpointState

logger = logging.getLogger("determined.core")


def steps_completed(metadata: Mapping[str, Any]) -> int:
    """Return the batches after which a checkpoint was saved, as its metadata says; 0 if it does not."""
    steps = metadata.get("steps_completed", 0)
    if type(steps) is not int or not 0 <= steps < 2**63:
        raise ValueError(
            f"The checkpoint metadata ({storage.METADATA_FILE}) has steps_completed={steps!r}; pass the batches "
            "trained, an int >= 0."
        )
    return steps


def saved_message(saved: storage.SavedCheckpoint, timestamp: float) -> tracking.CheckpointSaved:
    """Return the message that records a complete checkpoint."""
    metadata = saved.metadata
    return tracking.CheckpointSaved(
        uuid=saved.id,
        steps_completed=steps_completed(metadata),
        path=saved.location,
        metadata=metadata,
        resources={name: entry.size for name, entry in saved.manifest.files.items()},
        time=timestamp,
    )


def record_unrecorded(store: storage.CheckpointStore, database: DatabaseLocation) -> list[str]:
    """Record the checkpoints that are complete in the store but not on record, oldest first, and return their ids.

    A run can die between saving and recording. Skips checkpoints of other databases, and damaged ones with a warning.
    """
    known = {checkpoint.uuid for checkpoint in tracking.TrackingReader(database).checkpoints()}
    found = [_read_unrecorded(store, uuid, database) for uuid in store.list() if uuid not in known]
    recorded = []
    # By step rather than by time within a trial, since clocks jump.
    for experiment_id, trial_id, saved in sorted(filter(None, found), key=lambda one: (one[1], one[2].steps_completed)):
        with contextlib.suppress(errors.TrackingException):  # the run that it names is not on record
            _record(database, experiment_id, trial_id, saved)
            recorded.append(saved.uuid)
    return recorded


def finish_uploads(home: Home) -> list[str]:
    """Upload the checkpoints that dead processes of this machine were uploading, and return their ids.

    Those of runs in the database of this home folder are recorded.
    """
    uploaded = []
    for location, uuids in storage.abandoned_uploads(home.stores).items():
        store = storage.store_for(location, home.checkpoints)
        store.begin()
        store.wait()
        record_unrecorded(store, home.database)
        uploaded += uuids
    return uploaded


def remove_unlisted(store: storage.CheckpointStore, database: DatabaseLocation) -> list[str]:
    """Remove the folders of checkpoints that are recorded as deleted, and return their ids."""
    deleted = {
        one.uuid for one in tracking.TrackingReader(database).checkpoints() if one.state is CheckpointState.DELETED
    }
    to_delete = [uuid for uuid in store.list() if uuid in deleted]
    for uuid in to_delete:
        with contextlib.suppress(errors.CheckpointNotFoundException):  # another process was faster
            store.delete(uuid)
    return to_delete


def mark_missing(store: storage.CheckpointStore, database: DatabaseLocation) -> list[str]:
    """Record as deleted the checkpoints whose folder in this store is gone, and return their ids.

    Does nothing for an empty store: it may be a disk that is not mounted.
    """
    recorded = tracking.TrackingReader(database).checkpoints()
    # Read second, since a checkpoint is recorded after it is in the store.
    present = set(store.list())
    if not present:
        return []
    own = [one for one in recorded if one.path == storage.location_in(store, one.uuid)]
    missing = [one for one in own if one.state is CheckpointState.COMPLETED and one.uuid not in present]
    for one in missing:
        _record(database, one.experiment_id, one.trial_id, tracking.CheckpointDeleted(uuid=one.uuid))
    return [one.uuid for one in missing]


def expired_checkpoints(
    records: tracking.TrackingReader,
    stored: Collection[str],
    experiment_id: int,
    keep: storage.Retention,
    metric: tuple[str, bool] | None,
) -> list[tracking.CheckpointRecord]:
    """Return the checkpoints of an experiment that retention lets go, out of those with `stored` ids.

    `metric` is (name, smaller_is_better). Keeps registered checkpoints, and those that some trial continues or
    starts from.
    """
    on_record, ids_stored = records.checkpoints(experiment_id), set(stored)
    present = [one for one in on_record if one.state is CheckpointState.COMPLETED and one.uuid in ids_stored]
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
    ids = set(storage.expired(candidates, keep, needed))
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


def _read_unrecorded(
    store: storage.CheckpointStore, uuid: str, database: DatabaseLocation
) -> tuple[int, int, tracking.CheckpointSaved] | None:
    """Return (experiment_id, trial_id, message) of an intact checkpoint of a run of this database, or None."""
    try:
        with store.open(uuid) as saved:
            if not saved.has_manifest:  # never complete, or not ours
                return None
            match saved.manifest.origin:
                case {"database": own, "experiment_id": int(experiment), "trial_id": int(trial)} if own == name_of(
                    database
                ) and bool not in (type(experiment), type(trial)):
                    saved.verify()
                    return experiment, trial, saved_message(saved, saved.created)
            return None
    except (errors.InvalidCheckpointException, OSError, ValueError) as error:
        if uuid in store.list():  # another process may have deleted it meanwhile
            warnings.warn(f"Checkpoint {uuid} is not on record and is passed over: {error}", stacklevel=3)
        return None


def _record(database: DatabaseLocation, experiment_id: int, trial_id: int, message: tracking.Message) -> None:
    with tracking.TrialWriter.attach(database, experiment_id, trial_id) as recorder:
        recorder.write([message])
