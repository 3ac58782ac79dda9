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
    """The number of batches at which `Stops.now` must be asked again."""

    limit: float


class Stops:
    """Stops a process that trains alone: after the current batch."""

    limit = math.inf

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.program = context
        self.preempt = context.services.preempt
        self.bound: Limit = self
        """When to ask `now` even if no stop is requested."""

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
        """Raise the program's request to leave the loop unless all ranks made it."""
        if not self.agree_to_exit():
            request.add_note(
                "Not all ranks raised ShouldExit, and one cannot leave the loop alone: raise it on all of them, or "
                "use context.set_stop_requested(True), with which one rank stops all."
            )
            raise request

    def raise_if_now(self) -> None:
        """Raise `Stopped` if the loop must stop at this batch."""
        if self.now():
            raise Stopped

    @contextlib.contextmanager
    def following(self, pulse: Callable[[], object]) -> Iterator[None]:
        """Listen to signals inside the block."""
        with self.preempt.listening(also_after_failure=False):
            yield


class SharedStops(Stops):
    """Stops several ranks after the same batch, on which they agree."""

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
        self.wanted()  # tells the other ranks
        return self._health.stop.is_reached(self._progress.batches_trained)

    def agree_to_exit(self) -> bool:
        """Tell the other ranks that the program leaves the loop; return whether it does so on all of them."""
        return self._health.agree_to_exit()

    @contextlib.contextmanager
    def following(self, pulse: Callable[[], object]) -> Iterator[None]:
        """Report the progress of this rank to the others, and that it is alive while `pulse` changes."""
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
