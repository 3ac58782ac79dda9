"""Copies of checkpoints in folders of the user, complete or not there."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping

from determined import errors
from determined.storage._base import SavedCheckpoint
from determined.storage._local import errors_naming, open_folder


def download(saved: SavedCheckpoint, folder: str | os.PathLike[str], sizes: Mapping[str, int]) -> pathlib.Path:
    """Copy a checkpoint into a new or empty folder and return it; a folder that has the checkpoint already is fine.

    `sizes` are those of its files on record, for a checkpoint without a manifest.
    """
    target = pathlib.Path(folder).absolute()
    if target.is_dir() and any(target.iterdir()):
        _require_same(saved, target, sizes)
        return target
    if target.exists() and not target.is_dir():
        raise errors.StorageException(f"{str(target)!r} is a file; name a new or empty folder for the checkpoint.")
    with errors_naming(target), staged(target) as staging:
        shutil.copytree(saved.folder, staging, symlinks=True, dirs_exist_ok=True)
        _verify(saved, staging, sizes)
    return target


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
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _require_same(saved: SavedCheckpoint, target: pathlib.Path, sizes: Mapping[str, int]) -> None:
    try:
        _verify(saved, target, sizes)
    except errors.InvalidCheckpointException as error:
        raise errors.StorageException(
            f"{str(target)!r} is not empty, and does not hold checkpoint {saved.id}; name another folder."
        ) from error


def _verify(saved: SavedCheckpoint, folder: pathlib.Path, sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else "no"
        if not name.endswith("/") and found != size:
            raise errors.InvalidCheckpointException(
                f"{name!r} of checkpoint {saved.id} has {found} bytes instead of {size} under {saved.location!r}; the "
                "checkpoint is damaged: use another one."
            )
    copy = open_folder(folder)
    if copy.has_manifest:
        copy.verify()
