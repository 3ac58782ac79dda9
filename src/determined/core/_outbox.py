"""One background thread that delivers what the training thread hands over."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any

Deliver = Callable[[Sequence[Any]], None]

# How long messages may gather before they are delivered together: one transaction serves many reports.
_GATHER_SECONDS = 0.25


class Outbox:
    """Deliver messages in order on a background thread, neighbours with the same destination together.

    A failure on the thread is raised on the caller's thread by the next `put`, `flush` or `close`; what came
    after it is not delivered.
    """

    def __init__(self) -> None:
        self._queue: collections.deque[tuple[Deliver, Any]] = collections.deque()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._hurry = False
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="resolute-outbox", daemon=True)
        self._thread.start()

    def put(self, deliver: Deliver, message: Any) -> None:
        """Hand over a message; returns at once."""
        if self._failure is not None:
            self._raise_failure()
        with self._changed:
            self._queue.append((deliver, message))
            if len(self._queue) == 1:
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything handed over so far is delivered."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._failure or not (self._queue or self._busy))
            self._hurry = False
        self._raise_failure()

    def close(self) -> None:
        """Deliver what is left and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _work(self) -> None:
        while batch := self._next_batch():
            try:
                for deliver, messages in _grouped(batch):
                    deliver(messages)
            except BaseException as failure:
                with self._changed:
                    self._failure = failure
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next_batch(self) -> list[tuple[Deliver, Any]]:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            self._changed.wait_for(lambda: self._hurry or self._closed, timeout=_GATHER_SECONDS)
            batch = list(self._queue)
            self._queue.clear()
            self._busy = bool(batch)
            return batch


def _grouped(batch: list[tuple[Deliver, Any]]) -> list[tuple[Deliver, list[Any]]]:
    groups: list[tuple[Deliver, list[Any]]] = []
    for deliver, message in batch:
        if groups and groups[-1][0] == deliver:
            groups[-1][1].append(message)
        else:
            groups.append((deliver, [message]))
    return groups
