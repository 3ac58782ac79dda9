"""What a checkpoint store does, whatever it keeps the files in.

A store is one module of this package. It implements `CheckpointStore`, and registers how it is chosen: by the `type` of
a `checkpoint_storage` section, or by the scheme of a URL.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

from determined import errors
from determined.storage._manifest import MANIFEST_FILE, Manifest
from determined.storage._plain import read_json

METADATA_FILE = "metadata.json"
"""The file of a checkpoint that holds its metadata."""


class SavedCheckpoint:
    """A checkpoint that is open for reading, as a folder of this machine; a context manager.

    A store whose checkpoints are elsewhere overrides `file` and `folder` to fetch them, and `close` to clean up.
    """

    is_copy = False
    """Whether the folder ends with `close`."""

    def __init__(self, checkpoint_id: str, location: str, folder: pathlib.Path) -> None:
        self.id = checkpoint_id
        self.location = location
        self._folder = folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the use of the folder."""

    @property
    def folder(self) -> pathlib.Path:
        """The folder with all files of the checkpoint, for reading."""
        return self._folder

    def file(self, name: str) -> pathlib.Path:
        """Return the path of one small file of the checkpoint, which need not exist."""
        return self._folder / name

    @property
    def created(self) -> float:
        """When the checkpoint was completed, in seconds since 1970."""
        return self._folder.stat().st_mtime

    @property
    def has_manifest(self) -> bool:
        """False for a checkpoint that Determined wrote, and for a folder that is not a checkpoint."""
        return self.file(MANIFEST_FILE).is_file()

    @functools.cached_property
    def manifest(self) -> Manifest:
        """The names, sizes and checksums of the files, and the origin; raises `InvalidCheckpointException`."""
        return Manifest.read(self.file(MANIFEST_FILE).parent)

    @property
    def metadata(self) -> dict[str, Any]:
        """What was saved with the files; raises `InvalidCheckpointException`."""
        path = self.file(METADATA_FILE)
        try:
            return read_json(path)
        except (OSError, ValueError) as error:
            raise errors.InvalidCheckpointException(f"{path} cannot be read as JSON: {error}") from error

    def verify(self) -> None:
        """Raise `InvalidCheckpointException` unless all files are as they were saved."""
        self.manifest.verify(self.folder)


class CheckpointStore(Protocol):
    """Keeps checkpoints by id: each one complete, or not there."""

    @property
    def location(self) -> str:
        """The path or URL of the store; that of a checkpoint has its id after a slash."""

    def check(self) -> None:
        """Raise `StorageException` if no checkpoint can be written here."""

    def begin(self) -> None:
        """Called by the chief of a run before the first checkpoint: go on with what dead processes were uploading.

        Raises `StorageException` if the store is not on this machine and cannot be used.
        """

    def create(
        self, checkpoint_id: str, origin: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[pathlib.Path]:
        """Give a folder to fill; it becomes the checkpoint when the block ends without an exception.

        Then it is safe from a crash of this machine, and `open` finds it here. A store that is elsewhere uploads it in
        the background: see `when_stored` and `wait`.

        `origin` is kept in the manifest. Several ranks fill subfolders, which the one that called this merges.
        """

    def when_stored(self, checkpoint_id: str, action: Callable[[], None]) -> None:
        """Call `action` when a checkpoint that this process created is in the store, on any thread.

        What it raises is raised here or by `wait`. It is not called if the process ends before.
        """

    def wait(self, checkpoint_id: str | None = None) -> None:
        """Wait until a checkpoint of this process, or all, are in the store. `StorageException` if it is away."""

    def open(self, checkpoint_id: str) -> SavedCheckpoint:
        """Return a checkpoint to read, in a `with` block; raises `CheckpointNotFoundException`."""

    def delete(self, checkpoint_id: str) -> None:
        """Remove a checkpoint: at once for readers, also if the removal is interrupted."""

    def list(self) -> Sequence[str]:
        """Return the ids of all checkpoints, sorted."""

    def clear_leftovers(self) -> Sequence[str]:
        """Remove what dead processes left of checkpoints that they were writing or deleting, and return the names."""


section_types: dict[str, Callable[[Mapping[str, Any]], CheckpointStore]] = {}
"""What makes a store of a `checkpoint_storage` section, by its `type`."""

url_schemes: dict[str, Callable[[str], CheckpointStore]] = {}
"""What makes a store of a URL, by its scheme."""
