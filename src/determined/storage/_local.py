"""Checkpoints as folders below one folder, written aside and committed by rename."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from determined import errors
from determined._home import make_private
from determined.storage._base import SavedCheckpoint, section_types
from determined.storage._faults import fault_point
from determined.storage._locks import locked, remove_abandoned
from determined.storage._manifest import MANIFEST_FILE, Manifest, raise_error, walk

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PARTIAL = ".partial"


class FolderStore:
    """A store that keeps each checkpoint in a folder named by its id: complete, or not there.

    A checkpoint is staged beside its final place, in a folder that is locked for as long as its process lives. Then
    it is synced with a manifest, and renamed. What a dead process left staged is never taken for a checkpoint.
    """

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root

    def check(self) -> None:
        """Raise `StorageException` if no checkpoint can be written here; a folder that is missing is made."""
        with errors_naming(self.root / "checkpoint"):
            self._make_root()
            tempfile.TemporaryDirectory(prefix="check-", suffix=_PARTIAL, dir=self.root).cleanup()

    @property
    def location(self) -> str:
        """The path of the store."""
        return str(self.root)

    def path(self, checkpoint_id: str) -> pathlib.Path:
        """Return the folder of an existing checkpoint."""
        folder = self.root / checked_id(checkpoint_id)
        if not _is_own_folder(folder):
            raise errors.CheckpointNotFoundException(
                f"There is no checkpoint {checkpoint_id!r} in {self.root}; "
                "`det checkpoint list` shows the ids that exist."
            )
        return folder

    def begin(self) -> None:
        """Do nothing: `check` says whether checkpoints can be written, and nothing is uploaded."""

    def when_stored(self, checkpoint_id: str, action: Callable[[], None]) -> None:
        """Call `action` at once: what was created is in the store."""
        action()

    def wait(self, checkpoint_id: str | None = None) -> None:
        """Do nothing: what was created is in the store."""

    @contextlib.contextmanager
    def create(self, checkpoint_id: str, origin: Mapping[str, Any] | None = None) -> Iterator[pathlib.Path]:
        """Give a folder to fill; it becomes the checkpoint when the block ends without an exception.

        `origin` is kept in the manifest.
        """
        final = self.root / checked_id(checkpoint_id)
        if final.exists():
            raise errors.StorageException(f"Checkpoint {checkpoint_id!r} exists already in {self.root}.")
        staging = final.with_name(final.name + _PARTIAL)
        with self._staged(staging):
            fault_point("staged")
            yield staging
            fault_point("filled")
            with errors_naming(staging):
                _commit(staging, final, origin or {})

    def open(self, checkpoint_id: str) -> SavedCheckpoint:
        """Return a checkpoint to read."""
        folder = self.path(checkpoint_id)
        return SavedCheckpoint(checkpoint_id, str(folder), folder)

    def delete(self, checkpoint_id: str) -> None:
        """Remove a checkpoint; it disappears at once, also when the removal is interrupted."""
        folder = self.path(checkpoint_id)
        to_delete = folder.with_name(folder.name + _PARTIAL)
        with errors_naming(folder):
            try:
                folder.rename(to_delete)
            except FileNotFoundError:
                self.path(checkpoint_id)  # raises if another process was faster
                raise
            fault_point("to_delete")
            sync(self.root)
            # Another process may clear it as a leftover meanwhile.
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(to_delete)

    def adopt(self, saved: SavedCheckpoint) -> None:
        """Take in a checkpoint of another store, without a copy of its bytes where that is possible."""
        shutil.copytree(saved.folder, self.root / checked_id(saved.id), copy_function=_link_or_copy)

    def list(self) -> Sequence[str]:
        """Return the ids of all checkpoints in the store."""
        if not self.root.is_dir():
            return []
        return sorted(path.name for path in self.root.iterdir() if is_id(path.name) and _is_own_folder(path))

    def clear_leftovers(self) -> Sequence[str]:
        """Remove what dead processes left staged, and return the names; what a living one stages stays.

        What another machine stages counts as left after a day without a change, by the clock of the file system.
        """
        return remove_abandoned(self.root, f"*{_PARTIAL}")

    @contextlib.contextmanager
    def _staged(self, staging: pathlib.Path) -> Iterator[None]:
        """Make the staging folder and keep it locked for a block, after whose failure nothing is left of it."""
        with contextlib.ExitStack() as stack:
            with errors_naming(staging):
                self._make_root()
                if staging.exists():  # its lock may be held by this very thread
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(staging))
                stack.enter_context(locked(staging))
                staging.mkdir(mode=0o700)
                stack.callback(shutil.rmtree, staging, ignore_errors=True)  # after a commit, it is not there
            yield

    def _make_root(self) -> None:
        if self.root.is_symlink() and not self.root.exists():
            raise errors.StorageException(
                f"{self.root} is a link to {self.root.readlink()}, which does not exist; make that folder, or set "
                "DET_HOME or checkpoint_storage to another one."
            )
        missing = [folder for folder in (self.root, *self.root.parents) if not folder.exists()]
        make_private(self.root)
        for folder in missing:  # a checkpoint lasts no longer than the folders that lead to it
            sync(folder.parent)


def open_folder(folder: pathlib.Path) -> SavedCheckpoint:
    """Return the checkpoint in a folder of any name, to read."""
    if not folder.is_dir():
        raise errors.CheckpointNotFoundException(
            f"There is no checkpoint at {str(folder)!r}; use a machine that has this folder, or put it back."
        )
    return SavedCheckpoint(folder.name, str(folder), folder)


def _shared_fs(section: Mapping[str, Any]) -> FolderStore:
    host_path, storage_path = _absolute(section, "host_path"), section.get("storage_path")
    if not isinstance(storage_path, str | None):
        raise errors.StorageException(f"checkpoint_storage.storage_path={storage_path!r} must be a path.")
    folder = pathlib.Path(os.path.normpath(host_path / (storage_path or "")))
    if not folder.is_relative_to(host_path):
        raise errors.StorageException(
            f"checkpoint_storage.storage_path={storage_path!r} leaves host_path={str(host_path)!r}; "
            "use a path below it, such as 'checkpoints'."
        )
    return FolderStore(folder)


def _directory(section: Mapping[str, Any]) -> FolderStore:
    return FolderStore(_absolute(section, "container_path"))


section_types.update(shared_fs=_shared_fs, directory=_directory)


def _absolute(section: Mapping[str, Any], key: str) -> pathlib.Path:
    value = section.get(key)
    if not isinstance(value, str) or not os.path.isabs(value):
        raise errors.StorageException(
            f"checkpoint_storage.{key}={value!r} must be an absolute path for type {section['type']!r}, "
            "such as /data/checkpoints."
        )
    return pathlib.Path(os.path.normpath(value))


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another disk
        shutil.copy2(source, target)


@contextlib.contextmanager
def errors_naming(folder: pathlib.Path) -> Iterator[None]:
    """Turn an error of the file system into a `StorageException` that names the folder and the remedy."""
    try:
        yield
    except errors.DeterminedException:
        raise
    except OSError as error:
        raise errors.StorageException(
            f"{error.filename or folder} cannot be written ({error.strerror or error}); make room or permission in "
            f"{folder.parent}, or set DET_HOME or checkpoint_storage to another folder."
        ) from error


def sync_folder(folder: pathlib.Path) -> None:
    """Wait until all that is in a folder is on the disk."""
    _sync_files(folder)
    _sync_folders(folder)


def _commit(staging: pathlib.Path, final: pathlib.Path, origin: Mapping[str, Any]) -> None:
    """Make what is staged the checkpoint: durable first, then visible, then durably visible."""
    _close_to_others(staging)
    _sync_files(staging)
    fault_point("synced")
    Manifest.of(staging, origin).write(staging)
    sync(staging / MANIFEST_FILE)
    _sync_folders(staging)
    fault_point("manifested")
    staging.rename(final)
    fault_point("renamed")
    try:
        sync(final.parent)
    except OSError:
        final.rename(staging)  # what may not last must not be found
        raise
    fault_point("committed")


def is_id(name: str) -> bool:
    """Return whether a checkpoint can have this id."""
    return _ID.fullmatch(name) is not None and not name.endswith(_PARTIAL)


def _is_own_folder(path: pathlib.Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def checked_id(checkpoint_id: str) -> str:
    """Return an id; raises `InvalidCheckpointException` for what cannot be one."""
    if not isinstance(checkpoint_id, str) or not is_id(checkpoint_id):
        raise errors.InvalidCheckpointException(
            f"{checkpoint_id!r} is not a checkpoint id; ids are letters, digits, '-', '_' and '.', "
            "as `det checkpoint list` shows them."
        )
    return checkpoint_id


def _close_to_others(folder: pathlib.Path) -> None:
    """Let nobody but the owner read a checkpoint: it may hold data that the model has memorized."""
    for parent, _, _ in os.walk(folder, onerror=raise_error):
        os.chmod(parent, 0o700)
    for path in walk(folder):
        path.chmod(0o600)


def _sync_files(folder: pathlib.Path) -> None:
    # Together, since a file system can serve many waiting syncs with one write to its journal.
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(sync, walk(folder)))


def _sync_folders(folder: pathlib.Path) -> None:
    for parent, _, _ in os.walk(folder, topdown=False, onerror=raise_error):
        sync(pathlib.Path(parent))


def sync(path: pathlib.Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
