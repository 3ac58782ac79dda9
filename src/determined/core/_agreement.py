"""Let all ranks stop at the same batch, whichever of them was asked to."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

from determined.core._distributed import DistributedContext
from determined.core._preempt import PreemptContext
from determined.core._sideline import SideLine


class StopAgreement:
    """Finds a batch that no rank is past, and at which all stop; training goes on meanwhile.

    The rank that is asked to stop tells the chief, which asks every rank how far it has come. From its answer on a
    rank trains up to the next batch only; the furthest of these is where all stop.
    """

    def __init__(self, distributed: DistributedContext, line: SideLine, preempt: PreemptContext) -> None:
        self._distributed = distributed
        self._line = line
        self._preempt = preempt
        self._position: Callable[[], int] = lambda: 0
        self._asked = False
        self._answers: dict[int, int] | None = None
        self._stop_at: int | None = None
        self._agreed = threading.Event()
        self.limit = math.inf
        """Batches up to which this rank may train without asking `is_reached`."""

    @property
    def is_made(self) -> bool:
        """Whether the ranks have agreed to stop."""
        return self._agreed.is_set()

    def follow(self, position: Callable[[], int]) -> None:
        """Take the number of batches trained from this function."""
        self._position = position

    def ask(self) -> None:
        """Ask all ranks to stop soon."""
        if not self._asked:
            self._asked = True
            self._line.send({"kind": "stop", "signal": self._preempt.signum})

    def is_reached(self, batches: int) -> bool:
        """Say whether this is the batch to stop at; waits for the other ranks' answers where it could be."""
        if batches < self.limit:
            return False
        self._agreed.wait()  # ended by the watch over the ranks if one of them is lost
        return self._stop_at is not None and batches >= self._stop_at

    def end(self) -> None:
        """Forget a stop that was answered, unless a signal asked for it. All ranks must call this."""
        if any(self._distributed.allgather(self._asked or self.is_made)):
            self._agreed.wait()
            if self._preempt.signum is not None:
                self._stop_at = self.limit = 0  # whatever is trained after this stops at once
            else:
                self._agreed.clear()
                self._asked, self._answers, self._stop_at, self.limit = False, None, None, math.inf
        self.follow(lambda: 0)

    def hear(self, sender: int, message: Mapping[str, Any]) -> None:
        """Take part, on the thread of the side line."""
        kind = message["kind"]
        if kind == "stop" and self._answers is None:  # on the chief, from the first rank that asks
            self._answers = {}
            self._line.publish({"kind": "how far", "signal": message["signal"]})
        elif kind == "how far":
            self._preempt.signum = self._preempt.signum or message["signal"]
            self._line.send({"kind": "so far", "batches": self._hold()})
        elif kind == "so far" and self._answers is not None:
            self._answers[sender] = message["batches"]
            if len(self._answers) == self._distributed.size:
                self._line.publish({"kind": "stop at", "batches": max(self._answers.values())})
        elif kind == "stop at":
            self._asked = True
            self._stop_at = self.limit = message["batches"]
            self._agreed.set()

    def _hold(self) -> int:
        """Keep training from going beyond its next batch, and return which one that is."""
        while True:
            self.limit = self._position() + 1
            # Training goes on beside us and may have come further before it could see the limit.
            if self._position() < self.limit:
                return int(self.limit)
