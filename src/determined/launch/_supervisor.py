"""Watch over the ranks of one machine: hand out signals, see which of them fails first, end with its status."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from determined.launch._ends import RankExit, RankExits
from determined.launch._keeper import SIGNALS
from determined.launch._line import Line

_SETTLING = 3.0
"""Seconds that the other ranks have to end by themselves after one has failed."""
_PARTING = 60.0
"""Seconds that other machines may take to end after the ranks of this one were stopped."""
_REMINDER = 60.0
"""Seconds after the end of a rank when those that go on are named."""
_KILLING = 3
"""How many interrupts it takes until ranks are killed."""
_ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclasses.dataclass(eq=False)
class _Rank:
    """The keeper of one rank, at the other end of a connection."""

    line: Line
    number: int = -1
    end: RankExit | None = None
    overdue: str = ""

    def tell(self, **order: Any) -> None:
        self.line.tell(order)


class Supervisor:
    """Runs, on a thread of its own, what starts the keepers, and tells these what to do."""

    def __init__(self, command: list[str], size: int, patience: float, folder: str, wait: float) -> None:
        self._command = command
        self._size = size
        self._patience = patience
        self._wait = wait
        self._address = os.path.join(folder, "door")
        self._events = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        self._attempt = 0
        self._ends = RankExits(size)
        self._released = False
        self._release_at: float | None = None
        self._kill_at: float | None = None
        self._leave_at: float | None = None
        self._remind_at: float | None = None
        self._overdue_at: float | None = None
        self._signum: int | None = None
        self._interrupts = 0
        self._killed = False
        self._status: int | None = None
        self._problem: BaseException | None = None

    def run(self, start: Callable[[str], object]) -> int:
        """Call `start` with the address for keepers, and return the exit status when all has ended.

        What `start` raises counts only where no rank has an exit status of its own to tell.
        """
        with socket.socket(socket.AF_UNIX) as door, _woken() as (woken, wake):
            door.bind(self._address)
            door.listen(128)
            self._events.register(door, selectors.EVENT_READ, lambda: self._greet(door.accept()[0]))
            self._events.register(woken, selectors.EVENT_READ, lambda: self._on_woken(woken.recv(64)))
            threading.Thread(target=self._call, args=(start, wake), name="launch", daemon=True).start()
            try:
                return self._loop()
            finally:
                self._events.close()
                for rank in self._ranks:
                    rank.line.link.close()

    def _call(self, start: Callable[[str], object], wake: socket.socket) -> None:
        try:
            start(self._address)
        except BaseException as error:
            self._problem = error
        with contextlib.suppress(OSError):  # the other thread has given up waiting
            wake.send(b"\0")

    def _loop(self) -> int:
        while self._status is None:
            for key, _ in self._events.select(self._until_next()):
                key.data()
            now = time.monotonic()
            if self._release_at is not None and now >= self._release_at:
                self._release()
            if self._kill_at is not None and now >= self._kill_at:
                self._kill()
            if self._leave_at is not None and now >= self._leave_at:
                self._finish()
            if self._remind_at is not None and now >= self._remind_at:
                self._remind()
            if self._overdue_at is not None and now >= self._overdue_at:
                self._kill_overdue()
        return self._status

    def _until_next(self) -> float | None:
        given = (self._release_at, self._kill_at, self._leave_at, self._remind_at, self._overdue_at)
        times = [at for at in given if at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _on_woken(self, what: bytes) -> None:
        for number in what:
            if number:
                self._on_signal(number)
            else:
                self._finish()

    # Signals

    def _on_signal(self, signum: int) -> None:
        living = self._living()
        if signum in _ASKING:
            self._interrupts += 1
            if not living:  # they are yet to come, or other machines are waited for
                self._signum = signum
                self._finish()
            elif self._signum is None:
                self._signum = signum
                self._kill_at = time.monotonic() + self._patience
                who = f"{signal.Signals(signum).name} is passed on to {len(living)} rank(s)"
                say(f"{who}, which have {self._patience:g} seconds to save and end (--shutdown-timeout).")
            elif signum == signal.SIGINT and self._interrupts >= _KILLING:
                self._kill()
        for rank in living:
            rank.tell(signal=signum)

    def _kill(self) -> None:
        self._kill_at = None
        living = self._living()
        if living:
            self._killed = True
            say(f"killing rank(s) {', '.join(str(rank.number) for rank in living)}, which did not end when asked to.")
        for rank in living:
            rank.tell(signal=int(signal.SIGKILL))

    def _living(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.number >= 0 and rank.end is None]

    # Keepers

    def _greet(self, link: socket.socket) -> None:
        rank = _Rank(Line(link))
        self._ranks.append(rank)
        self._events.register(link, selectors.EVENT_READ, lambda: self._hear(rank))

    def _hear(self, rank: _Rank) -> None:
        messages = rank.line.hear()
        if messages is None:
            self._part(rank)
            return
        for message in messages:
            if "attempt" in message:
                self._on_start(rank, message["rank"], message["attempt"])
            else:
                self._on_end(rank, RankExit(rank.number, overdue=rank.overdue, **message))

    def _part(self, rank: _Rank) -> None:
        self._events.unregister(rank.line.link)
        rank.line.link.close()
        self._ranks.remove(rank)
        if rank.number >= 0 and rank.end is None:
            self._on_end(rank, RankExit(rank.number, -signal.SIGKILL, time.monotonic()))

    def _on_start(self, rank: _Rank, number: int, attempt: int) -> None:
        if attempt != self._attempt:
            self._attempt = attempt
            self._ends = RankExits(self._size)
            self._released, self._release_at = False, None
            self._remind_at = self._overdue_at = None
        rank.number = number
        if self._signum is None:
            rank.tell(command=self._command, patience=self._patience)
        else:
            self._on_end(rank, RankExit(number, 128 + self._signum, time.monotonic(), by_launcher=True))

    def _on_end(self, rank: _Rank, end: RankExit) -> None:
        """Keep the others from being ended at once where a rank has not ended well.

        What started the keepers ends all of them when it sees one fail; but they may be about to save, or to say
        more clearly what happened.
        """
        rank.end = end
        self._ends.add(end)
        if end.code == 0 and self._overdue_at is None:
            self._remind_at, self._overdue_at = time.monotonic() + _REMINDER, time.monotonic() + self._wait
        if end.code == 0 or self._released:
            rank.tell(leave=end.status)
        else:
            release_at = time.monotonic() + (_SETTLING if end.is_failure else self._patience)
            self._release_at = min(release_at, self._release_at or release_at)
        if self._ends.are_all_in:
            self._remind_at = self._overdue_at = None
            self._release()

    def _remind(self) -> None:
        """Say, while nothing is lost, that a rank that goes on alone will be ended."""
        self._remind_at = None
        if names := ", ".join(str(rank.number) for rank in self._living()):
            say(
                f"rank(s) {names} go on after others have ended; they have {self._wait:g} seconds to end "
                "(the longer of --shutdown-timeout and DET_DISTRIBUTED_TIMEOUT)."
            )

    def _kill_overdue(self) -> None:
        """End ranks that are frozen or hang after the training, which no other rank is left to notice."""
        self._overdue_at = None
        for rank in self._living():
            rank.overdue = (
                f"did not end within {self._wait:g} seconds after others had (the longer of --shutdown-timeout and "
                "DET_DISTRIBUTED_TIMEOUT), and was killed"
            )
            rank.tell(signal=int(signal.SIGKILL))

    def _release(self) -> None:
        """Let go the keepers of ranks that have ended. Those of ranks that were stopped as asked do not tell of it."""
        self._release_at = None
        if self._released:
            return
        self._released = True
        stopped = self._ends.are_all_in and self._ends.was_stopped
        for rank in self._ranks:
            if rank.end is not None:
                rank.tell(leave=0 if stopped else rank.end.status)
        if stopped:
            self._leave_at = time.monotonic() + _PARTING
        if (failure := self._ends.failure) is not None:
            say(f"{self._told(failure)}. Host: {socket.gethostname()}.")

    def _told(self, failure: RankExit) -> str:
        if failure.blamed in [rank.number for rank in self._living()]:
            return (
                f"rank {failure.blamed} failed first: it does not end, and rank {failure.rank} {failure} because of it"
            )
        return f"rank {failure.rank} failed first: it {failure}"

    # The end

    def _finish(self) -> None:
        status = self._ends.status
        if self._signum is not None and (self._killed or not (status or self._ends.are_all_in)):
            status = 128 + self._signum
        if self._problem is not None and not status:
            say(f"{type(self._problem).__name__}: {self._problem}")
            status = 1
        self._status = status


def say(text: str) -> None:
    """Tell the user something, in one line of the error output."""
    sys.stderr.write(f"[launcher] {text}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def _woken() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give what receives the number of every signal, and what wakes it up otherwise."""
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    with woken, wake:
        before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        # A signal that this process was told to ignore, as by nohup, stays ignored.
        handled = [which for which in SIGNALS if signal.getsignal(which) != signal.SIG_IGN]
        handlers = {which: signal.signal(which, lambda *_: None) for which in handled}
        try:
            yield woken, wake
        finally:
            for which, handler in handlers.items():
                signal.signal(which, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(before)
