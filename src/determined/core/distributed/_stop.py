"""Let all ranks stop at the same batch, whichever of them was asked to."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Protocol

from determined.core.distributed._context import DistributedContext
from determined.core.distributed._exchange import Event, Exchange


class Signals(Protocol):
    """Knows which signal asked this process to stop."""

    signum: int | None


class StopAgreement:
    """Finds a batch that no rank is past, and at which all stop; training goes on meanwhile.

    The rank that is asked to stop tells the others, and every rank answers with the next batch that it can stop at.
    From its answer on it trains no further than that; the furthest of these batches is where all stop.
    """

    def __init__(self, distributed: DistributedContext, exchange: Exchange, signals: Signals) -> None:
        self._distributed = distributed
        self._exchange = exchange
        self._signals = signals
        self._position: Callable[[], int] = lambda: 0
        self._round = 0
        self._answers: dict[int, dict[int, int]] = {}  # of each round that has begun: batch by rank
        self._is_requested = False
        self._stop_at: int | None = None
        self._agreed = threading.Event()
        self.limit = math.inf
        """Batches up to which this rank may train without asking `is_reached`."""

    @property
    def is_agreed(self) -> bool:
        """Whether the ranks have agreed to stop."""
        return self._agreed.is_set()

    def follow(self, position: Callable[[], int]) -> None:
        """Take the number of batches trained from this function."""
        self._position = position

    def request(self) -> None:
        """Ask all ranks to stop soon."""
        if not self._is_requested:
            self._is_requested = True
            self._exchange.publish({"kind": "stop", "round": self._round, "signal": self._signals.signum})

    def is_reached(self, batches: int) -> bool:
        """Return whether this is the batch to stop at; waits for the other ranks' answers where it could be."""
        if batches < self.limit:
            return False
        self._agreed.wait()  # the health monitor ends it if a rank is lost
        return self._stop_at is not None and batches >= self._stop_at

    def reset(self) -> None:
        """Forget a stop that was carried out, unless a signal asked for it. All ranks must call this."""
        if any(self._distributed.allgather(self._is_requested or self.is_agreed)):
            self._agreed.wait()
            if self._signals.signum is not None:
                self._stop_at = self.limit = 0  # whatever is trained after this stops at once
            else:
                self._agreed.clear()
                self._round += 1
                self._is_requested, self._stop_at, self.limit = False, None, math.inf
                if self._round in self._answers:  # a rank that was faster has asked already
                    self._answer()
        self.follow(lambda: 0)

    def on_event(self, sender: int, event: Event) -> None:
        """Take part, on the thread of the exchange."""
        if event["kind"] == "stop" and event["round"] not in self._answers:
            self._answers[event["round"]] = {}
            self._signals.signum = self._signals.signum or event["signal"]
            if event["round"] == self._round:
                self._answer()
        elif event["kind"] == "position":
            answers = self._answers[event["round"]]
            answers[sender] = event["batches"]
            if len(answers) == self._distributed.size:
                self._stop_at = self.limit = max(answers.values())
                self._agreed.set()

    def _answer(self) -> None:
        """Keep training from going beyond its next batch, and tell the others which one that is."""
        self._is_requested = True
        while True:
            self.limit = self._position() + 1
            # Training goes on beside us and may have come further before it could see the limit.
            if self._position() < self.limit:
                break
        self._exchange.publish({"kind": "position", "round": self._round, "batches": int(self.limit)})
