"""Read the checkpoints that are on record."""

from __future__ import annotations

import os
import pathlib

from determined import errors, storage
from determined.tracking import CheckpointRecord, CheckpointState


def open_checkpoint(checkpoint: CheckpointRecord) -> storage.SavedCheckpoint:
    """Return a checkpoint to read, in a `with` block."""
    if checkpoint.state is CheckpointState.DELETED:
        raise errors.CheckpointNotFoundException(
            f"checkpoint {checkpoint.uuid} was deleted; `det checkpoint list` shows those that are COMPLETED."
        )
    return storage.open_at(checkpoint.path)


def download_checkpoint(checkpoint: CheckpointRecord, folder: str | os.PathLike[str]) -> pathlib.Path:
    """Copy the files of a checkpoint into a new or empty folder and return it; one that has them already is fine."""
    with open_checkpoint(checkpoint) as saved:
        return storage.download(saved, folder, checkpoint.resources)
