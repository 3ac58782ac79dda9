"""Ask whether this process should stop: by a signal, or because its runner wants the slots back."""

from __future__ import annotations

import enum
import os
import signal
import threading
from types import FrameType
from typing import Any

from determined.core._distributed import DistributedContext


class PreemptMode(enum.Enum):
    """Which ranks may ask, and whom."""

    WorkersAskChief = "WORKERS_ASK_CHIEF"
    ChiefOnly = "CHIEF_ONLY"
    WorkersAskMaster = "WORKERS_ASK_MASTER"


class PreemptContext:
    """Tells when to stop. The first SIGTERM or SIGINT asks politely; a second SIGINT interrupts at once."""

    def __init__(self, distributed: DistributedContext, mode: PreemptMode) -> None:
        self._distributed = distributed
        self._mode = mode
        self._previous: dict[int, Any] = {}
        self._process = os.getpid()
        self.signum: int | None = None
        """The signal that asked to stop, if one did."""

    def should_preempt(self, auto_ack: bool = True) -> bool:
        """Say whether to save and stop now. In the default mode all ranks must ask together."""
        if self._mode is PreemptMode.WorkersAskChief:
            return self._distributed.broadcast(self.signum is not None)
        if self._mode is PreemptMode.ChiefOnly and not self._distributed.is_chief:
            raise ValueError(
                "should_preempt() was called on a worker in PreemptMode.ChiefOnly; only the chief may ask. "
                "Use PreemptMode.WorkersAskChief to ask on every rank."
            )
        return self.signum is not None

    def acknowledge_preemption_signal(self) -> None:
        """Say that stopping has begun; needed only after `should_preempt(auto_ack=False)`."""

    def start(self) -> None:
        """Listen to SIGTERM and SIGINT; only the main thread can."""
        if threading.current_thread() is threading.main_thread():
            for which in (signal.SIGTERM, signal.SIGINT):
                # None stands for a handler that was not set from Python, and cannot be set from there either.
                self._previous[which] = signal.signal(which, self._on_signal) or signal.SIG_DFL

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        for which, handler in self._previous.items():
            signal.signal(which, handler)
        self._previous.clear()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGTERM and os.getpid() != self._process:
            # A forked child, such as a worker of a pool: who ends it does not mean the training.
            signal.signal(signum, self._previous[signum])
            os.kill(os.getpid(), signum)
            return
        if self.signum is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signum = signum
