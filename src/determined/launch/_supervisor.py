"""Supervise the ranks of one machine: pass signals on, find the rank that fails first, exit with its status."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from determined.launch._rank_shim import SIGNALS
from determined.processes import Channel, EventLoop, RankExit, RankExits, SignalPipe

_SETTLING_TIMEOUT_S = 3.0
"""How long the other ranks have to end by themselves after one has failed."""
_PARTING_TIMEOUT_S = 60.0
"""How long other machines may take to end after the ranks of this one were stopped."""
_REMINDER_TIMEOUT_S = 60.0
"""How long after the exit of a rank those that go on are named."""
_MAX_INTERRUPTS = 3
"""How many interrupts it takes until ranks are killed."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclasses.dataclass(eq=False)
class _Rank:
    """The shim of one rank, at the other end of a channel."""

    channel: Channel
    number: int = -1
    pid: int = 0
    exit: RankExit | None = None
    overdue: str = ""

    def send(self, **message: Any) -> None:
        self.channel.send(message)


class Supervisor:
    """Starts the shims of the ranks on a thread of its own, and tells them what to do."""

    def __init__(self, command: list[str], size: int, grace_period: float, folder: str, wait: float) -> None:
        self._command = command
        self._size = size
        self._grace_period = grace_period
        self._wait = wait
        self._address = os.path.join(folder, "door")
        self._events = EventLoop()
        self._ranks: list[_Rank] = []
        self._attempt = 0
        self._exits = RankExits(size)
        self._released = False
        self._signum: int | None = None
        self._interrupts = 0
        self._killed = False
        self._status: int | None = None
        self._problem: BaseException | None = None

    def run(self, start: Callable[[str], object]) -> int:
        """Call `start` with the address for shims, and return the exit status when all has ended.

        What `start` raises counts only where no rank has an exit status of its own.
        """
        with socket.socket(socket.AF_UNIX) as door, SignalPipe(SIGNALS) as signals:
            door.bind(self._address)
            door.listen(128)
            self._events.watch(door, lambda: self._accept(door.accept()[0]))
            self._events.watch(signals, lambda: self._on_signals(signals.read()))
            threading.Thread(target=self._call, args=(start, signals), name="launch", daemon=True).start()
            try:
                while self._status is None:
                    self._events.run_once()
                return self._status
            finally:
                self._events.close()
                for rank in self._ranks:
                    rank.channel.close()

    def _call(self, start: Callable[[str], object], signals: SignalPipe) -> None:
        try:
            start(self._address)
        except BaseException as error:
            self._problem = error
        signals.wake()

    # Signals

    def _on_signals(self, signums: bytes) -> None:
        for signum in signums:
            self._on_signal(signum) if signum else self._finish()

    def _on_signal(self, signum: int) -> None:
        living = self._living()
        if signum in _STOP_SIGNALS:
            self._interrupts += 1
            if not living:  # they are yet to come, or other machines are waited for
                self._signum = signum
                self._finish()
            elif self._signum is None:
                self._signum = signum
                self._events.after(self._grace_period, self._kill)
                who = f"{signal.Signals(signum).name} is passed on to {len(living)} rank(s)"
                say(f"{who}, which have {self._grace_period:g} seconds to save and end (--shutdown-timeout).")
            elif signum == signal.SIGINT and self._interrupts >= _MAX_INTERRUPTS:
                self._kill()
        for rank in living:
            rank.send(signal=signum)

    def _kill(self) -> None:
        self._events.cancel(self._kill)
        living = self._living()
        if living:
            self._killed = True
            say(f"killing rank(s) {', '.join(str(rank.number) for rank in living)}, which did not end when asked to.")
        for rank in living:
            rank.send(signal=int(signal.SIGKILL))

    def _living(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.number >= 0 and rank.exit is None]

    # Shims

    def _accept(self, link: socket.socket) -> None:
        rank = _Rank(Channel(link))
        self._ranks.append(rank)
        self._events.watch(rank.channel, lambda: self._receive(rank))

    def _receive(self, rank: _Rank) -> None:
        messages = rank.channel.receive()
        if messages is None:
            self._remove(rank)
            return
        for message in messages:
            if "attempt" in message:
                self._on_start(rank, **message)
            else:
                self._on_exit(rank, RankExit(rank.number, overdue=rank.overdue, **message))

    def _remove(self, rank: _Rank) -> None:
        self._events.unwatch(rank.channel)
        rank.channel.close()
        self._ranks.remove(rank)
        if rank.number >= 0 and rank.exit is None:
            self._on_exit(rank, RankExit(rank.number, -signal.SIGKILL, time.monotonic()))

    def _on_start(self, shim: _Rank, rank: int, attempt: int, pid: int) -> None:
        if attempt != self._attempt:
            self._attempt = attempt
            self._exits = RankExits(self._size)
            self._released = False
            self._events.cancel(self._release, self._remind, self._kill_overdue)
        shim.number, shim.pid = rank, pid
        if self._signum is None:
            shim.send(command=self._command, grace_period=self._grace_period)
        else:
            self._on_exit(shim, RankExit(rank, 128 + self._signum, time.monotonic(), by_supervisor=True))

    def _on_exit(self, rank: _Rank, exit: RankExit) -> None:
        """Keep the others from being ended at once where a rank has not ended well.

        torchrun ends all shims when it sees one fail; but their ranks may be about to save, or to say more clearly what
        happened.
        """
        rank.exit = exit
        self._exits.add(exit)
        if exit.code == 0:
            self._events.after(_REMINDER_TIMEOUT_S, self._remind)
            self._events.after(self._wait, self._kill_overdue)
        if exit.code == 0 or self._released:
            rank.send(leave=exit.status)
        else:
            self._events.after(_SETTLING_TIMEOUT_S if exit.is_failure else self._grace_period, self._release)
        if self._exits.are_all_in:
            self._events.cancel(self._remind, self._kill_overdue)
            self._release()

    def _remind(self) -> None:
        """Say, while nothing is lost, that a rank that goes on alone will be ended."""
        if names := ", ".join(str(rank.number) for rank in self._living()):
            say(
                f"rank(s) {names} go on after others have ended; they have {self._wait:g} seconds to end "
                "(the longer of --shutdown-timeout and DET_DISTRIBUTED_TIMEOUT)."
            )

    def _kill_overdue(self) -> None:
        """End ranks that are frozen or hang after the training, or that never began: no other rank would notice."""
        for rank in self._living():
            rank.overdue = (
                f"did not end within {self._wait:g} seconds after others had (the longer of --shutdown-timeout and "
                "DET_DISTRIBUTED_TIMEOUT), and was killed"
            )
            rank.send(signal=int(signal.SIGKILL))
        self._kill_unconnected()

    def _kill_unconnected(self) -> None:
        """Kill shims that never connected, which is the only way to end them."""
        import psutil

        connected = {rank.pid for rank in self._ranks}
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if child.pid not in connected and self._address in child.cmdline():
                    say(f"process {child.pid}, which should have started a rank, does not answer and is killed.")
                    child.kill()

    def _release(self) -> None:
        """Let go the shims of ranks that have ended. Those of ranks that were stopped as asked report no failure."""
        self._events.cancel(self._release)
        if self._released:
            return
        self._released = True
        stopped = self._exits.are_all_in and self._exits.was_stopped
        for rank in self._ranks:
            if rank.exit is not None:
                rank.send(leave=0 if stopped else rank.exit.status)
        if stopped:
            self._events.after(_PARTING_TIMEOUT_S, self._finish)
        if (failure := self._exits.failure) is not None:
            say(f"{self._description(failure)}. Host: {socket.gethostname()}.")

    def _description(self, failure: RankExit) -> str:
        if failure.blamed in [rank.number for rank in self._living()]:
            return (
                f"rank {failure.blamed} failed first: it does not end, and rank {failure.rank} {failure} because of it"
            )
        return f"rank {failure.rank} failed first: it {failure}"

    # The exit

    def _finish(self) -> None:
        status = self._exits.status
        if self._signum is not None and (self._killed or not (status or self._exits.are_all_in)):
            status = 128 + self._signum
        if self._problem is not None and not status:
            say(f"{type(self._problem).__name__}: {self._problem}")
            status = 1
        self._status = status


def say(text: str) -> None:
    """Tell the user something, in one line of the error output."""
    sys.stderr.write(f"[launcher] {text}\n")
    sys.stderr.flush()
