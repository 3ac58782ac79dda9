"""When to leave the training loop before its end."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Protocol

from determined.core.distributed import HealthMonitor
from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._loop.plan import ShouldExit, Stopped
from determined.pytorch._loop.progress import Progress


class Limit(Protocol):
    """How far training may go without asking."""

    limit: float


class NoLimit:
    """Training may go on until somebody wants it to stop."""

    limit = math.inf


class Stops:
    """Stops of a process that trains alone: at once."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.program = context
        self.preempt = context.services.preempt
        self.bound: Limit = NoLimit()
        """Where to ask `now`, even if nobody wants to stop."""

    def wanted(self) -> bool:
        """Return whether the program or a signal asks to stop."""
        return self.program.stop_requested or self.preempt.signum is not None

    def now(self) -> bool:
        """Return whether to stop at this batch."""
        return self.wanted()

    def agree_to_exit(self) -> bool:
        """Return whether all ranks leave the loop because of what the program raised."""
        return True

    def check_exit(self, request: ShouldExit) -> None:
        """Raise the request of the program to leave the loop unless it is made on all ranks."""
        if not self.agree_to_exit():
            request.add_note(
                "Not all ranks raised ShouldExit, and one cannot leave the loop alone: raise it on all of them, or "
                "use context.set_stop_requested(True), by which one rank stops all."
            )
            raise request

    def raise_if_now(self) -> None:
        """Leave the loop if it is to stop at this batch."""
        if self.now():
            raise Stopped

    @contextlib.contextmanager
    def following(self, pulse: Callable[[], object]) -> Iterator[None]:
        """Listen to signals for the time of a training."""
        with self.preempt.listening(also_after_failure=False):
            yield


class SharedStops(Stops):
    """Stops of several ranks: all at the same batch, which they agree on."""

    def __init__(self, context: PyTorchTrialContext, health: HealthMonitor, progress: Progress) -> None:
        super().__init__(context)
        self._health = health
        self._progress = progress
        self.bound = health.stop

    def wanted(self) -> bool:
        if super().wanted():
            self._health.stop.request()
            return True
        return self._health.stop.is_agreed

    def now(self) -> bool:
        self.wanted()  # which tells the others
        return self._health.stop.is_reached(self._progress.batches_trained)

    def agree_to_exit(self) -> bool:
        """Tell the other ranks that the program leaves the loop; returns whether it does so on all of them."""
        return self._health.agree_to_exit()

    @contextlib.contextmanager
    def following(self, pulse: Callable[[], object]) -> Iterator[None]:
        """Let the other ranks know how far this one is, and that it is alive while `pulse` changes."""
        with (
            self._health.following(lambda: self._progress.batches_trained, pulse),
            self.preempt.listening(also_after_failure=True),
        ):
            yield
        self._health.stop.reset()


def stops_of(context: PyTorchTrialContext, progress: Progress) -> Stops:
    """Return how this run stops."""
    health = context.services.health
    return Stops(context) if health is None else SharedStops(context, health, progress)
