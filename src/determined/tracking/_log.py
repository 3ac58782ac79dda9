"""Damage in SQLite's write-ahead log.

After a crash SQLite takes from the log what precedes the first broken frame, as that is where a power cut tears a log.
It says nothing when whole transactions follow, which only damage explains: each was synced before the next began.
"""

from __future__ import annotations

import os
import pathlib
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

from ._damage import Damage

_HEADER = 32
_FRAME_HEADER = 24
_PAGE = 4096  # of a log that does not tell
_LARGEST = 16 << 20  # bytes; looking through a megabyte takes about 20 ms
_ORDERS = {0x377F0682: "<", 0x377F0683: ">"}  # how a log begins: of which words its checksums are
_LOOKS = 3
_BETWEEN_LOOKS = 0.05  # seconds
_LOCKS = pathlib.Path("/proc/locks")
_IN_USE = ["128", "128"]  # the byte of the index of the log that every open connection locks

_Sums = tuple[int, int]

# The headers of logs that this process has looked through; a log gets another one when SQLite begins it anew.
_seen: dict[pathlib.Path, bytes] = {}


class _Finding(NamedTuple):
    """Where a log is broken, and how many transactions follow each other behind that place."""

    position: int
    lost: int


def check(database: pathlib.Path) -> None:
    """Raise `Damage` if transactions in the log of an SQLite file are lost behind a broken frame.

    To be called before SQLite opens the file for writing, since it removes a log that it is done with. Only the log is
    read: to open and close the others would take away the locks that this process has on them.
    """
    if _is_in_use(database):
        return
    log = database.with_name(f"{database.name}-wal")
    header, finding = _look(log)
    for _ in range(_LOOKS - 1):
        if finding is None:
            return
        # What is being written can look broken for a moment.
        time.sleep(_BETWEEN_LOOKS)
        if _look(log) != (header, finding):
            return
    if finding is not None:
        raise Damage(
            f"its log {str(log)!r} is broken at byte {finding.position}, and {finding.lost} transactions are behind "
            "that place",
            remedy="restore copies of both files, or go on without what is behind it by "
            f"`sqlite3 {database} 'PRAGMA wal_checkpoint(TRUNCATE)'`; checkpoints are not affected",
        )


def _is_in_use(database: pathlib.Path) -> bool:
    """Return whether a process is known to have the database open: then SQLite does not begin with what is in the log.

    That one has looked through the log, which takes long when it is done by every process of an experiment.
    """
    try:
        index = os.stat(f"{database}-shm")
        locks = _LOCKS.read_text()
    except OSError:
        return False
    file = f"{os.major(index.st_dev):02x}:{os.minor(index.st_dev):02x}:{index.st_ino}"
    held = [line.split() for line in locks.splitlines()]
    return any(fields[1] == "POSIX" and fields[5:8] == [file, *_IN_USE] for fields in held)


def _look(log: pathlib.Path) -> tuple[bytes, _Finding | None]:
    try:
        with log.open("rb") as file:
            header = file.read(_HEADER)
            if _seen.get(log) == header or log.stat().st_size > _LARGEST:
                return header, None
            finding = _broken(header + file.read())
    except OSError:
        return b"", None  # there is none
    if finding is None:
        _seen[log] = header
    return header, finding


def _broken(log: bytes) -> _Finding | None:
    """Return what is wrong with a log, unless it is that of a power cut or of a process that is writing."""
    frames = list(_frames(log))
    if not frames:
        return None
    order, sums = _order(log), struct.unpack_from(">2I", log, 24)
    whole = 0
    if order:
        frames = [frame for frame in frames if frame.salt == log[16:24]]  # others are of earlier uses of the log
        whole = _whole(frames, order, (sums[0], sums[1]))
    rest = frames[whole:]
    # The last one may have been on its way: nobody was told that it is stored.
    if sum(frame.is_commit for frame in rest) < 2:
        return None
    lost = max(_longest_chain(rest, one) for one in ([order] if order else _ORDERS.values()))
    return _Finding(rest[0].position if order else 0, lost) if lost > 1 else None


class _Frame(NamedTuple):
    position: int
    header: bytes
    page: bytes

    @property
    def is_commit(self) -> bool:
        return self.header[4:8] != bytes(4)

    @property
    def salt(self) -> bytes:
        return self.header[8:16]

    @property
    def sums(self) -> _Sums:
        first, second = struct.unpack_from(">2I", self.header, 16)
        return first, second

    def chained(self, order: str, before: _Sums) -> _Sums:
        """Return what the checksum is if the frame follows one with another."""
        return _checksum(self.header[:8] + self.page, order, before)


def _frames(log: bytes) -> Iterator[_Frame]:
    if len(log) < _HEADER:
        return
    (told,) = struct.unpack_from(">I", log, 8)
    page_size = told if _order(log) else _PAGE
    step = _FRAME_HEADER + page_size
    for position in range(_HEADER, len(log) - step + 1, step):
        start = position + _FRAME_HEADER
        yield _Frame(position, log[position:start], log[start : start + page_size])


def _whole(frames: list[_Frame], order: str, sums: _Sums) -> int:
    """Return how many frames from the first on are whole."""
    for number, frame in enumerate(frames):
        sums = frame.chained(order, sums)
        if sums != frame.sums:
            return number
    return len(frames)


def _longest_chain(frames: list[_Frame], order: str) -> int:
    """Return the most transactions that lie behind each other with checksums that go on from one to the next.

    What is left of older, overwritten transactions has checksums of its own.
    """
    longest = commits = 0
    stored = computed = (0, 0)  # what the frame before says its checksum is, and what that should be
    for frame in frames:
        from_stored, from_computed = frame.chained(order, stored), frame.chained(order, computed)
        if frame.sums not in (from_stored, from_computed):
            commits = 0
        commits += frame.is_commit
        longest = max(longest, commits)
        stored, computed = frame.sums, from_stored
    return longest


def _order(log: bytes) -> str | None:
    """Return the order of the words in a log's checksums; None if its header is broken."""
    order = _ORDERS.get(struct.unpack_from(">I", log)[0])
    is_whole = order and _checksum(log[:24], order, (0, 0)) == struct.unpack_from(">2I", log, 24)
    return order if is_whole else None


def _checksum(data: bytes, order: str, sums: _Sums) -> _Sums:
    first, second = sums
    words = iter(struct.unpack(f"{order}{len(data) // 4}I", data))
    for one, other in zip(words, words, strict=True):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return first, second
