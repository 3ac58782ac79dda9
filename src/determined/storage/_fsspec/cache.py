"""What a machine has of the checkpoints of a store that is elsewhere: those to upload, and copies of those it read."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from determined import errors
from determined._home import make_private, private_opener
from determined.storage._local import FolderStore, errors_naming, sync
from determined.storage._locks import lock_if_free, locked, shared, unshared
from determined.storage._manifest import MANIFEST_FILE, Manifest, walk

logger = logging.getLogger("determined.storage")

SIZE_VARIABLE = "DET_CHECKPOINT_CACHE_GB"
_DEFAULT_GB = 10.0
_PENDING = ".upload"
_USE = ".use"
_STORE_FILE = "store.json"


class LocalCopies:
    """Folders of checkpoints by id, shared by all processes of a machine.

    One with a file `<id>.upload` beside it is not in the store yet, and stays until it is. All others are copies, which
    are removed when they are not in use and together larger than the limit, the least recently used first.
    """

    def __init__(self, folder: pathlib.Path, location: str) -> None:
        self.root = folder
        self._location = location
        self._folders = FolderStore(folder)

    def path(self, checkpoint_id: str) -> pathlib.Path:
        """Return where the folder of a checkpoint is, or would be."""
        return self.root / checkpoint_id

    def has(self, checkpoint_id: str) -> bool:
        """Return whether the folder of a checkpoint is here."""
        return self.path(checkpoint_id).is_dir()

    def is_pending(self, checkpoint_id: str) -> bool:
        """Return whether a checkpoint is here and not in the store."""
        return self._beside(checkpoint_id, _PENDING).exists() and self.has(checkpoint_id)

    @contextlib.contextmanager
    def stage(
        self, checkpoint_id: str, origin: Mapping[str, Any] | None, put: Callable[[contextlib.ExitStack], None]
    ) -> Iterator[pathlib.Path]:
        """Give a folder to fill, which is on the disk to stay when the block ends without an exception.

        Then `put` gets the lock that keeps other processes from uploading it.
        """
        marker = self._beside(checkpoint_id, _PENDING)
        with contextlib.ExitStack() as stack:
            with errors_naming(marker):
                self._make_root()
                stack.enter_context(locked(self.path(checkpoint_id)))
                marker.touch(mode=0o600)  # before the folder, whose commit also makes this durable
            try:
                with self._folders.create(checkpoint_id, origin) as folder:
                    yield folder
            except BaseException:
                if not self.has(checkpoint_id):
                    marker.unlink(missing_ok=True)
                raise
            put(stack.pop_all())

    def take_pending(self) -> Iterator[tuple[str, contextlib.ExitStack]]:
        """Yield the checkpoints that dead processes have not uploaded, each with its lock."""
        for marker in sorted(self.root.glob(f"*{_PENDING}")):
            checkpoint_id = marker.name.removesuffix(_PENDING)
            lock = lock_if_free(self.path(checkpoint_id))
            if lock is None:
                continue
            if self.is_pending(checkpoint_id):
                yield checkpoint_id, lock
            else:  # its process died before the checkpoint was complete, or another one has uploaded it
                marker.unlink(missing_ok=True)
                lock.close()

    def pending(self) -> Sequence[str]:
        """Return the ids of the checkpoints that are not in the store yet."""
        names = [path.name.removesuffix(_PENDING) for path in self.root.glob(f"*{_PENDING}")]
        return sorted(name for name in names if self.has(name))

    def mark_uploaded(self, checkpoint_id: str) -> None:
        """Let a checkpoint that is in the store be a copy, which may be removed."""
        self._beside(checkpoint_id, _PENDING).unlink(missing_ok=True)
        self._beside(checkpoint_id, _USE).touch(mode=0o600)

    @contextlib.contextmanager
    def in_use(self, checkpoint_id: str) -> Iterator[None]:
        """Keep the folder of a checkpoint during the block, whether it is here already or is fetched in it."""
        with errors_naming(self.root):
            self._make_root()
        use = self._beside(checkpoint_id, _USE)
        with shared(use):
            yield
        if not self.has(checkpoint_id):
            with unshared(use):
                pass

    def fetched(
        self, checkpoint_id: str, manifest: bytes, fetch: Callable[[pathlib.Path, Manifest], None]
    ) -> pathlib.Path:
        """Return the folder of a checkpoint whose files are those of a manifest; `fetch` downloads them if need be.

        One process of a machine downloads, the others wait for it. Files with wrong checksums are fetched again.
        """
        final = self.path(checkpoint_id)
        if self._is_intact(final, manifest):
            return final
        staging = final.with_name(f"{final.name}.partial")
        with errors_naming(staging), locked(staging):
            if self._is_intact(final, manifest):  # another process has fetched it meanwhile
                return final
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(mode=0o700)
            try:
                (staging / MANIFEST_FILE).write_bytes(manifest)
                (staging / MANIFEST_FILE).chmod(0o600)
                expected = Manifest.read(staging)
                fetch(staging, expected)
                expected.verify(staging)
                shutil.rmtree(final, ignore_errors=True)
                staging.rename(final)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        return final

    def remove(self, checkpoint_id: str) -> None:
        """Remove the copy of a checkpoint, if there is one."""
        with contextlib.suppress(errors.CheckpointNotFoundException):
            self._folders.delete(checkpoint_id)

    def clear_leftovers(self) -> Sequence[str]:
        """Remove what dead processes were writing; returns the names."""
        return self._folders.clear_leftovers()

    def evict(self) -> None:
        """Remove copies that are not in use until those of all stores are below the limit."""
        stores = [LocalCopies(folder, "") for folder in self.root.parent.iterdir() if folder.is_dir()]
        copies = [(use.stat().st_mtime, use, store) for store in stores for use in store.root.glob(f"*{_USE}")]
        sizes = {use: _size(use.with_suffix("")) for _, use, _ in copies}
        excess = sum(sizes.values()) - _limit()
        for _, use, store in sorted(copies, key=lambda one: one[0]):
            if excess <= 0:
                return
            name = use.name.removesuffix(_USE)
            with unshared(use) as is_free:
                if is_free and not store.is_pending(name):
                    store.remove(name)
                    excess -= sizes[use]

    def _is_intact(self, folder: pathlib.Path, manifest: bytes) -> bool:
        try:
            if (folder / MANIFEST_FILE).read_bytes() != manifest:
                return False
            Manifest.read(folder).verify(folder)
        except FileNotFoundError:
            return False
        except errors.InvalidCheckpointException as error:
            logger.warning("A local copy of a checkpoint is damaged and is fetched again: %s", error)
            return False
        return True

    def _make_root(self) -> None:
        if self.root.is_dir():
            return
        make_private(self.root)
        # Says to `det gc` and `det doctor` to which store the folder belongs.
        with open(self.root / _STORE_FILE, "w", opener=private_opener) as file:
            json.dump({"location": self._location}, file)
        sync(self.root)

    def _beside(self, checkpoint_id: str, suffix: str) -> pathlib.Path:
        return self.root / f"{checkpoint_id}{suffix}"


def abandoned_uploads(stores: pathlib.Path) -> dict[str, list[str]]:
    """Return the checkpoints that no living process uploads, by the location of their store."""
    found: dict[str, list[str]] = {}
    for folder in sorted(stores.glob("*")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            location = str(json.loads((folder / _STORE_FILE).read_bytes())["location"])
            for checkpoint_id, lock in LocalCopies(folder, location).take_pending():
                lock.close()
                found.setdefault(location, []).append(checkpoint_id)
    return found


def _size(folder: pathlib.Path) -> int:
    try:
        return sum(path.stat().st_size for path in walk(folder))
    except FileNotFoundError:
        return 0


def _limit() -> float:
    text = os.environ.get(SIZE_VARIABLE, "")
    try:
        return (float(text) if text else _DEFAULT_GB) * 2**30
    except ValueError:
        raise errors.StorageException(
            f"{SIZE_VARIABLE}={text!r} is not a number; write how many GiB of checkpoints may be cached, such as 10."
        ) from None
