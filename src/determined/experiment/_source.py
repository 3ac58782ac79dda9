"""What an experiment begins with and what it leaves: a source checkpoint, checkpoints that stay, logs that expire."""

from __future__ import annotations

import logging
import pathlib
import time
from collections.abc import Mapping

from determined import errors, storage
from determined._home import Home
from determined.core.checkpoint_gc import expired_checkpoints
from determined.experiment import _cleanup
from determined.experiment.config import ExperimentConfig, from_map
from determined.storage import Retention
from determined.tracking import CheckpointRecord, CheckpointState, TrackingReader

logger = logging.getLogger("determined.experiment")

_DAY = 86400.0


def pinned(config: ExperimentConfig, home: Home) -> ExperimentConfig:
    """Return a config that names the checkpoint of a warm start by its id, so that all trials begin alike.

    A trial that is named instead may go on training, and would have another latest checkpoint later.
    """
    source = source_checkpoint(config, home)
    if source is None:
        return config
    tree = config.to_dict()
    tree["searcher"] |= {"source_trial_id": None, "source_checkpoint_uuid": source}
    return from_map(tree)


def source_checkpoint(config: ExperimentConfig, home: Home) -> str | None:
    """Return the checkpoint whose weights all trials begin with, if the searcher names one."""
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


def conclude(experiment_id: int, config: ExperimentConfig, home: Home) -> list[str]:
    """Delete what need not stay after the end of an experiment: checkpoints of it, whose ids are returned, and logs."""
    section = config.to_dict()["checkpoint_storage"]
    keep = Retention.of_section(section) or Retention()
    store = storage.store_for(section, home.checkpoints)
    metric = (config.searcher.metric, config.searcher.smaller_is_better)
    found = expired_checkpoints(TrackingReader(home.database), store.list(), experiment_id, keep, metric)
    _cleanup.remove_checkpoints(found, home)
    if found:
        logger.info("%d checkpoints need not stay, and were deleted", len(found))
    remove_expired_logs(home)
    return [one.uuid for one in found]


def remove_expired_logs(home: Home, now: float | None = None) -> list[pathlib.Path]:
    """Delete the output of experiments that ended longer ago than `log_retention_days` of each; returns the files."""
    moment, removed = time.time() if now is None else now, []
    for experiment in TrackingReader(home.database).experiments(include_archived=True):
        days = _log_retention_days(experiment.config)
        if days is None or experiment.ended is None or moment < experiment.ended + days * _DAY:
            continue
        for log in home.logs(experiment.id):
            log.unlink(missing_ok=True)
            removed.append(log)
    return removed


def _log_retention_days(config: Mapping[str, object] | None) -> int | None:
    """Return how many days the logs of an experiment are kept; None for forever."""
    policy = (config or {}).get("retention_policy")
    days = policy.get("log_retention_days") if isinstance(policy, Mapping) else None
    return days if isinstance(days, int) and days >= 0 else None
