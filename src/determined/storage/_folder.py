"""Checkpoints as folders below one folder, written aside and committed by rename."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
from collections.abc import Iterator

from determined import errors

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PARTIAL = ".partial"


class FolderStore:
    """A store that keeps each checkpoint in a folder named by its id."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root

    def path(self, checkpoint_id: str) -> pathlib.Path:
        """Return the folder of an existing checkpoint."""
        folder = self.root / _checked(checkpoint_id)
        if not folder.is_dir():
            raise errors.CheckpointNotFoundException(
                f"There is no checkpoint {checkpoint_id!r} in {self.root}; "
                "`det checkpoint list` shows the ids that exist."
            )
        return folder

    @contextlib.contextmanager
    def create(self, checkpoint_id: str) -> Iterator[pathlib.Path]:
        """Give a folder to fill; it becomes the checkpoint when the block ends without an exception."""
        final = self.root / _checked(checkpoint_id)
        staging = final.with_name(final.name + _PARTIAL)
        if final.exists():
            raise errors.StorageException(f"Checkpoint {checkpoint_id!r} exists already in {self.root}.")
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            staging.mkdir(mode=0o700)
        except OSError as error:
            raise errors.StorageException(
                f"Checkpoints cannot be written to {self.root} ({error.strerror}); set DET_HOME or "
                "checkpoint_storage to a folder that this user may write."
            ) from error
        try:
            yield staging
            _sync_tree(staging)
            staging.rename(final)
            _sync(self.root)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise

    def delete(self, checkpoint_id: str) -> None:
        """Remove a checkpoint; it disappears at once, also when the removal is interrupted."""
        folder = self.path(checkpoint_id)
        doomed = folder.with_name(folder.name + _PARTIAL)
        folder.rename(doomed)
        shutil.rmtree(doomed)

    def ids(self) -> list[str]:
        """Return the ids of all checkpoints in the store."""
        if not self.root.is_dir():
            return []
        return sorted(p.name for p in self.root.iterdir() if p.is_dir() and not p.name.endswith(_PARTIAL))


def _checked(checkpoint_id: str) -> str:
    if not isinstance(checkpoint_id, str) or not _ID.fullmatch(checkpoint_id) or checkpoint_id.endswith(_PARTIAL):
        raise errors.InvalidCheckpointException(
            f"{checkpoint_id!r} is not a checkpoint id; ids are letters, digits, '-', '_' and '.', "
            "as `det checkpoint list` shows them."
        )
    return checkpoint_id


def _sync_tree(folder: pathlib.Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            _sync(pathlib.Path(parent, name))
        _sync(pathlib.Path(parent))


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
