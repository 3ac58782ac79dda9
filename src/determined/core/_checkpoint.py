"""Save and read checkpoints by id."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from determined import errors, storage, tracking
from determined.core._distributed import DistributedContext
from determined.core._recording import Recording, now

METADATA_FILE = "metadata.json"

Selector = Callable[[str], bool]


class DownloadMode(enum.Enum):
    """Whether the processes of one machine share a downloaded checkpoint."""

    LocalWorkersShareDownload = "LOCAL_WORKERS_SHARE_DOWNLOAD"
    NoSharedDownload = "NO_SHARED_DOWNLOAD"


class CheckpointContext:
    """The checkpoints of this trial, and any other in the same store."""

    def __init__(
        self,
        distributed: DistributedContext,
        store: storage.FolderStore,
        recording: Recording,
        flush: Callable[[], None],
    ) -> None:
        self._distributed = distributed
        self._recording = recording
        self._flush = flush
        self.store = store

    @contextlib.contextmanager
    def store_path(
        self, metadata: Mapping[str, Any] | None = None, *, shard: bool = False
    ) -> Iterator[tuple[pathlib.Path, str]]:
        """Give (folder, storage_id): what is in the folder when the block ends becomes the checkpoint.

        With an exception in the block nothing is left behind. With `shard=True` every rank contributes files.
        """
        storage_id = str(uuid.uuid4())
        metadata = _checked_metadata(metadata)
        with self.store.create(storage_id) as folder:
            yield folder, storage_id
            (folder / METADATA_FILE).write_text(json.dumps(metadata, indent=2))
            resources = _resources(folder)
            # What was reported before the checkpoint must be on record when the checkpoint is.
            self._flush()
        self._recording.put(
            tracking.CheckpointSaved(
                uuid=storage_id,
                steps_completed=int(metadata.get("steps_completed", 0)),
                path=str(self.store.path(storage_id)),
                metadata=metadata,
                resources=resources,
                time=now(),
            )
        )

    @contextlib.contextmanager
    def restore_path(
        self,
        storage_id: str,
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Selector | None = None,
    ) -> Iterator[pathlib.Path]:
        """Give the folder of a checkpoint for reading."""
        yield self.store.path(storage_id)

    def upload(
        self,
        ckpt_dir: str | os.PathLike[str],
        metadata: Mapping[str, Any] | None = None,
        *,
        shard: bool = False,
        selector: Selector | None = None,
    ) -> str:
        """Copy a folder's files into a new checkpoint and return its id."""
        source = pathlib.Path(ckpt_dir)
        if not source.is_dir():
            raise errors.StorageException(f"upload({str(ckpt_dir)!r}): there is no such folder to upload.")
        with self.store_path(metadata, shard=shard) as (folder, storage_id):
            _copy(source, folder, selector)
        return storage_id

    def download(
        self,
        storage_id: str,
        ckpt_dir: str | os.PathLike[str],
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Selector | None = None,
    ) -> None:
        """Copy a checkpoint's files into a folder."""
        _copy(self.store.path(storage_id), pathlib.Path(ckpt_dir), selector)

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        """Return the metadata that was saved with a checkpoint."""
        path = self.store.path(storage_id) / METADATA_FILE
        try:
            metadata = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise errors.InvalidCheckpointException(f"{path} cannot be read as JSON: {error}") from error
        return dict(metadata)

    def delete(self, storage_id: str) -> None:
        """Remove a checkpoint for good."""
        folder = self.store.path(storage_id)
        self._recording.put(tracking.CheckpointDeleted(uuid=folder.name))
        self._flush()
        self.store.delete(storage_id)


def _checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    plain = dict(metadata or {})
    try:
        json.dumps(plain)
    except (TypeError, ValueError) as error:
        raise ValueError(f"The checkpoint metadata {plain!r} must be JSON: {error}") from error
    return plain


def _resources(folder: pathlib.Path) -> dict[str, int]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _copy(source: pathlib.Path, target: pathlib.Path, selector: Selector | None) -> None:
    for name in _resources(source):
        if selector is None or selector(name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
