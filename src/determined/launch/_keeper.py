"""Keep the program of one rank: name the rank on every line it writes, pass signals to it, tell how it ended.

Started as a file in front of every rank. It needs nothing but the standard library, so that it is there at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

LONGEST_LINE = 1 << 20
SAME_SIGNAL = 0.5
"""Seconds within which a signal that comes twice, by two ways, is one."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""What is passed on to the program."""

_CHUNK = 1 << 16
_FULLEST_PIPE = 1 << 20
_TRACEBACK = b"Traceback (most recent call last):"
# What a rank writes that ends because of another one; see `determined.core`.
_BLAME = re.compile(rb"Rank \d+ stops because of rank (\d+)")
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")
_PR_SET_PDEATHSIG = 1


class Lines:
    """Cuts bytes into whole lines, each behind a prefix; a carriage return ends one too, as in progress bars."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return the lines that are whole now."""
        data = self._rest + data
        # A carriage return at the very end may be the first half of a line end.
        cut = max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1
        whole, self._rest = data[:cut], data[cut:]
        text = b"".join(self._prefix + line for line in _LINE.findall(whole))
        return text + self.end() if len(self._rest) > LONGEST_LINE else text

    def end(self) -> bytes:
        """Return the last line, if it had no end."""
        rest, self._rest = self._rest, b""
        return self._prefix + rest.removesuffix(b"\r") + b"\n" if rest else b""


class Output:
    """One stream of the program, copied line by line to the same stream of the launcher."""

    def __init__(self, source: int, target: int, lines: Lines, lock: int) -> None:
        os.set_blocking(source, False)
        self.source = source
        self._target = target
        self._lines = lines
        self._lock = lock
        self.traceback_at: float | None = None
        """When the last traceback of Python was begun."""
        self.blamed: int | None = None
        """The rank because of which this one says it ends."""

    def copy(self) -> bool:
        """Copy what there is; returns whether more may come."""
        try:
            data = os.read(self.source, _CHUNK)
        except BlockingIOError:
            return True
        self._write(self._lines.feed(data) if data else self._lines.end())
        return bool(data)

    def drain(self) -> None:
        """Copy all that was written until now, also the last line without an end."""
        for _ in range(_FULLEST_PIPE // _CHUNK):  # not for ever, as another process may go on writing
            if not select.select([self.source], [], [], 0)[0] or not self.copy():
                break
        self._write(self._lines.end())

    def _write(self, text: bytes) -> None:
        if _TRACEBACK in text:
            self.traceback_at = time.monotonic()
        if found := _BLAME.search(text):
            self.blamed = int(found[1])
        # The keepers of all ranks write to the same stream, which cuts long writes into pieces.
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            while text:
                text = text[self._write_some(text) :]
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _write_some(self, text: bytes) -> int:
        try:
            return os.write(self._target, text)
        except BlockingIOError:
            select.select([], [self._target], [])
            return 0
        except OSError:  # nobody reads it, or the disk is full: no reason to lose a training
            return len(text)


class Keeper:
    """Runs one program until it has ended and the launcher lets this process go."""

    def __init__(self, link: socket.socket, lock: int, woken: int) -> None:
        self._link = link
        self._lock = lock
        self._events = selectors.DefaultSelector()
        self._watch(link.fileno(), self._hear)
        self._watch(woken, lambda: self._on_signals(os.read(woken, 64)))
        self._heard = b""
        self._outputs: list[Output] = []
        self._program: subprocess.Popen[bytes] | None = None
        self._passed_at: dict[int, float] = {}
        self._patience = 0.0
        self._deadline: float | None = None
        self._code: int | None = None
        self._leaves: int | None = None
        self.is_left_alone = False
        """Whether the launcher has ended, without having told this process to."""

    def run(self) -> int:
        """Do what the launcher says; returns the exit status for whoever started this process."""
        self._tell({"rank": int(os.environ["RANK"]), "attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"])})
        while self._leaves is None:
            for key, _ in self._events.select(self._remaining()):
                key.data()
            if self._deadline is not None and not self._remaining():
                self._pass_on(signal.SIGKILL)
        return self._leaves

    def _watch(self, source: int, action: Callable[[], object]) -> None:
        self._events.register(source, selectors.EVENT_READ, action)

    def _remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _hear(self) -> None:
        data = self._link.recv(_CHUNK)
        if not data:
            self._on_launcher_gone()
            return
        *orders, self._heard = (self._heard + data).split(b"\n")
        for order in map(json.loads, orders):
            if "command" in order:
                self._start(**order)
            elif "signal" in order:
                self._pass_on(order["signal"])
            else:
                self._leaves = order["leave"]

    def _on_launcher_gone(self) -> None:
        """Let the program save and end; nobody else would see to it."""
        self._events.unregister(self._link.fileno())
        self.is_left_alone = True
        if self._program is None or self._code is not None:
            self._leaves = 1
        else:
            self._deadline = time.monotonic() + self._patience
            self._pass_on(signal.SIGTERM)

    def _start(self, command: list[str], patience: float) -> None:
        self._patience = patience
        pipe = subprocess.PIPE if int(os.environ["WORLD_SIZE"]) > 1 else None
        # torch warns at length of a store whose process has ended; this library names the rank.
        variables = {"PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
        try:
            self._program = subprocess.Popen(
                command,
                stdout=pipe,
                stderr=pipe,
                env=variables,
                # Apart from this process, so that what is sent to its group reaches the program once, and through here.
                start_new_session=True,
                preexec_fn=_end_with_parent(),
            )
        except OSError as error:
            sys.stderr.write(f"{command[0]} could not be started: {error.strerror}.\n")
            self._ended(126 if isinstance(error, PermissionError) else 127, time.monotonic())
            return
        prefix = f"[rank={os.environ['RANK']}] ".encode()
        for stream, target in ((self._program.stdout, 1), (self._program.stderr, 2)):
            if stream is not None:
                output = Output(stream.fileno(), target, Lines(prefix), self._lock)
                self._outputs.append(output)
                self._watch(output.source, lambda output=output: self._copy(output))  # type: ignore[misc]  # bound early

    def _copy(self, output: Output) -> None:
        if not output.copy():
            self._events.unregister(output.source)

    def _on_signals(self, signums: bytes) -> None:
        for signum in signums:
            if signum == signal.SIGCHLD:
                self._reap()
            else:
                self._pass_on(signum)

    def _pass_on(self, signum: int) -> None:
        now = time.monotonic()
        if self._program is None or self._code is not None:
            return
        if signum == signal.SIGKILL:
            self._passed_at[signum] = now
            self._deadline = None
            os.killpg(self._program.pid, signum)
        elif now - self._passed_at.get(signum, -SAME_SIGNAL) >= SAME_SIGNAL:
            # To the program alone: workers of its own, such as those that load data, end with it.
            self._passed_at[signum] = now
            os.kill(self._program.pid, signum)
            if signum not in (signal.SIGUSR1, signal.SIGUSR2):
                os.kill(self._program.pid, signal.SIGCONT)  # a program that was stopped would not end

    def _reap(self) -> None:
        if self._program is None or self._code is not None or (code := self._program.poll()) is None:
            return
        now = time.monotonic()
        if code < 0:
            _kill_group(self._program.pid)
        for output in self._outputs:
            output.drain()
        self._ended(code, now)

    def _ended(self, code: int, when: float) -> None:
        self._code = code
        tracebacks = [output.traceback_at for output in self._outputs if output.traceback_at is not None]
        blamed = next((output.blamed for output in self._outputs if output.blamed is not None), None)
        end = {"code": code, "time": when, "traceback_at": max(tracebacks, default=None), "blamed": blamed}
        if not self._tell({**end, "by_launcher": -code in self._passed_at}):
            self._leaves = 1

    def _tell(self, message: dict[str, Any]) -> bool:
        try:
            self._link.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True


def _kill_group(leader: int) -> None:
    """End what a program that was killed has left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _end_with_parent() -> Callable[[], None] | None:
    """Return what a child must call to be killed when this process is; None where there is no such way."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def end_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return end_with_parent


def _woken_by_signals() -> int:
    """Return what becomes readable when a signal comes."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for which in _handled():
        signal.signal(which, lambda *_: None)
    return reader


def _handled() -> Iterator[signal.Signals]:
    yield signal.SIGCHLD
    for which in SIGNALS:
        if signal.getsignal(which) != signal.SIG_IGN:  # as under nohup
            yield which


def main(address: str) -> int:
    """Keep one program for the launcher that listens at `address`."""
    woken = _woken_by_signals()
    with socket.socket(socket.AF_UNIX) as link:
        try:
            link.connect(address)
        except OSError:  # the launcher has ended
            return 1
        folder = os.path.dirname(address)
        keeper = Keeper(link, os.open(folder, os.O_RDONLY), woken)
        status = keeper.run()
        if keeper.is_left_alone:
            shutil.rmtree(folder, ignore_errors=True)
        return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
