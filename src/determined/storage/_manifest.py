"""What a checkpoint's folder must hold: names, sizes and checksums of its files."""

from __future__ import annotations

import json
import os
import pathlib
import stat
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from determined import errors

MANIFEST_FILE = "manifest.json"
FORMAT = 1

_LARGEST_MANIFEST = 64 << 20
_CHUNK = 4 << 20


class Entry(NamedTuple):
    """Size in bytes and CRC-32 of one file."""

    size: int
    crc32: int


class Manifest(NamedTuple):
    """The files of a checkpoint, by their path below its folder."""

    files: Mapping[str, Entry]

    @classmethod
    def of(cls, folder: pathlib.Path) -> Manifest:
        """Return the manifest of all files that are in a folder now."""
        names = sorted(path.relative_to(folder).as_posix() for path in walk(folder))
        return cls({name: _entry(folder / name) for name in names if name != MANIFEST_FILE})

    @classmethod
    def read(cls, folder: pathlib.Path) -> Manifest:
        """Return the manifest that a folder holds, or refuse what is none."""
        path = folder / MANIFEST_FILE
        if not path.is_file() or path.is_symlink():
            raise errors.InvalidCheckpointException(
                f"{folder} has no {MANIFEST_FILE}, so it is not a whole checkpoint; use another one."
            )
        if path.stat().st_size > _LARGEST_MANIFEST:
            raise errors.InvalidCheckpointException(f"{path} is larger than any manifest; use another checkpoint.")
        try:
            return cls(_entries(json.loads(path.read_bytes())))
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
            raise errors.InvalidCheckpointException(
                f"{path} is damaged ({type(error).__name__}: {error}); use another checkpoint."
            ) from error

    def write(self, folder: pathlib.Path) -> None:
        """Write the manifest into a folder."""
        files = {name: {"size": entry.size, "crc32": entry.crc32} for name, entry in self.files.items()}
        text = json.dumps({"format": FORMAT, "files": files}, indent=1)
        (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")

    def verify(self, folder: pathlib.Path) -> None:
        """Raise `InvalidCheckpointException` unless each file is there with its size and checksum."""
        for name, entry in self.files.items():
            _check_presence(folder, name, entry)
        # Checksums in threads, since `crc32` works without the interpreter's lock.
        with ThreadPoolExecutor(max_workers=4) as pool:
            found = pool.map(_entry, [folder / name for name in self.files])
            for (name, expected), actual in zip(self.files.items(), found, strict=True):
                if actual != expected:
                    raise errors.InvalidCheckpointException(
                        f"{folder / name} is damaged: its checksum is {actual.crc32:08x}, and was "
                        f"{expected.crc32:08x} when it was saved; use another checkpoint."
                    )


def walk(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield all files below a folder, links left out."""
    for parent, _, files in os.walk(folder):
        for name in files:
            path = pathlib.Path(parent, name)
            if stat.S_ISREG(path.lstat().st_mode):
                yield path


def _entries(data: Any) -> dict[str, Entry]:
    if not isinstance(data, dict) or type(data.get("format")) is not int or data["format"] < 1:
        raise ValueError("it has no format number")
    if data["format"] > FORMAT:
        raise ValueError(f"its format {data['format']} is newer than {FORMAT}; upgrade Resolute to read it")
    return {_checked_name(name): _checked_entry(name, entry) for name, entry in data["files"].items()}


def _checked_name(name: str) -> str:
    parts = pathlib.PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the path of a file below the checkpoint")
    return name


def _checked_entry(name: str, entry: Any) -> Entry:
    size, crc32 = entry["size"], entry["crc32"]
    if type(size) is not int or type(crc32) is not int or size < 0 or not 0 <= crc32 < 2**32:
        raise ValueError(f"the entry of {name!r} is {entry!r}, not a size and a checksum")
    return Entry(size, crc32)


def _check_presence(folder: pathlib.Path, name: str, entry: Entry) -> None:
    path = folder / name
    try:
        found = path.lstat()
    except OSError as error:
        raise errors.InvalidCheckpointException(
            f"{path} is missing ({error.strerror}); use another checkpoint."
        ) from error
    if not stat.S_ISREG(found.st_mode) or not path.resolve().is_relative_to(folder.resolve()):
        raise errors.InvalidCheckpointException(f"{path} is not a plain file of the checkpoint; use another one.")
    if found.st_size != entry.size:
        raise errors.InvalidCheckpointException(
            f"{path} is damaged: it has {found.st_size} bytes, and had {entry.size} when it was saved; "
            "use another checkpoint."
        )


def _entry(path: pathlib.Path) -> Entry:
    size = crc = 0
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(_CHUNK))
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
            size += count
    return Entry(size, crc)
