"""Ask whether this process should stop, because of a signal or because its runner wants the slots back."""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from determined import errors
from determined.core.distributed import DistributedContext

_SAME_INTERRUPT_S = 0.5


class PreemptMode(enum.Enum):
    """Which ranks may ask, and whom."""

    WorkersAskChief = "WORKERS_ASK_CHIEF"
    ChiefOnly = "CHIEF_ONLY"
    WorkersAskMaster = "WORKERS_ASK_MASTER"


class PreemptContext:
    """Says when to stop. The first SIGTERM or SIGINT asks to stop; a second SIGINT interrupts at once."""

    def __init__(self, distributed: DistributedContext, mode: PreemptMode) -> None:
        self._distributed = distributed
        self._mode = mode
        self._previous: dict[int, Any] = {}
        self._process = os.getpid()
        self._stacks = False
        self._is_polled = False
        self._listening_blocks = 0
        self._first_signal: float | None = None
        self.signum: int | None = None
        """The signal that asked to stop, if one did."""

    def should_preempt(self, auto_ack: bool = True) -> bool:
        """Return whether to save and stop now. In the default mode all ranks must call this."""
        self.listen()
        if self._mode is PreemptMode.WorkersAskChief:
            return self._distributed.broadcast(self.signum is not None)
        if self._mode is PreemptMode.ChiefOnly and not self._distributed.is_chief:
            raise errors.WrongRankError(
                "should_preempt() was called on a worker in PreemptMode.ChiefOnly; only the chief may ask. "
                "Use PreemptMode.WorkersAskChief to ask on every rank."
            )
        return self.signum is not None

    def acknowledge_preemption_signal(self) -> None:
        """Do nothing. Programs call it after `should_preempt(auto_ack=False)`, when they begin to stop."""

    def listen(self) -> None:
        """Keep a signal from ending the process at once: from now on, somebody checks `signum`."""
        self._is_polled = True

    @contextlib.contextmanager
    def listening(self, also_after_failure: bool) -> Iterator[None]:
        """Listen inside the block; with `also_after_failure`, until the run has ended if the block fails."""
        self._listening_blocks += 1
        try:
            yield
        except BaseException:
            self._is_polled |= also_after_failure
            raise
        finally:
            self._listening_blocks -= 1

    def start(self) -> None:
        """Handle SIGTERM and SIGINT, which only the main thread can; print all stacks on SIGUSR1."""
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:  # else the program has a handler of its own
            # Fails if there is no real file behind the error output.
            with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
                faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or sys.stderr, all_threads=True)
                self._stacks = True
        if threading.current_thread() is threading.main_thread():
            for which in (signal.SIGTERM, signal.SIGINT):
                # None stands for a handler that was not set from Python, and cannot be restored from there.
                self._previous[which] = signal.signal(which, self._on_signal) or signal.SIG_DFL

    def close(self) -> None:
        """Restore the signal handlers of the program."""
        if self._stacks:
            faulthandler.unregister(signal.SIGUSR1)
            self._stacks = False
        for which, handler in self._previous.items():
            signal.signal(which, handler)
        self._previous.clear()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked child, such as a loader worker. The training process handles an interrupt from the terminal.
            if signum != signal.SIGINT:
                self._pass_on(signum, frame)
        elif not (self._is_polled or self._listening_blocks) or (signum == signal.SIGINT and self._is_second()):
            self._pass_on(signum, frame)
        else:
            self.signum = self.signum or signum
            self._first_signal = self._first_signal or time.monotonic()

    def _is_second(self) -> bool:
        """Return whether an interrupt is a second one, not the first one passed on.

        A terminal interrupts all ranks and their launcher, which passes the interrupt on to the ranks.
        """
        if self._first_signal is None:
            return False
        return self._distributed.size == 1 or time.monotonic() - self._first_signal > _SAME_INTERRUPT_S

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        """Let the signal do what it does without this handler."""
        previous = self._previous[signum]
        if callable(previous):
            previous(signum, frame)
        elif previous == signal.SIG_DFL:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
