"""The checkpoint whose weights the trials of an experiment start from."""

from __future__ import annotations

from determined import errors, storage
from determined._home import Home
from determined.experiment.config import ExperimentConfig, from_map
from determined.tracking import CheckpointRecord, CheckpointState, TrackingReader


def pinned(config: ExperimentConfig, home: Home) -> ExperimentConfig:
    """Return a config that names the source checkpoint by its id instead of its trial.

    The trial may train on, and would then have another latest checkpoint for later trials.
    """
    source = source_checkpoint(config, home)
    if source is None:
        return config
    tree = config.to_dict()
    tree["searcher"] |= {"source_trial_id": None, "source_checkpoint_uuid": source}
    return from_map(tree)


def source_checkpoint(config: ExperimentConfig, home: Home) -> str | None:
    """Return the id of the checkpoint that all trials start from, if the searcher names one."""
    uuid, trial_id = config.searcher.source_checkpoint_uuid, config.searcher.source_trial_id
    if uuid is None and trial_id is None:
        return None
    key = f"searcher.source_trial_id={trial_id}" if uuid is None else f"searcher.source_checkpoint_uuid={uuid!r}"
    records = TrackingReader(home.database)
    try:
        found = records.checkpoint(uuid) if uuid is not None else _latest(records, trial_id or 0)
    except errors.TrackingException as error:
        raise errors.InvalidExperimentException(f"{key}: {error}") from error
    if found is None:
        raise errors.InvalidExperimentException(
            f"{key}: this trial has no checkpoint; name one that `det checkpoint list` shows as COMPLETED by "
            "searcher.source_checkpoint_uuid."
        )
    _require_usable(found, key, config, home)
    return found.uuid


def _latest(records: TrackingReader, trial_id: int) -> CheckpointRecord | None:
    experiment_id = records.trial(trial_id).experiment_id
    present = [one for one in records.checkpoints(experiment_id, trial_id) if one.state is CheckpointState.COMPLETED]
    return max(present, key=lambda one: one.steps_completed, default=None)


def _require_usable(found: CheckpointRecord, key: str, config: ExperimentConfig, home: Home) -> None:
    if found.state is not CheckpointState.COMPLETED:
        raise errors.InvalidExperimentException(
            f"{key}: this checkpoint was deleted; name one that `det checkpoint list` shows as COMPLETED."
        )
    try:
        storage.open_at(found.path).close()
    except errors.CheckpointNotFoundException as error:
        raise errors.InvalidExperimentException(f"{key}: {error}") from error
    store = storage.store_for(config.to_dict()["checkpoint_storage"], home.checkpoints)
    if found.path != storage.location_in(store, found.uuid):
        raise errors.InvalidExperimentException(
            f"{key}: this checkpoint is at {found.path!r}, but those of this experiment go to {store.location!r}; set "
            "checkpoint_storage to where it is, or copy it by `det checkpoint download` and start from a script with "
            "fit(latest_checkpoint=PATH)."
        )
