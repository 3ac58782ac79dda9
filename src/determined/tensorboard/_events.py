"""One TensorBoard event file, shared by the training loop's thread and the user's SummaryWriter."""

from __future__ import annotations

import io
import itertools
import os
import pathlib
import socket
import threading
import time
import weakref

from determined._home import make_private, private_opener
from determined.tensorboard import _records

_BUFFER_BYTES = 1 << 16
_FLUSH_SECONDS = 30.0
# Of this process, so that files made within one second differ and sort in the order they were made.
_file_numbers = itertools.count()


class EventFile:
    """An event file of this process in `folder`, made by the first write.

    Any thread may call any method at any time. Records are buffered: they reach the file when 64 KiB have
    gathered, at the first write 30 seconds after the last, and by `flush`, `close` or the program's end.
    A forked child does not share its parent's file; its first write opens one of its own.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._output = _Output(folder)
        # Runs at the program's end too, so that records of a writer nobody closed are kept.
        weakref.finalize(self, self._output.close)

    def add_scalars(
        self,
        name: str,
        steps: _records.Numbers,
        values: _records.Numbers,
        wall_times: _records.Numbers,
    ) -> None:
        """Write a window of one metric: values[i] at steps[i], measured at wall_times[i] (Unix seconds).

        Values are kept as float32. Steps are integers from 0 to 2**63 - 1, in any order. An empty window
        writes nothing.
        """
        if records := _records.scalar_records(name, steps, values, wall_times):
            self._output.write(records)

    def add_event_bytes(self, payload: bytes) -> None:
        """Write one event that TensorBoard's own protobuf classes serialized."""
        self._output.write(_records.record(payload))

    def flush(self) -> None:
        """Hand everything written so far to the operating system, for readers to see."""
        self._output.flush()

    def close(self) -> None:
        """Flush and close the file. A later write opens a new one beside it."""
        self._output.close()


class _Output:
    """Bytes to an exclusive file. Buffers by itself: what a full disk refused stays for the next try,
    so that no record is cut in two, and a forked child can forget what its parent will write."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._file: io.FileIO | None = None
        self._pending = bytearray()
        self._drained_at = 0.0
        _outputs.add(self)

    def write(self, records: bytes) -> None:
        with self._lock:
            file = self._file or self._open()
            self._pending += records
            late = time.monotonic() - self._drained_at > _FLUSH_SECONDS
            if late or len(self._pending) >= _BUFFER_BYTES:
                self._drain(file)

    def flush(self) -> None:
        with self._lock:
            if self._file is not None:
                self._drain(self._file)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                file, self._file = self._file, None
                try:
                    self._drain(file)
                finally:  # what the disk does not take now it will not take later
                    self._pending.clear()
                    file.close()

    def forget(self) -> None:
        # The parent may have been holding the lock in a thread that does not exist here.
        self._lock = threading.Lock()
        self._pending.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> io.FileIO:
        make_private(self._folder)
        self._file = _create(self._folder)
        self._pending += _records.record(_records.version_event(time.time()))
        self._drained_at = time.monotonic()
        return self._file

    def _drain(self, file: io.FileIO) -> None:
        while self._pending:
            del self._pending[: file.write(self._pending)]
        self._drained_at = time.monotonic()


def _create(folder: pathlib.Path) -> io.FileIO:
    maker = f"{socket.gethostname()}.{os.getpid()}"
    while True:
        name = f"events.out.tfevents.{int(time.time()):010d}.{maker}.{next(_file_numbers):06d}.v2"
        try:
            return open(folder / name, "xb", buffering=0, opener=private_opener)
        except FileExistsError:
            # Containers that share the folder may share host name and process id as well.
            continue


_outputs: weakref.WeakSet[_Output] = weakref.WeakSet()


def _forget_all() -> None:
    for output in list(_outputs):
        output.forget()


if hasattr(os, "register_at_fork"):  # there is no fork on Windows
    os.register_at_fork(after_in_child=_forget_all)
