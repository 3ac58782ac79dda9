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
from determined.core._checkpoint_shards import (
    Attempt,
    Shard,
    check_same_folder,
    finished_shard,
    make_shard_folder,
    merge_shards,
    on_chief,
    on_first_of_machine,
    wait_for_machine,
)
from determined.core._distributed import DistributedContext
from determined.core._recorder import RunRecorder, checked_metadata, now
from determined.core.checkpoint_gc import METADATA_FILE, record_unrecorded

Selector = Callable[[str], bool]


class DownloadMode(enum.Enum):
    """Whether the processes of one machine share a downloaded checkpoint."""

    LocalWorkersShareDownload = "LOCAL_WORKERS_SHARE_DOWNLOAD"
    NoSharedDownload = "NO_SHARED_DOWNLOAD"


class CheckpointContext:
    """Saves the checkpoints of this trial, and reads any in the same store."""

    def __init__(
        self,
        distributed: DistributedContext,
        store: storage.FolderStore,
        recorder: RunRecorder,
    ) -> None:
        self._distributed = distributed
        self._recorder = recorder
        self.store = store

    @contextlib.contextmanager
    def store_path(
        self, metadata: Mapping[str, Any] | None = None, *, shard: bool = False
    ) -> Iterator[tuple[pathlib.Path, str]]:
        """Yield (folder, storage_id): what is in the folder when the block ends becomes the checkpoint.

        An exception in the block leaves nothing behind. With several ranks, only the chief may call this; with
        `shard=True` all ranks must. Each then gets a folder of its own, and the checkpoint has the files and the
        metadata of all. If one rank raises, all do; so they do if two ranks write different contents to one name.
        """
        if shard and self._distributed.size > 1:
            with self._store_shards(metadata) as (folder, storage_id):
                yield folder, storage_id
            return
        if not self._distributed.is_chief:
            raise errors.WrongRankError(
                f"store_path() or upload() was called on rank {self._distributed.rank}, where only the chief, rank 0, "
                "may; call it there alone, or with shard=True on all ranks."
            )
        storage_id = str(uuid.uuid4())
        metadata = checked_metadata("checkpoint", metadata)
        _steps_completed(metadata)
        with self.store.create(storage_id, self._recorder.origin) as folder:
            yield folder, storage_id
            resources = self._finish(folder, metadata)
        self._record(storage_id, metadata, resources)

    @contextlib.contextmanager
    def _store_shards(self, metadata: Mapping[str, Any] | None) -> Iterator[tuple[pathlib.Path, str]]:
        """Give each rank a folder of its own; the chief merges them into one checkpoint."""
        ranks, storage_id = self._distributed, str(uuid.uuid4())
        staging, own = pathlib.Path(), pathlib.Path()
        with contextlib.ExitStack() as stack:
            with Attempt(ranks) as begun:
                checked = checked_metadata("checkpoint", metadata)
                _steps_completed(checked)
                if ranks.is_chief:
                    staging = stack.enter_context(self.store.create(storage_id, self._recorder.origin))
            storage_id, staging = begun.settle((storage_id, staging))[0]
            with Attempt(ranks) as placed:
                own = make_shard_folder(staging, ranks.rank)
            placed.settle(None)
            shard = Shard({}, {})
            with Attempt(ranks) as filled:
                yield own, storage_id
                shard = finished_shard(own, checked)
            shards = filled.settle(shard)

            def commit() -> None:
                merged = merge_shards(staging, shards)
                resources = self._finish(staging, merged)
                stack.close()
                self._record(storage_id, merged, resources)

            on_chief(ranks, commit)

    def _finish(self, folder: pathlib.Path, metadata: Mapping[str, Any]) -> dict[str, int]:
        (folder / METADATA_FILE).write_text(json.dumps(metadata, indent=2))
        # What was reported before the checkpoint must be recorded before it.
        self._recorder.flush()
        return _resources(folder)

    def _record(self, storage_id: str, metadata: Mapping[str, Any], resources: Mapping[str, int]) -> None:
        self._recorder.put(
            tracking.CheckpointSaved(
                uuid=storage_id,
                steps_completed=_steps_completed(metadata),
                path=str(self.store.path(storage_id)),
                metadata=metadata,
                resources=resources,
                time=now(),
            )
        )
        self._recorder.flush()
        storage.reach("recorded")

    def record_unrecorded(self) -> None:
        """Record the checkpoints of runs that died before they could record them."""
        if self._recorder.is_recorded:
            record_unrecorded(self.store, self._recorder.database)

    @contextlib.contextmanager
    def restore_path(
        self,
        storage_id: str,
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Selector | None = None,
    ) -> Iterator[pathlib.Path]:
        """Yield the folder of a checkpoint for reading; with a selector, one that holds only the chosen files.

        By default the ranks of one machine share it: all of them must call this, with the same arguments, and the
        first verifies the checkpoint for all. With `DownloadMode.NoSharedDownload` each rank does so by itself.
        """
        _check_mode("restore_path", download_mode)
        with contextlib.ExitStack() as stack:
            if not self._shares(download_mode):
                yield stack.enter_context(self._opened(storage_id, selector))
                return
            folder = on_first_of_machine(
                self._distributed, lambda: stack.enter_context(self._opened(storage_id, selector))
            )
            if selector is not None:  # the folder is removed after the block, once no rank reads it any more
                stack.callback(wait_for_machine, self._distributed)
            yield folder

    @contextlib.contextmanager
    def _opened(self, storage_id: str, selector: Selector | None) -> Iterator[pathlib.Path]:
        folder = self.store.verified(storage_id)
        if selector is None:
            yield folder
            return
        with tempfile.TemporaryDirectory(prefix="resolute-") as chosen:
            _transfer(folder, pathlib.Path(chosen), selector, os.symlink)
            yield pathlib.Path(chosen)

    def upload(
        self,
        ckpt_dir: str | os.PathLike[str],
        metadata: Mapping[str, Any] | None = None,
        *,
        shard: bool = False,
        selector: Selector | None = None,
    ) -> str:
        """Copy a folder's files into a new checkpoint and return its id.

        With several ranks, only the chief may call this; with `shard=True` all ranks must, and the checkpoint has
        the files of all.
        """
        source = pathlib.Path(ckpt_dir)
        with self.store_path(metadata, shard=shard) as (folder, storage_id):
            if not source.is_dir():
                raise errors.StorageException(f"upload({str(ckpt_dir)!r}): there is no such folder to upload.")
            _transfer(source, folder, selector, shutil.copyfile, follow_links=True)
        return storage_id

    def download(
        self,
        storage_id: str,
        ckpt_dir: str | os.PathLike[str],
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Selector | None = None,
    ) -> None:
        """Copy a checkpoint's files into a folder.

        By default the ranks of one machine share it: all of them must call this, with the same arguments, and the
        first copies for all. With `DownloadMode.NoSharedDownload` each rank does so by itself.
        """
        _check_mode("download", download_mode)
        if not self._shares(download_mode):
            self._download(storage_id, ckpt_dir, selector)
            return
        check_same_folder(self._distributed, ckpt_dir)
        on_first_of_machine(self._distributed, lambda: self._download(storage_id, ckpt_dir, selector))

    def _shares(self, download_mode: DownloadMode) -> bool:
        return download_mode is DownloadMode.LocalWorkersShareDownload and self._distributed.local_size > 1

    def _download(self, storage_id: str, ckpt_dir: str | os.PathLike[str], selector: Selector | None) -> None:
        folder, target = self.store.verified(storage_id), pathlib.Path(ckpt_dir)
        if target.exists() and not target.is_dir():
            raise errors.StorageException(f"download(ckpt_dir={str(ckpt_dir)!r}): that is a file; pass a folder.")
        target.mkdir(parents=True, exist_ok=True)
        _transfer(folder, target, selector, shutil.copyfile)
        if selector is None:  # a complete checkpoint, which can be verified at the target too
            shutil.copyfile(folder / storage.MANIFEST_FILE, target / storage.MANIFEST_FILE)

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        """Return the metadata that was saved with a checkpoint."""
        path = self.store.path(storage_id) / METADATA_FILE
        try:
            metadata = json.loads(storage.read_plain(path))
        except (OSError, ValueError, RecursionError) as error:
            raise errors.InvalidCheckpointException(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(metadata, dict):
            raise errors.InvalidCheckpointException(f"{path} holds {metadata!r}; metadata must be a mapping.")
        return metadata

    def delete(self, storage_id: str) -> None:
        """Delete a checkpoint."""
        folder = self.store.path(storage_id)
        self._recorder.put(tracking.CheckpointDeleted(uuid=folder.name))
        self._recorder.confirm()
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


def _resources(folder: pathlib.Path, *, follow_links: bool = False) -> dict[str, int]:
    """Return the sizes of the files of a checkpoint by name, without the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and (follow_links or not path.is_symlink()))
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    sizes.pop(storage.MANIFEST_FILE, None)
    return sizes


def _transfer(
    source: pathlib.Path,
    target: pathlib.Path,
    selector: Selector | None,
    put: Callable[[pathlib.Path, pathlib.Path], object],
    *,
    follow_links: bool = False,
) -> None:
    """Copy or link the chosen files of a folder into another one; `put` does so for one file."""
    for name in _resources(source, follow_links=follow_links):
        if selector is None or selector(name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            put(source / name, target / name)
