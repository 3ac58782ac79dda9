"""Save and read checkpoints by id."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import pathlib
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from determined import errors, storage, tracking
from determined.core._distributed import DistributedContext
from determined.core._metadata import checked_metadata
from determined.core._recording import Recording, now
from determined.core._recovery import METADATA_FILE, record_unrecorded

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
        metadata = checked_metadata("checkpoint", metadata)
        steps = _steps_completed(metadata)
        with self.store.create(storage_id, self._recording.origin) as folder:
            yield folder, storage_id
            (folder / METADATA_FILE).write_text(json.dumps(metadata, indent=2))
            resources = _resources(folder)
            # What was reported before the checkpoint must be on record when the checkpoint is.
            self._flush()
        self._recording.put(
            tracking.CheckpointSaved(
                uuid=storage_id,
                steps_completed=steps,
                path=str(self.store.path(storage_id)),
                metadata=metadata,
                resources=resources,
                time=now(),
            )
        )
        self._flush()
        storage.reach("recorded")

    def record_unrecorded(self) -> None:
        """Put on record what was saved by a run that died before it could."""
        if self._recording.is_kept:
            record_unrecorded(self.store, self._recording.database)

    @contextlib.contextmanager
    def restore_path(
        self,
        storage_id: str,
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Selector | None = None,
    ) -> Iterator[pathlib.Path]:
        """Give the folder of a checkpoint for reading; with a selector, one that holds only the chosen files."""
        _check_mode("restore_path", download_mode)
        folder = self.store.verified(storage_id)
        if selector is None:
            yield folder
            return
        with tempfile.TemporaryDirectory(prefix="resolute-") as chosen:
            _place(folder, pathlib.Path(chosen), selector, os.symlink)
            yield pathlib.Path(chosen)

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
            _place(source, folder, selector, shutil.copyfile)
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
        _check_mode("download", download_mode)
        folder, target = self.store.verified(storage_id), pathlib.Path(ckpt_dir)
        if target.exists() and not target.is_dir():
            raise errors.StorageException(f"download(ckpt_dir={str(ckpt_dir)!r}): that is a file; pass a folder.")
        target.mkdir(parents=True, exist_ok=True)
        _place(folder, target, selector, shutil.copyfile)
        if selector is None:  # a whole checkpoint, which can be verified where it is now
            shutil.copyfile(folder / storage.MANIFEST_FILE, target / storage.MANIFEST_FILE)

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        """Return the metadata that was saved with a checkpoint."""
        path = self.store.path(storage_id) / METADATA_FILE
        try:
            metadata = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise errors.InvalidCheckpointException(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(metadata, dict):
            raise errors.InvalidCheckpointException(
                f"{path} holds {metadata!r}; the metadata of a checkpoint is a map."
            )
        return metadata

    def delete(self, storage_id: str) -> None:
        """Remove a checkpoint for good."""
        folder = self.store.path(storage_id)
        self._recording.put(tracking.CheckpointDeleted(uuid=folder.name))
        self._recording.confirm()
        storage.reach("unlisted")
        self.store.delete(storage_id)


def _steps_completed(metadata: Mapping[str, Any]) -> int:
    steps = metadata.get("steps_completed", 0)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(
            f"The checkpoint metadata has steps_completed={steps!r}; pass the batches trained, an int >= 0."
        )
    return steps


def _check_mode(call: str, mode: Any) -> None:
    if not isinstance(mode, DownloadMode):
        raise TypeError(f"{call}(download_mode={mode!r}): pass a member of core.DownloadMode.")


def _resources(folder: pathlib.Path) -> dict[str, int]:
    """Return the sizes of the files that a checkpoint was given; its manifest is the store's."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    sizes.pop(storage.MANIFEST_FILE, None)
    return sizes


def _place(
    source: pathlib.Path,
    target: pathlib.Path,
    selector: Selector | None,
    put: Callable[[pathlib.Path, pathlib.Path], object],
) -> None:
    """Put the chosen files of a folder into another one, by copying or linking each."""
    for name in _resources(source):
        if selector is None or selector(name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            put(source / name, target / name)
