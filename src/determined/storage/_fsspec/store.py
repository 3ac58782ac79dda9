"""Checkpoints in object stores, by URL: `s3://`, `gs://`, `az://` and what else fsspec knows."""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from determined import errors
from determined._home import home
from determined.storage._base import SavedCheckpoint
from determined.storage._faults import fault_point
from determined.storage._fsspec.cache import LocalCopies
from determined.storage._fsspec.objects import Objects
from determined.storage._fsspec.uploads import Upload, Uploads
from determined.storage._local import checked_id, is_id
from determined.storage._locks import MAX_SILENCE_S
from determined.storage._manifest import MANIFEST_FILE, Manifest

UPLOADING = ".resolute-upload"
"""Marks a checkpoint whose files are being uploaded. It goes after the manifest has come."""
DELETING = ".resolute-delete"
"""Marks a checkpoint whose files are being deleted. It comes before the manifest goes."""


class FsspecStore:
    """A store that keeps each checkpoint as objects below its id: the files, and last of all the manifest.

    Without its manifest a checkpoint does not exist. `create` makes a checkpoint durable in the home folder, and a
    thread uploads it. `open` reads through copies in the home folder.
    """

    def __init__(self, objects: Objects, keep: Callable[[], None] = lambda: None) -> None:
        """`keep` is called when the store is known to be usable."""
        self.objects = objects
        self._keep = keep
        key = hashlib.sha256(objects.location.encode()).hexdigest()[:16]
        self.copies = LocalCopies(home().stores / key, objects.location)
        self._uploads = Uploads(objects.location, self._send, self.copies.mark_uploaded, objects.explain)

    @property
    def location(self) -> str:
        """The URL of the store."""
        return self.objects.location

    def check(self) -> None:
        """Raise `StorageException` if no checkpoint can be written here."""
        name = f"check-{uuid.uuid4().hex}"
        with self.objects.errors_naming("written"):
            self.objects.write(name, b"")
            self.objects.remove([name])
        self._keep()

    def begin(self) -> None:
        """Check the store, and go on with the uploads of processes that died."""
        self.check()
        self.resume()

    def resume(self) -> None:
        """Go on with the uploads of processes that died."""
        for checkpoint_id, lock in self.copies.take_pending():
            self._upload(checkpoint_id, lock)

    def when_stored(self, checkpoint_id: str, action: Callable[[], None]) -> None:
        """Call `action` on another thread when the checkpoint is uploaded; at once if it is."""
        self._uploads.when_done(checkpoint_id, action)

    def wait(self, checkpoint_id: str | None = None) -> None:
        """Wait until the upload of a checkpoint, or of all that this process created, is complete."""
        self._uploads.wait(checkpoint_id)

    @contextlib.contextmanager
    def create(self, checkpoint_id: str, origin: Mapping[str, Any] | None = None) -> Iterator[pathlib.Path]:
        """Give a folder to fill. When the block ends it is durable on this machine, and its upload begins.

        `origin` is kept in the manifest.
        """

        def upload(lock: contextlib.ExitStack) -> None:
            self._upload(checkpoint_id, lock)

        with self.copies.stage(checked_id(checkpoint_id), origin, upload) as folder:
            yield folder

    def open(self, checkpoint_id: str) -> SavedCheckpoint:
        """Return a checkpoint to read: from this machine if it is here, else fetched when its files are asked for."""
        objects = self.objects.below(checked_id(checkpoint_id))
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.copies.in_use(checkpoint_id))
            is_here = self.copies.is_pending(checkpoint_id)
            manifest = None if is_here else self._manifest(objects, checkpoint_id)
            location = child(self.location, checkpoint_id)
            return RemoteCheckpoint(checkpoint_id, objects, location, self.copies, manifest, stack.pop_all())

    def delete(self, checkpoint_id: str) -> None:
        """Remove a checkpoint; it disappears at once, also when the removal is interrupted."""
        self.wait(checkpoint_id)
        objects = self.objects.below(checked_id(checkpoint_id))
        with objects.errors_naming("changed"):
            if MANIFEST_FILE not in objects.find():
                raise self._not_found(checkpoint_id)
            objects.write(DELETING, b"")
            objects.remove([MANIFEST_FILE])
            fault_point("to_delete")
            _remove_rest(objects)
        self.copies.remove(checkpoint_id)

    def list(self) -> Sequence[str]:
        """Return the ids of all checkpoints that are complete in the store."""
        with self.objects.errors_naming("read"):
            names = [name.partition("/") for name in self.objects.find()]
        return sorted(one for one, _, rest in names if rest == MANIFEST_FILE and is_id(one))

    def clear_leftovers(self) -> Sequence[str]:
        """Remove checkpoints without a manifest, unless something of them was written within a day, and return the ids.

        Those that this machine is still to upload stay.
        """
        with self.objects.errors_naming("changed"):
            found: dict[str, dict[str, float]] = {}
            for name, info in self.objects.find().items():
                one, _, rest = name.partition("/")
                found.setdefault(one, {})[rest] = info.modified
            left = sorted(one for one, files in found.items() if is_id(one) and self._is_left(one, files))
            for one in left:
                objects = self.objects.below(one)
                _remove_rest(objects)
                objects.abort_parts()
        return sorted({*left, *self.copies.clear_leftovers()})

    def put_tree(self, folder: pathlib.Path, prefix: str, known: dict[str, tuple[int, int]]) -> None:
        """Upload the files of a folder, which may grow meanwhile, that are not as `known` says, and note them there."""
        objects = self.objects.below(prefix)
        for path in sorted(one for one in folder.rglob("*") if one.is_file() and not one.is_symlink()):
            name, found = path.relative_to(folder).as_posix(), path.stat()
            state = (found.st_size, found.st_mtime_ns)
            if known.get(name) != state:
                objects.put(path, name, lambda _: None)
                known[name] = state

    def remove_tree(self, prefix: str) -> None:
        """Remove what `put_tree` put below a prefix."""
        objects = self.objects.below(prefix)
        with objects.errors_naming("changed"):
            objects.remove(objects.find())

    def explain(self, error: BaseException) -> str:
        """Return the reason and the remedy of an error of the store, without secrets."""
        return self.objects.explain(error)

    def get_tree(self, prefix: str, folder: pathlib.Path) -> int:
        """Download what is below a prefix, except files that are here with the same size; return how many there are."""
        objects = self.objects.below(prefix)
        with objects.errors_naming("read"):
            sizes = {name: info.size for name, info in objects.find().items()}
            changed = {n: size for n, size in sizes.items() if not _has_size(folder / n, size)}
            objects.get_all(folder, changed)
        return len(sizes)

    def _is_left(self, checkpoint_id: str, files: Mapping[str, float]) -> bool:
        if MANIFEST_FILE in files and DELETING not in files:
            return False
        if DELETING in files:
            return True
        is_old = time.time() - max(files.values()) > MAX_SILENCE_S
        return UPLOADING in files and is_old and not self.copies.is_pending(checkpoint_id)

    def _upload(self, checkpoint_id: str, lock: contextlib.ExitStack) -> None:
        manifest = Manifest.read(self.copies.path(checkpoint_id))
        self._uploads.put(checkpoint_id, sum(entry.size for entry in manifest.files.values()), lock)

    def _send(self, upload: Upload) -> None:
        """Upload what is not there: the files, then the manifest."""
        folder, objects = self.copies.path(upload.checkpoint_id), self.objects.below(upload.checkpoint_id)
        sizes = {name: entry.size for name, entry in Manifest.read(folder).files.items()}
        manifest = (folder / MANIFEST_FILE).read_bytes()
        there = objects.find()
        if MANIFEST_FILE not in there:
            objects.write(UPLOADING, b"")
            fault_point("upload_began")
            objects.abort_parts()
            # An object appears complete or not at all, and its name is used once: one with the right size is ours.
            missing = {name: size for name, size in sizes.items() if name not in there or there[name].size != size}
            upload.sent = sum(sizes.values()) - sum(missing.values())
            objects.put_all(folder, missing, upload.add_sent)
            fault_point("files_uploaded")
            there = objects.find()
            if absent := [name for name, size in sizes.items() if name not in there or there[name].size != size]:
                raise OSError(f"{absent[0]!r} is not in the store after its upload")
            objects.write(MANIFEST_FILE, manifest)
            fault_point("uploaded")
        elif objects.read(MANIFEST_FILE) != manifest:
            raise errors.StorageException(f"Checkpoint {upload.checkpoint_id!r} exists already in {self.location}.")
        objects.remove([UPLOADING])

    def _manifest(self, objects: Objects, checkpoint_id: str) -> bytes:
        with objects.errors_naming("read"):
            try:
                return objects.read(MANIFEST_FILE)
            except FileNotFoundError:
                raise self._not_found(checkpoint_id) from None

    def _not_found(self, checkpoint_id: str) -> errors.CheckpointNotFoundException:
        return errors.CheckpointNotFoundException(
            f"There is no checkpoint {checkpoint_id!r} in {self.location}; `det checkpoint list` shows the ids that "
            "exist."
        )


class RemoteCheckpoint(SavedCheckpoint):
    """A checkpoint of an object store that is open for reading."""

    is_copy = True  # which may be removed after it was closed

    def __init__(
        self,
        checkpoint_id: str,
        objects: Objects,
        location: str,
        copies: LocalCopies,
        manifest: bytes | None,
        stack: contextlib.ExitStack,
    ) -> None:
        """Without a `manifest` of the store, the checkpoint is only on this machine until now."""
        super().__init__(checkpoint_id, location, copies.path(checkpoint_id))
        self._objects = objects
        self._copies = copies
        self._stored = manifest
        self._stack = stack
        self._is_fetched = manifest is None
        self._small: pathlib.Path | None = None
        """The folder of single files."""

    def close(self) -> None:
        """End the use of the copy."""
        self._stack.close()
        self._copies.evict()

    @property
    def folder(self) -> pathlib.Path:
        """The folder with all files, whose checksums are right."""
        if not self._is_fetched and self._stored is not None:
            try:
                with self._objects.errors_naming("read"):
                    self._copies.fetched(self.id, self._stored, self._fetch)
            except errors.InvalidCheckpointException as error:
                raise errors.InvalidCheckpointException(f"{self.location} is damaged: {error}") from error
            self._is_fetched = True
        return self._folder

    def file(self, name: str) -> pathlib.Path:
        """Return the path of one small file of the checkpoint, which need not exist."""
        if self._is_fetched:
            return self._folder / name
        if self._small is None:
            self._small = pathlib.Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="resolute-")))
            (self._small / MANIFEST_FILE).write_bytes(self._stored or b"")
        path = self._small / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._objects.errors_naming("read"), contextlib.suppress(FileNotFoundError):
                path.write_bytes(self._objects.read(name))
        return path

    @property
    def created(self) -> float:
        """When the checkpoint was completed, in seconds since 1970."""
        if self._stored is None:
            return super().created
        with self._objects.errors_naming("read"):
            return self._objects.find()[MANIFEST_FILE].modified

    def verify(self) -> None:
        """Raise `InvalidCheckpointException` unless all files are there with their sizes.

        Their contents are verified when they are fetched.
        """
        if self._stored is None:
            super().verify()
            return
        with self._objects.errors_naming("read"):
            there = self._objects.find()
        for name, entry in self.manifest.files.items():
            size = there[name].size if name in there else "no"
            if size != entry.size:
                raise errors.InvalidCheckpointException(
                    f"{child(self.location, name)} is damaged: it has {size} bytes, and had {entry.size} when it was "
                    "saved; use another checkpoint."
                )

    def _fetch(self, folder: pathlib.Path, manifest: Manifest) -> None:
        self._objects.get_all(folder, {name: entry.size for name, entry in manifest.files.items()})


def child(location: str, name: str) -> str:
    """Return the location of something below a URL, whose options stay at its end."""
    base, mark, options = location.partition("?")
    return f"{base.rstrip('/')}/{name}{mark}{options}"


def _remove_rest(objects: Objects) -> None:
    """Remove the objects of a checkpoint that has no manifest, or is being deleted: the manifest first."""
    names = objects.find()
    markers = {UPLOADING, DELETING}
    objects.remove([name for name in names if name == MANIFEST_FILE])
    objects.remove([name for name in names if name not in markers])
    objects.remove([name for name in names if name in markers])


def _has_size(path: pathlib.Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size
