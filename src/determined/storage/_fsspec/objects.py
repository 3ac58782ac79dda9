"""The objects below a URL, through fsspec: errors in plain words, nothing cached, parts of large files in parallel."""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from determined import errors
from determined._secrets import MASK

T = TypeVar("T")

PART = 16 << 20
"""Bytes that are sent or fetched at a time. Parts in flight, and the copies that libraries make, bound the memory."""
_MAX_PARTS = 6
_MAX_FILES = 8  # small ones
_ATTEMPTS = 4
_MAX_REASON = 400  # characters


class ObjectInfo(NamedTuple):
    """Size in bytes, and when the object was written, in seconds since 1970."""

    size: int
    modified: float


class Objects:
    """The objects below a folder of a bucket. Names are relative to it."""

    def __init__(
        self, location: str, root: str, connect: Callable[[], Any], remedy: str = "", secrets: Iterable[str] = ()
    ) -> None:
        """Connect when first used. `secrets` never appear in messages; `remedy` says where credentials come from."""
        self.location = location
        self._root = root.strip("/")
        self._connect = connect
        self._remedy = remedy
        self._secrets = sorted(filter(None, secrets), key=len, reverse=True)
        self._files: Any = None
        self._process = 0
        self._connecting = threading.Lock()

    @property
    def files(self) -> Any:
        """The file system. A forked process connects again."""
        if self._process != os.getpid():
            self._connecting = threading.Lock()
        with self._connecting:
            if self._files is None or self._process != os.getpid():
                self._files, self._process = self._connect(), os.getpid()
            return self._files

    def put(self, source: pathlib.Path, name: str, sent: Callable[[int], None]) -> None:
        """Upload a file; `sent` is called with numbers of bytes."""
        import fsspec  # type: ignore[import-untyped]  # has no types

        class Progress(fsspec.Callback):  # type: ignore[misc]  # fsspec has no types
            """Passes on what fsspec counts."""

            def relative_update(self, inc: int = 1) -> None:
                sent(inc)

        options: dict[str, Any] = {}
        protocol = self.files.protocol
        if "s3" in protocol:
            options = {"chunksize": PART, "max_concurrency": _MAX_PARTS}
        elif "gs" in protocol:
            options = {"chunksize": PART}
        elif "az" in protocol:
            options = {"max_concurrency": _MAX_PARTS}
        self.files.put_file(str(source), self._path(name), callback=Progress(), **options)

    def put_all(self, folder: pathlib.Path, names: Mapping[str, int], sent: Callable[[int], None]) -> None:
        """Upload files of a folder, given with their sizes: small ones together, large ones by parts."""
        small = [name for name, size in names.items() if size < PART]
        with ThreadPoolExecutor(_MAX_FILES, thread_name_prefix="resolute-upload") as pool:
            uploads = [pool.submit(self.put, folder / name, name, sent) for name in small]
            for upload in uploads:
                upload.result()
        for name in names:
            if names[name] >= PART:
                self.put(folder / name, name, sent)

    def below(self, folder: str) -> Objects:
        """Return the objects of a subfolder."""
        return Objects(self.location, f"{self._root}/{folder}", lambda: self.files, self._remedy, self._secrets)

    def write(self, name: str, data: bytes) -> None:
        """Write a small object."""
        self.files.pipe_file(self._path(name), data)

    def read(self, name: str) -> bytes:
        """Return a small object; raises `FileNotFoundError`."""
        return bytes(self.files.cat_file(self._path(name)))

    def get_all(self, folder: pathlib.Path, names: Mapping[str, int]) -> None:
        """Download objects, given with their sizes, into a new folder."""
        for name, size in names.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(target, "wb") as file:
                file.truncate(size)
            target.chmod(0o600)
        parts = [(name, begin, size) for name, size in names.items() for begin in range(0, size, PART)]
        with ThreadPoolExecutor(_MAX_PARTS, thread_name_prefix="resolute-download") as pool:
            for done in [pool.submit(self._get_part, folder, *part) for part in parts]:
                done.result()

    def _get_part(self, folder: pathlib.Path, name: str, begin: int, size: int) -> None:
        end = min(begin + PART, size)
        data = repeated(lambda: self.files.cat_file(self._path(name), start=begin, end=end))
        descriptor = os.open(folder / name, os.O_WRONLY)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(descriptor, memoryview(data)[written:], begin + written)
        finally:
            os.close(descriptor)

    def find(self, folder: str = "") -> dict[str, ObjectInfo]:
        """Return all objects below a folder, by name."""
        path = self._path(folder)
        self.files.invalidate_cache()
        try:
            found = self.files.find(path, detail=True)
        except FileNotFoundError:
            return {}
        return {
            self._name(name): ObjectInfo(int(info["size"] or 0), _modified(info))
            for name, info in found.items()
            if info.get("type") == "file" and not name.endswith("/")
        }

    def remove(self, names: Iterable[str]) -> None:
        """Delete objects; those that are gone already are fine."""

        def remove(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self.files.rm_file(self._path(name))

        with ThreadPoolExecutor(_MAX_FILES, thread_name_prefix="resolute-delete") as pool:
            list(pool.map(remove, names))

    def abort_parts(self) -> None:
        """Remove the parts of large files whose upload was interrupted: S3 keeps them, unseen, until then."""
        if "s3" not in self.files.protocol:
            return
        bucket, _, prefix = self._root.partition("/")
        with contextlib.suppress(Exception):  # a store that does not list them has another way to expire them
            found = self.files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
            for one in found.get("Uploads") or ():
                self.files.call_s3("abort_multipart_upload", Bucket=bucket, Key=one["Key"], UploadId=one["UploadId"])

    @contextlib.contextmanager
    def errors_naming(self, doing: str = "used") -> Iterator[None]:
        """Turn an error of the store, of whatever type, into a `StorageException` with reason and remedy."""
        try:
            yield
        except errors.DeterminedException:
            raise
        except Exception as error:  # each client library raises its own types
            raise errors.StorageException(f"{self.location} cannot be {doing}: {self.explain(error)}") from None

    def explain(self, error: BaseException) -> str:
        """Return the reason and the remedy of an error of the store, in sentences without secrets."""
        text = " ".join(str(error).split()) or type(error).__name__
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        text = text.rstrip(".")[:_MAX_REASON]
        match error:
            case FileNotFoundError():
                bucket = self._root.partition("/")[0]
                return f"{text}. Create {bucket!r}, or write the name of one that exists."
            case PermissionError():
                return f"access is refused ({text}). {self._remedy}"
            case _ if _lacks_credentials(error) or "credential" in text.lower():
                return f"there are no usable credentials ({text}). {self._remedy}"
        return f"{text}. Check that the store can be reached and that the URL is right."

    def _path(self, name: str) -> str:
        # Libraries take '?', '%' and others in a path for something else, each in its own way.
        return f"{self._root}/{urllib.parse.quote(name, safe='/ ').replace('%', '=')}".strip("/")

    def _name(self, path: str) -> str:
        return urllib.parse.unquote(path.strip("/").removeprefix(f"{self._root}/").replace("=", "%"))


def repeated(action: Callable[[], T]) -> T:
    """Return what an action returns, after some more attempts if it fails for a reason that may pass."""
    for attempt in range(_ATTEMPTS - 1):
        try:
            return action()
        except Exception as error:
            if will_stay(error):
                raise
            time.sleep(0.2 * 2**attempt)
    return action()


def will_stay(error: BaseException) -> bool:
    """Return whether an error of a store is of a kind that does not pass by itself: no bucket, or no permission."""
    return isinstance(error, FileNotFoundError | PermissionError | ImportError) or _lacks_credentials(error)


def _lacks_credentials(error: BaseException) -> bool:
    # By name, since the libraries with these types may not be installed.
    name = type(error).__name__
    return "Credentials" in name or name in ("ClientAuthenticationError", "ProfileNotFound")


def _modified(info: Mapping[str, Any]) -> float:
    """Return when an object was written; libraries name it differently, and some spell the date."""
    dates = []
    for name in ("LastModified", "last_modified", "updated", "mtime", "created"):
        value = info.get(name)
        if isinstance(value, str):
            value = datetime.datetime.fromisoformat(value)
        if isinstance(value, int | float):
            dates.append(datetime.datetime.fromtimestamp(value, datetime.UTC))
        elif isinstance(value, datetime.datetime):
            dates.append(value if value.tzinfo else value.replace(tzinfo=datetime.UTC))
    return max((one.timestamp() for one in dates), default=0.0)
