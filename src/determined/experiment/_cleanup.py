"""Delete checkpoints, whole experiments, and the files that expire when an experiment ends."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence

from determined import _home, errors, storage
from determined._home import Home
from determined.core.checkpoint_gc import expired_checkpoints
from determined.experiment.config import ExperimentConfig
from determined.tracking import (
    Catalog,
    CheckpointDeleted,
    CheckpointRecord,
    CheckpointState,
    TrackingReader,
    TrialWriter,
)

logger = logging.getLogger("determined.experiment")

_DAY_S = 86400.0


def delete_checkpoint(uuid: str, at: Home | None = None) -> CheckpointRecord:
    """Delete a checkpoint and its files for good; returns its record.

    `ConflictException` if it is a version of a model, or the source of an experiment that has not ended.
    """
    home = at or _home.home()
    records = TrackingReader(home.database)
    found = records.checkpoint(uuid)
    if found.state is CheckpointState.DELETED:
        raise errors.ConflictException(
            f"checkpoint {found.uuid} was deleted before; `det checkpoint list` shows those that are COMPLETED."
        )
    if found.uuid in records.registered_checkpoints():
        raise errors.ConflictException(
            f"checkpoint {found.uuid} cannot be deleted: it is a version of a model; delete that version first: "
            "client.get_model(NAME).get_version(NUMBER).delete() in Python, with `from determined.experimental import "
            "client`."
        )
    _require_no_source(records, [found], f"checkpoint {found.uuid}")
    remove_checkpoints([found], home)
    return found


def delete(experiment_id: int, at: Home | None = None, *, force: bool = False) -> None:
    """Delete an experiment: its record, checkpoints, program, logs and TensorBoard files.

    `ConflictException` while it runs, or may run on another machine (then `force` deletes it), while one of its
    checkpoints is a version of a model, and while one is the source of another experiment.
    """
    home = at or _home.home()
    catalog, records = Catalog(home.database), TrackingReader(home.database)
    catalog.require_deletable(experiment_id, force=force)
    present = [one for one in records.checkpoints(experiment_id) if one.state is CheckpointState.COMPLETED]
    _require_no_source(records, present, f"experiment {experiment_id}", but=experiment_id)
    # The record last: as long as it is there, an interrupted deletion can be repeated.
    remove_checkpoints(present, home)
    for folder in (home.experiment(experiment_id), home.tensorboards(experiment_id)):
        with storage.errors_naming(folder), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
    _remove_uploaded_curves(experiment_id, records, home)
    catalog.delete_experiment(experiment_id, force=force)


def _remove_uploaded_curves(experiment_id: int, records: TrackingReader, home: Home) -> None:
    section = (records.experiment(experiment_id).config or {}).get("checkpoint_storage")
    try:
        store = storage.store_for(section, home.checkpoints)
        if isinstance(store, storage.FsspecStore):
            store.remove_tree(home.tensorboard_prefix(experiment_id))
    except (errors.StorageException, TypeError) as error:  # such as a bucket that is gone
        logger.warning("the TensorBoard files of experiment %d could not be removed: %s", experiment_id, error)


def remove_checkpoints(checkpoints: Sequence[CheckpointRecord], home: Home) -> None:
    """Remove checkpoints of an experiment: first from the record, so that none on record is incomplete."""
    if not checkpoints:
        return
    first = checkpoints[0]
    with TrialWriter.attach(home.database, first.experiment_id, first.trial_id) as writer:
        writer.write([CheckpointDeleted(uuid=one.uuid) for one in checkpoints])
    for one in checkpoints:
        store, checkpoint_id = storage.locate(one.path)
        with contextlib.suppress(errors.CheckpointNotFoundException):
            store.delete(checkpoint_id)


def _require_no_source(
    records: TrackingReader, checkpoints: Iterable[CheckpointRecord], what: str, but: int | None = None
) -> None:
    """Refuse to delete the source of an experiment that has not ended."""
    to_delete = {one.uuid for one in checkpoints}
    if not to_delete & records.experiment_sources():
        return
    for experiment in records.experiments(include_archived=True):
        searcher = (experiment.config or {}).get("searcher") or {}
        source = searcher.get("source_checkpoint_uuid")
        if source in to_delete and experiment.ended is None and experiment.id != but:
            raise errors.ConflictException(
                f"{what} cannot be deleted: the trials of experiment {experiment.id} begin with checkpoint {source}; "
                f"wait for its end, or end it by `det experiment cancel {experiment.id}`."
            )


def conclude(experiment_id: int, config: ExperimentConfig, home: Home) -> list[str]:
    """Delete the checkpoints that an ended experiment does not keep, whose ids are returned, and expired logs."""
    section = config.to_dict()["checkpoint_storage"]
    keep = storage.Retention.of_section(section) or storage.Retention()
    store = storage.store_for(section, home.checkpoints)
    metric = (config.searcher.metric, config.searcher.smaller_is_better)
    found = expired_checkpoints(TrackingReader(home.database), store.list(), experiment_id, keep, metric)
    remove_checkpoints(found, home)
    if found:
        logger.info("deleted %d checkpoints that the experiment does not keep", len(found))
    remove_expired_logs(home)
    return [one.uuid for one in found]


def remove_expired_logs(home: Home, now: float | None = None) -> list[pathlib.Path]:
    """Delete the logs of experiments that ended more than their `log_retention_days` ago; returns the files."""
    now, removed = time.time() if now is None else now, []
    for experiment in TrackingReader(home.database).experiments(include_archived=True):
        days = _log_retention_days(experiment.config)
        if days is None or experiment.ended is None or now < experiment.ended + days * _DAY_S:
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
