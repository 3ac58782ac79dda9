"""The process in front of every rank: names the rank on each line it writes, passes signals on, reports its exit."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time

from determined.processes import Channel, EventLoop, Output, SignalPipe, end_with_parent, prefixed

SAME_SIGNAL_S = 0.5
"""Seconds within which a signal that comes twice, by two ways, is one."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""What is passed on to the program."""


class RankOutput(Output):
    """One stream of the program, copied to the same stream of the launcher with the rank before every line."""

    def __init__(self, pipe: int, target: int, prefix: bytes, lock: int) -> None:
        super().__init__(pipe)
        self._target = target
        self._prefix = prefix
        self._lock = lock

    def write(self, lines: list[bytes]) -> None:
        """Write lines as one block, since the shims of all ranks write to the same stream."""
        text = prefixed(self._prefix, lines)
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


class RankShim:
    """Runs one program until it has ended and the launcher lets this process go."""

    def __init__(self, channel: Channel, lock: int, signals: SignalPipe) -> None:
        self._channel = channel
        self._lock = lock
        self._events = EventLoop()
        self._events.watch(channel, self._receive)
        self._events.watch(signals, lambda: self._on_signals(signals.read()))
        self._outputs: list[Output] = []
        self._program: subprocess.Popen[bytes] | None = None
        self._passed_at: dict[int, float] = {}
        self._grace_period = 0.0
        self._code: int | None = None
        self._exit_status: int | None = None
        self.is_orphan = False
        """Whether the launcher has ended without having told this process to."""

    def run(self) -> int:
        """Do what the launcher says; returns the exit status for whoever started this process."""
        rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self._channel.send({"rank": rank, "attempt": attempt, "pid": os.getpid()})
        while self._exit_status is None:
            self._events.run_once()
        return self._exit_status

    def _receive(self) -> None:
        messages = self._channel.receive()
        if messages is None:
            self._on_launcher_gone()
            return
        for message in messages:
            if "command" in message:
                self._start(**message)
            elif "signal" in message:
                self._pass_on(message["signal"])
            else:
                self._exit_status = message["leave"]

    def _on_launcher_gone(self) -> None:
        """Let the program save and end; nobody else would see to it."""
        self._events.unwatch(self._channel)
        self.is_orphan = True
        if self._program is None or self._code is not None:
            self._exit_status = 1
        else:
            self._events.after(self._grace_period, lambda: self._pass_on(signal.SIGKILL))
            self._pass_on(signal.SIGTERM)

    def _start(self, command: list[str], grace_period: float) -> None:
        self._grace_period = grace_period
        pipe = subprocess.PIPE if int(os.environ["WORLD_SIZE"]) > 1 else None
        # torch warns at length of a store whose process has ended; this library names the rank.
        variables = {"PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
        shim = os.getpid()
        try:
            self._program = subprocess.Popen(
                command,
                stdout=pipe,
                stderr=pipe,
                env=variables,
                # Apart from this process, so that what is sent to its group reaches the program once, and through here.
                start_new_session=True,
                preexec_fn=lambda: end_with_parent(shim),
            )
        except OSError as error:
            sys.stderr.write(f"{command[0]} could not be started: {error.strerror}.\n")
            self._report(126 if isinstance(error, PermissionError) else 127, time.monotonic())
            return
        prefix = f"[rank={os.environ['RANK']}] ".encode()
        for stream, target in ((self._program.stdout, 1), (self._program.stderr, 2)):
            if stream is not None:
                output = RankOutput(stream.fileno(), target, prefix, self._lock)
                self._outputs.append(output)
                self._events.watch(output.pipe, lambda output=output: self._copy(output))  # type: ignore[misc]  # bound early

    def _copy(self, output: Output) -> None:
        if output.copy() == 0:
            self._events.unwatch(output.pipe)

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
            os.killpg(self._program.pid, signum)
        elif now - self._passed_at.get(signum, -SAME_SIGNAL_S) >= SAME_SIGNAL_S:
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
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._program.pid, signal.SIGKILL)  # what a program that was killed has left behind
        for output in self._outputs:
            output.drain()
        self._report(code, now)

    def _report(self, code: int, when: float) -> None:
        self._code = code
        tracebacks = [output.traceback_at for output in self._outputs if output.traceback_at is not None]
        blamed = next((output.blamed for output in self._outputs if output.blamed is not None), None)
        exit = {"code": code, "time": when, "traceback_at": max(tracebacks, default=None), "blamed": blamed}
        if not self._channel.send({**exit, "by_supervisor": -code in self._passed_at}):
            self._exit_status = 1


def main(address: str) -> int:
    """Run one program for the launcher that listens at `address`."""
    signals = SignalPipe((signal.SIGCHLD, *SIGNALS))
    with socket.socket(socket.AF_UNIX) as link:
        try:
            link.connect(address)
        except OSError:  # the launcher has ended
            return 1
        folder = os.path.dirname(address)
        shim = RankShim(Channel(link), os.open(folder, os.O_RDONLY), signals)
        status = shim.run()
        if shim.is_orphan:
            shutil.rmtree(folder, ignore_errors=True)
        return status
