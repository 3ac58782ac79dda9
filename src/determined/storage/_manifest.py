"""What a checkpoint's folder must hold: names, sizes and checksums of its files."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from determined import errors

MANIFEST_FILE = "manifest.json"
FORMAT = 1

_LARGEST_MANIFEST = 64 << 20
_PIECE = 16 << 20  # bytes that one thread checks at a time
_CHUNK = 256 << 10  # bytes read at once: few enough to be in the processor's cache still when they are summed


class Entry(NamedTuple):
    """Size in bytes and CRC-32 of one file."""

    size: int
    crc32: int


class Manifest(NamedTuple):
    """The files of a checkpoint, by their path below its folder."""

    files: Mapping[str, Entry]
    origin: Mapping[str, Any] = {}
    """What the run that saved the checkpoint says of itself."""

    @classmethod
    def of(cls, folder: pathlib.Path, origin: Mapping[str, Any]) -> Manifest:
        """Return the manifest of all files that are in a folder now."""
        names = sorted(path.relative_to(folder).as_posix() for path in walk(folder))
        return cls({name: _entry(folder / name) for name in names if name != MANIFEST_FILE}, origin)

    @classmethod
    def read(cls, folder: pathlib.Path) -> Manifest:
        """Return the manifest in a folder; raises `InvalidCheckpointException` for anything else."""
        path = folder / MANIFEST_FILE
        if not path.is_file() or path.is_symlink():
            raise _unusable(folder, f"has no {MANIFEST_FILE}, so it is not a complete checkpoint")
        if path.stat().st_size > _LARGEST_MANIFEST:
            raise _unusable(path, "is larger than any manifest")
        try:
            return _parsed(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise _unusable(path, f"cannot be used: {error}") from error

    def write(self, folder: pathlib.Path) -> None:
        """Write the manifest into a folder."""
        path = folder / MANIFEST_FILE
        path.write_bytes(self._as_bytes())
        path.chmod(0o600)

    def verify(self, folder: pathlib.Path, except_below: str | None = None) -> None:
        """Raise `InvalidCheckpointException` unless each file is there with its size and checksum.

        Files in the subfolder `except_below` are left out, for callers that do not use them.
        """
        needed = {name: entry for name, entry in self.files.items() if name.partition("/")[0] != except_below}
        for name, entry in needed.items():
            _check_presence(folder, name, entry)
        # Checksums in threads, since `crc32` works without the interpreter's lock.
        with ThreadPoolExecutor(max_workers=4) as pool:
            pieces = {
                name: [pool.submit(_crc32, folder / name, begin) for begin in range(0, entry.size, _PIECE)]
                for name, entry in needed.items()
            }
            for name, entry in needed.items():
                _check_contents(folder / name, entry, pieces[name])

    def _as_bytes(self) -> bytes:
        files = {name: entry._asdict() for name, entry in self.files.items()}
        contents = {"format": FORMAT, "origin": self.origin, "files": files}
        return json.dumps({**contents, "crc32": zlib.crc32(json.dumps(contents).encode())}, indent=1).encode()


def walk(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield all files below a folder, links left out."""
    for parent, _, files in os.walk(folder, onerror=raise_error):
        for name in files:
            path = pathlib.Path(parent, name)
            if stat.S_ISREG(path.lstat().st_mode):
                yield path


def raise_error(error: OSError) -> None:
    """Let `os.walk(onerror=...)` raise: a folder that cannot be listed would count as empty."""
    raise error


def _parsed(text: bytes) -> Manifest:
    data = json.loads(text)
    if not isinstance(data, dict) or type(data.get("format")) is not int or data["format"] < 1:
        raise ValueError("it has no format number")
    if data["format"] > FORMAT:
        raise ValueError(f"its format {data['format']} is newer than {FORMAT}; upgrade Resolute to read it")
    files, origin = data.get("files"), data.get("origin")
    if not isinstance(files, dict) or not isinstance(origin, dict):
        raise ValueError("it does not list files and an origin")
    manifest = Manifest({_checked_name(name): _checked_entry(name, entry) for name, entry in files.items()}, origin)
    # Nothing but what `write` wrote, whose checksum no change of a few bits leaves right.
    if manifest._as_bytes() != text:
        raise ValueError("its own checksum is not that of what it says")
    return manifest


def _checked_name(name: str) -> str:
    path = pathlib.PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or str(path) != name or "\0" in name:
        raise ValueError(f"{name!r} is not the path of a file below the checkpoint")
    os.fsencode(name)  # raises ValueError for what no file can be called
    return name


def _checked_entry(name: str, entry: Any) -> Entry:
    size, crc32 = (entry.get("size"), entry.get("crc32")) if isinstance(entry, dict) else (None, None)
    if type(size) is not int or type(crc32) is not int or not 0 <= size < 2**63 or not 0 <= crc32 < 2**32:
        raise ValueError(f"the entry of {name!r} is not a size and a checksum")
    return Entry(size, crc32)


def _check_presence(folder: pathlib.Path, name: str, entry: Entry) -> None:
    path = folder / name
    try:
        found = path.lstat()
    except OSError as error:
        raise _unusable(path, f"is missing ({error.strerror})") from error
    if not stat.S_ISREG(found.st_mode) or not path.resolve().is_relative_to(folder.resolve()):
        raise _unusable(path, "is not a plain file of the checkpoint")
    if found.st_size != entry.size:
        raise _unusable(path, f"is damaged: it has {found.st_size} bytes, and had {entry.size} when it was saved")


def _check_contents(path: pathlib.Path, expected: Entry, pieces: Sequence[Future[int]]) -> None:
    try:
        actual = _joined([piece.result() for piece in pieces], expected.size)
    except OSError as error:
        raise _unusable(path, f"cannot be read ({error.strerror})") from error
    if actual != expected.crc32:
        was = f"and was {expected.crc32:08x} when it was saved"
        raise _unusable(path, f"is damaged: its checksum is {actual:08x}, {was}")


def _unusable(path: pathlib.Path, why: str) -> errors.InvalidCheckpointException:
    return errors.InvalidCheckpointException(f"{path} {why}; use another checkpoint.")


def _entry(path: pathlib.Path) -> Entry:
    size = path.stat().st_size
    return Entry(size, _joined([_crc32(path, begin) for begin in range(0, size, _PIECE)], size))


def _crc32(path: pathlib.Path, begin: int) -> int:
    """Return the checksum of one piece of a file."""
    crc, left = 0, _PIECE
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while count := file.readinto(buffer[:left]):
            crc = zlib.crc32(buffer[:count], crc)
            left -= count
    return crc


def _joined(pieces: Sequence[int], size: int) -> int:
    """Return the CRC-32 of a file from those of its pieces."""
    crc = 0
    for begin, piece in zip(range(0, size, _PIECE), pieces, strict=True):
        crc = _product(crc, _shift(min(_PIECE, size - begin))) ^ piece
    return crc


@functools.lru_cache(maxsize=1024)
def _shift(size: int) -> int:
    """Return x to the power of the bits in `size` bytes: a CRC-32 times it is the CRC-32 with `size` zeros appended."""
    power, square = _ONE, _X_TO_8
    while size:
        if size & 1:
            power = _product(power, square)
        square = _product(square, square)
        size >>= 1
    return power


# Polynomials of bits modulo that of CRC-32, the highest bit for x to 0.
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_X_TO_8 = 1 << 23


def _product(one: int, other: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product
