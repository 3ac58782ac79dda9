"""Copies of checkpoints for people, made whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from determined import errors, storage
from determined.tracking import CheckpointRecord, CheckpointState


def download_checkpoint(checkpoint: CheckpointRecord, folder: str | os.PathLike[str]) -> pathlib.Path:
    """Copy the files of a checkpoint into a new or empty folder, and return it; one that has them already is fine."""
    source, target = folder_of(checkpoint), pathlib.Path(folder).absolute()
    if target.is_dir() and any(target.iterdir()):
        _require_same(checkpoint, target)
        return target
    if target.exists() and not target.is_dir():
        raise errors.StorageException(f"{str(target)!r} is a file; name a new or empty folder for the checkpoint.")
    with storage.errors_naming(target), staged(target) as staging:
        shutil.copytree(source, staging, symlinks=True, dirs_exist_ok=True)
        _verify(checkpoint, staging)
    return target


def folder_of(checkpoint: CheckpointRecord) -> pathlib.Path:
    """Return the folder of a checkpoint that is there."""
    if checkpoint.state is CheckpointState.DELETED:
        raise errors.CheckpointNotFoundException(
            f"checkpoint {checkpoint.uuid} was deleted; `det checkpoint list` shows those that are COMPLETED."
        )
    folder = pathlib.Path(checkpoint.path)
    if not folder.is_dir():
        raise errors.CheckpointNotFoundException(
            f"the folder {checkpoint.path!r} of checkpoint {checkpoint.uuid} is not there; run this on a machine that "
            "has it, or put it back."
        )
    return folder


def _require_same(checkpoint: CheckpointRecord, target: pathlib.Path) -> None:
    try:
        _verify(checkpoint, target)
    except errors.InvalidCheckpointException as error:
        raise errors.StorageException(
            f"{str(target)!r} is not empty, and does not hold checkpoint {checkpoint.uuid}; name another folder."
        ) from error


def _verify(checkpoint: CheckpointRecord, folder: pathlib.Path) -> None:
    """Raise what is wrong with a copy; its manifest knows the contents, the record the sizes."""
    for name, size in checkpoint.resources.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else "no"
        if not name.endswith("/") and found != size:
            raise errors.InvalidCheckpointException(
                f"{name!r} of checkpoint {checkpoint.uuid} has {found} bytes instead of {size} under "
                f"{checkpoint.path!r}; the checkpoint is damaged: use another one."
            )
    if (folder / storage.MANIFEST_FILE).is_file():
        storage.Manifest.read(folder).verify(folder)


@contextlib.contextmanager
def staged(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Give a folder beside the target that takes its place on success and vanishes on failure."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        yield staging
        if target.exists():
            target.rmdir()  # only an empty folder goes, and Windows renames over none
        os.rename(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
