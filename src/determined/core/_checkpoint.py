"""Save and read checkpoints by id."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import pathlib
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from determined import errors, storage, tracking
from determined.core import _checkpoint_shards, checkpoint_gc
from determined.core._checkpoint_shards import on_all_ranks, on_first_rank
from determined.core._recorder import RunRecorder, checked_metadata
from determined.core.distributed import DistributedContext

Selector = Callable[[str], bool]


class DownloadMode(enum.Enum):
    """Whether the processes of one machine share a downloaded checkpoint."""

    LocalWorkersShareDownload = "LOCAL_WORKERS_SHARE_DOWNLOAD"
    NoSharedDownload = "NO_SHARED_DOWNLOAD"


class CheckpointContext:
    """Saves the checkpoints of this trial, and reads any in the same store."""

    def __init__(self, distributed: DistributedContext, store: storage.CheckpointStore, recorder: RunRecorder) -> None:
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
        metadata = _checked(metadata)
        with self.store.create(storage_id, self._recorder.origin) as folder:
            yield folder, storage_id
            self._complete(folder, metadata)
        self._record_when_stored(storage_id)

    @contextlib.contextmanager
    def _store_shards(self, metadata: Mapping[str, Any] | None) -> Iterator[tuple[pathlib.Path, str]]:
        """Give each rank a folder of its own; the chief merges them into one checkpoint."""
        ranks = self._distributed
        failure: Exception | None = None
        with contextlib.ExitStack() as stack:

            def create() -> tuple[str, pathlib.Path]:
                new_id = str(uuid.uuid4())
                return new_id, stack.enter_context(self.store.create(new_id, self._recorder.origin))

            def begin() -> tuple[pathlib.Path, dict[str, Any]]:
                return _checkpoint_shards.make_folder(staging, ranks.rank), _checked(metadata)

            def finish() -> _checkpoint_shards.Shard:
                if failure is not None:
                    raise failure
                return _checkpoint_shards.finished(own, checked)

            def commit() -> None:
                self._complete(staging, _checkpoint_shards.merge(staging, shards))
                stack.close()
                self._record_when_stored(storage_id)

            storage_id, staging = on_first_rank(ranks, create)
            own, checked = on_all_ranks(ranks, begin)[ranks.rank]
            try:
                yield own, storage_id
            except Exception as error:
                failure = error
            shards = on_all_ranks(ranks, finish)
            on_first_rank(ranks, commit)

    def _complete(self, folder: pathlib.Path, metadata: Mapping[str, Any]) -> None:
        (folder / storage.METADATA_FILE).write_text(json.dumps(metadata, indent=2))
        # What was reported before the checkpoint must be recorded before it.
        self._recorder.flush()

    def _record_when_stored(self, storage_id: str) -> None:
        """Record a checkpoint once it is in the store: what is on record can be read on any machine."""
        timestamp = time.time()

        def record() -> None:
            with self.store.open(storage_id) as saved:
                self._recorder.put(checkpoint_gc.saved_message(saved, timestamp))
            self._recorder.flush()
            storage.fault_point("recorded")

        self.store.when_stored(storage_id, record)

    def wait(self, storage_id: str | None = None) -> None:
        """Wait until a checkpoint, or all that were saved, are in the store and on record. Does nothing on workers."""
        if self._distributed.is_chief:
            self.store.wait(storage_id)

    def record_unrecorded(self) -> None:
        """Record the checkpoints of runs that died before they could record them."""
        self.wait()
        if self._recorder.is_recorded:
            checkpoint_gc.record_unrecorded(self.store, self._recorder.database)

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
        is_shared = self._is_shared("restore_path", download_mode)
        with contextlib.ExitStack() as stack:

            def open_folder() -> tuple[pathlib.Path, bool]:
                saved = stack.enter_context(self.store.open(storage_id))
                saved.verify()
                if selector is None:
                    return saved.folder, saved.is_copy
                chosen = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="resolute-")))
                _transfer(saved.folder, chosen, selector, os.symlink)
                return chosen, True

            folder, is_copy = (
                on_first_rank(self._distributed, open_folder, of_machine=True) if is_shared else open_folder()
            )
            if is_shared and is_copy:  # the folder stays until no rank reads it any more
                stack.callback(_checkpoint_shards.wait_for_machine, self._distributed)
            yield folder

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
        if not self._is_shared("download", download_mode):
            self._download(storage_id, ckpt_dir, selector)
            return
        folders = self._distributed.allgather_local(os.path.abspath(ckpt_dir))
        if len(set(folders)) > 1:
            raise errors.MisuseError(
                "download(ckpt_dir=...) got different folders on the ranks of one machine: "
                f"{', '.join(sorted(folders))}. They share one download: pass the same folder, or "
                "download_mode=core.DownloadMode.NoSharedDownload."
            )
        on_first_rank(self._distributed, lambda: self._download(storage_id, ckpt_dir, selector), of_machine=True)

    def _is_shared(self, call: str, mode: DownloadMode) -> bool:
        if not isinstance(mode, DownloadMode):
            raise TypeError(f"{call}(download_mode={mode!r}): pass a member of core.DownloadMode.")
        return mode is DownloadMode.LocalWorkersShareDownload and self._distributed.local_size > 1

    def _download(self, storage_id: str, ckpt_dir: str | os.PathLike[str], selector: Selector | None) -> None:
        target = pathlib.Path(ckpt_dir)
        with self.store.open(storage_id) as saved:
            saved.verify()
            if target.exists() and not target.is_dir():
                raise errors.StorageException(f"download(ckpt_dir={str(ckpt_dir)!r}): that is a file; pass a folder.")
            target.mkdir(parents=True, exist_ok=True)
            _transfer(saved.folder, target, selector, shutil.copyfile)
            if selector is None:  # a complete checkpoint, which can be verified at the target too
                shutil.copyfile(saved.file(storage.MANIFEST_FILE), target / storage.MANIFEST_FILE)

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        """Return the metadata that was saved with a checkpoint."""
        with self.store.open(storage_id) as saved:
            return saved.metadata

    def delete(self, storage_id: str) -> None:
        """Delete a checkpoint."""
        self.wait(storage_id)  # so that it is recorded before it is recorded as deleted
        with self.store.open(storage_id) as saved:
            self._recorder.put(tracking.CheckpointDeleted(uuid=saved.id))
        self._recorder.confirm()
        storage.fault_point("unlisted")
        self.store.delete(storage_id)


def _checked(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    checked = checked_metadata("checkpoint", metadata)
    checkpoint_gc.steps_completed(checked)
    return checked


def _transfer(
    source: pathlib.Path,
    target: pathlib.Path,
    selector: Selector | None,
    put: Callable[[pathlib.Path, pathlib.Path], object],
    *,
    follow_links: bool = False,
) -> None:
    """Copy or link the chosen files of a folder into another one; `put` does so for one file."""
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        is_file = path.is_file() and (follow_links or not path.is_symlink()) and name != storage.MANIFEST_FILE
        if is_file and (selector is None or selector(name)):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            put(path, target / name)
