"""Read what the runs of a trial or an experiment have written, also while they run."""

from __future__ import annotations

import datetime
import heapq
import itertools
import operator
import os
import pathlib
import time
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from determined._home import runs_of, trials_of

_BLOCK = 1 << 16
_SAMPLE = 512
_POLL_S = 0.2
_REST_FACTOR = 20
"""How many times longer than the last look at the files the pause before the next one is."""


def stamp(timestamp: float) -> str:
    """Return a time as it is written before each line: UTC, with microseconds, always of the same length."""
    return datetime.datetime.fromtimestamp(timestamp, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class LogLine(NamedTuple):
    """One line of output."""

    time: float
    """When it was written, in seconds since the epoch."""
    run: int
    rank: int
    stream: str
    """`stdout` or `stderr`."""
    text: str
    trial: int = 0
    """0 if the folder of a single trial was read."""


class _File(NamedTuple):
    trial: int
    run: int
    rank: int
    path: pathlib.Path


class _Wanted(NamedTuple):
    """Which lines to read; times are strings as in the files."""

    streams: Collection[bytes] | None
    since: bytes
    until: bytes

    def line(self, file: _File, raw: bytes) -> LogLine | None:
        when, _, rest = raw.partition(b"\t")
        stream, tab, text = rest.partition(b"\t")
        if not tab or not self.since <= when <= self.until or (self.streams is not None and stream not in self.streams):
            return None
        try:
            timestamp = datetime.datetime.fromisoformat(when.decode("ascii")).timestamp()
        except ValueError:  # what a full disk has left of a line
            return None
        words = stream.decode(errors="replace"), text.decode(errors="replace")
        return LogLine(timestamp, file.run, file.rank, *words, file.trial)


def read_logs(
    folder: pathlib.Path,
    *,
    ranks: Collection[int] | None = None,
    streams: Collection[str] | None = None,
    since: float | None = None,
    until: float | None = None,
    head: int | None = None,
    tail: int | None = None,
) -> Iterator[LogLine]:
    """Yield the lines of all runs in the folder of a trial or an experiment, in the order of time.

    `ranks`, `streams`, `since` and `until` choose lines; `head` and `tail` limit how many of these are returned.
    """
    wanted = _wanted(streams, since, until)
    files = {file: _whole_size(file.path) for file in _files(folder, ranks)}
    lines = _last(files, wanted, tail) if tail is not None else _merged(files, wanted)
    return itertools.islice(lines, head)


def follow_logs(
    folder: pathlib.Path,
    is_over: Callable[[], bool],
    *,
    ranks: Collection[int] | None = None,
    streams: Collection[str] | None = None,
    since: float | None = None,
    tail: int | None = None,
) -> Iterator[LogLine]:
    """Yield the lines of all runs in the folder of a trial or an experiment as they come, until `is_over()`.

    Lines that exist already come first, all of them or the last `tail`.
    """
    wanted = _wanted(streams, since, None)
    done: dict[_File, int] = {}
    if tail is not None:
        done = {file: _whole_size(file.path) for file in _files(folder, ranks)}
        yield from _last(done, wanted, tail)
    while True:
        was_last = is_over()  # asked first, so that nothing can come after the last reading
        began = time.monotonic()
        sizes = {file: _whole_size(file.path, done.get(file, 0)) for file in _files(folder, ranks)}
        took = time.monotonic() - began
        yield from _merged(sizes, wanted, done)
        done = sizes
        if was_last:
            return
        time.sleep(max(_POLL_S, took * _REST_FACTOR))


def _wanted(streams: Collection[str] | None, since: float | None, until: float | None) -> _Wanted:
    names = None if streams is None else {name.encode() for name in streams}
    first = b"" if since is None else stamp(since).encode()
    return _Wanted(names, first, b"~" if until is None else stamp(until).encode())


def _files(folder: pathlib.Path, ranks: Collection[int] | None) -> list[_File]:
    return [
        _File(number, run, rank, path)
        for number, trial in (trials_of(folder) or {0: folder}).items()
        for run, of_run in runs_of(trial).items()
        for rank, path in of_run.logs().items()
        if ranks is None or rank in ranks
    ]


def _whole_size(path: pathlib.Path, known: int = 0) -> int:
    """Return the size of a file up to the end of its last whole line."""
    try:
        if path.stat().st_size == known:
            return known
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            while end > known:
                begin = max(known, end - _BLOCK)
                file.seek(begin)
                cut = file.read(end - begin).rfind(b"\n")
                if cut >= 0:
                    return begin + cut + 1
                end = begin
    except FileNotFoundError:
        pass
    return known


def _merged(files: dict[_File, int], wanted: _Wanted, begins: dict[_File, int] | None = None) -> Iterator[LogLine]:
    streams = [_forwards(file, wanted, (begins or {}).get(file, 0), end) for file, end in files.items()]
    return heapq.merge(*streams, key=operator.itemgetter(0))


def _last(files: dict[_File, int], wanted: _Wanted, count: int) -> Iterator[LogLine]:
    streams = [_backwards(file, wanted, end) for file, end in files.items()]
    latest = heapq.merge(*streams, key=operator.itemgetter(0), reverse=True)
    return reversed(list(itertools.islice(latest, count)))


# Files are open for as long as a block of them is read: there may be more of them than a process may have open.


def _forwards(file: _File, wanted: _Wanted, begin: int, end: int) -> Iterator[LogLine]:
    begin, rest = _first_wanted(file.path, wanted, begin, end), b""
    while begin < end and (block := _block(file.path, begin, end)):
        begin += len(block)
        *lines, rest = (rest + block).split(b"\n")
        for raw in lines:
            if (line := wanted.line(file, raw)) is not None:
                yield line


def _backwards(file: _File, wanted: _Wanted, end: int) -> Iterator[LogLine]:
    start, rest = _first_wanted(file.path, wanted, 0, end), b""
    while end > start:
        begin = max(start, end - _BLOCK)
        first, *lines = (_block(file.path, begin, end) + rest).split(b"\n")
        for raw in reversed(lines):
            if (line := wanted.line(file, raw)) is not None:
                yield line
        rest, end = first, begin
    if (line := wanted.line(file, rest)) is not None:
        yield line


def _first_wanted(path: pathlib.Path, wanted: _Wanted, begin: int, end: int) -> int:
    """Return from where on to read: the lines before it are too old. Looks at one line of each block.

    Where the clock was set back, lines of a single block that seem newer than those around them may count as old.
    """
    if not wanted.since or end - begin <= _BLOCK:
        return begin
    with path.open("rb", buffering=_SAMPLE) as opened:
        for inside in range(begin + _BLOCK, end, _BLOCK):
            opened.seek(inside)
            opened.readline()  # the rest of a line
            line = opened.tell()
            if line >= end or opened.read(len(wanted.since)) >= wanted.since:
                break
            begin = line
    return begin


def _block(path: pathlib.Path, begin: int, end: int) -> bytes:
    with path.open("rb") as opened:
        opened.seek(begin)
        return opened.read(min(_BLOCK, end - begin))
