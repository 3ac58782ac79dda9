"""Delete checkpoints and whole experiments, with their files."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Sequence

from determined import errors, storage
from determined._home import Home, home
from determined.tracking import (
    Catalog,
    CheckpointDeleted,
    CheckpointRecord,
    CheckpointState,
    TrackingReader,
    TrialWriter,
)


def delete_checkpoint(uuid: str, at: Home | None = None) -> CheckpointRecord:
    """Delete a checkpoint and its files for good; returns what was on record of it.

    `TrackingException` if it is a version of a model, or if trials of an experiment that has not ended begin with it.
    """
    place = at or home()
    records = TrackingReader(place.database)
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
    remove_checkpoints([found], place)
    return found


def delete(experiment_id: int, at: Home | None = None, *, force: bool = False) -> None:
    """Delete an experiment: its record, checkpoints, program, logs and TensorBoard files.

    `TrackingException` while it runs, or may run on another machine (then `force` deletes it), while one of its
    checkpoints is a version of a model, and while trials of another experiment are to begin with one.
    """
    place = at or home()
    catalog, records = Catalog(place.database), TrackingReader(place.database)
    catalog.require_deletable(experiment_id, force=force)
    present = [one for one in records.checkpoints(experiment_id) if one.state is CheckpointState.COMPLETED]
    _require_no_source(records, present, f"experiment {experiment_id}", but=experiment_id)
    # The record last: as long as it is there, what an interruption has left can be deleted by another try.
    remove_checkpoints(present, place)
    for folder in (place.experiment(experiment_id), place.tensorboards(experiment_id)):
        with storage.errors_naming(folder), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
    catalog.delete_experiment(experiment_id, force=force)


def remove_checkpoints(checkpoints: Sequence[CheckpointRecord], place: Home) -> None:
    """Remove checkpoints of an experiment: first from the record, so that none on record is ever half there."""
    if not checkpoints:
        return
    first = checkpoints[0]
    with TrialWriter.attach(place.database, first.experiment_id, first.trial_id) as recorder:
        recorder.write([CheckpointDeleted(uuid=one.uuid) for one in checkpoints])
    for one in checkpoints:
        store, checkpoint_id = storage.locate(one.path)
        with contextlib.suppress(errors.CheckpointNotFoundException):
            store.delete(checkpoint_id)


def _require_no_source(
    records: TrackingReader, checkpoints: Iterable[CheckpointRecord], what: str, but: int | None = None
) -> None:
    """Refuse to delete what trials of an experiment that has not ended are to begin with."""
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
