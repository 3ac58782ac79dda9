"""`det` in a terminal of its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import re
import select
import struct
import termios
import time
from collections.abc import Iterator

import forking

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A program in a pseudo-terminal, and all that it has drawn."""

    def __init__(self, process: forking.Process, master: int) -> None:
        self.process = process
        self.raw = ""
        self._master = master
        self._seen = 0

    def expect(self, text: str, seconds: float = 90.0) -> str:
        """Wait until a text appears after what was expected before, and return what was drawn up to it."""
        deadline = time.monotonic() + seconds
        while (place := self.drawn.find(text, self._seen)) < 0:
            left = deadline - time.monotonic()
            if left <= 0 or not self._read(left):
                raise AssertionError(f"{text!r} did not appear in {self.drawn[self._seen :]!r}")
        before = self.drawn[self._seen : place]
        self._seen = place + len(text)
        return before

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def end(self, seconds: float = 60.0) -> int:
        """Read to the end, and return the exit status."""
        deadline = time.monotonic() + seconds
        while self._read(max(deadline - time.monotonic(), 0.0)):
            pass
        return self.process.wait(5)

    @property
    def drawn(self) -> str:
        return _ESCAPES.sub("", self.raw)

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], seconds)
        if not ready:
            return False
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # the other end is closed
            return False
        self.raw += data.decode(errors="replace")
        return bool(data)


@contextlib.contextmanager
def terminal(home: pathlib.Path, *arguments: object, rows: int = 30, columns: int = 100) -> Iterator[Terminal]:
    """Run `det` in a terminal; it is killed at the end."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    # A readline somewhere above leaves the size of its own terminal behind, which would be believed.
    inherited = {name: value for name, value in os.environ.items() if name not in ("LINES", "COLUMNS")}
    environment = {**inherited, "DET_HOME": str(home), "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    process = forking.start(
        ["-m", "determined.cli", *map(str, arguments)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,  # with the terminal as its own, so that Ctrl-C reaches it
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        with process:
            process.kill()
            process.wait(10)
        os.close(master)
