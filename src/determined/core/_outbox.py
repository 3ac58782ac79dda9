"""One background thread that delivers what the training thread hands over."""

from __future__ import annotations

import atexit
import collections
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from determined import errors

Deliver = Callable[[Sequence[Any]], None]

# How long messages may gather before they are delivered together: one transaction serves many reports.
_GATHER_SECONDS = 1.0


class Outbox:
    """Deliver messages on a background thread: those to one destination together and in order.

    A failure on the thread is raised on the caller's thread by the next `put`, `flush` or `close`. What was to be
    delivered together with the failed message is lost; later messages are still delivered.
    """

    def __init__(self) -> None:
        self._queue: collections.deque[tuple[Deliver, Any]] = collections.deque()
        self._changed = threading.Condition()
        self._failures: list[BaseException] = []
        # Counts of messages: taken in, delivered or failed, and those that must not wait.
        self._accepted = self._settled = self._awaited = 0
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="resolute-outbox", daemon=True)
        self._thread.start()
        # The thread must not keep a program from ending, nor end before it has delivered everything.
        self._process = os.getpid()
        atexit.register(self._close_at_exit)

    def put(self, deliver: Deliver, message: Any, *, urgent: bool = False) -> None:
        """Hand over a message; returns at once. It is not taken if an earlier failure is raised instead.

        Others gather for a while before they are delivered; an urgent one does not wait, nor do those before it.
        """
        with self._changed:
            self._raise_failure()
            if self._closed:
                raise errors.InternalException(
                    "A report came after the run was closed; report within the `with ...init() as context:` block."
                )
            self._queue.append((deliver, message))
            self._accepted += 1
            if urgent:
                self._awaited = self._accepted
            if urgent or len(self._queue) == 1:
                self._changed.notify_all()

    def hurry(self) -> None:
        """Let everything handed over so far be delivered at once; returns before it is."""
        with self._changed:
            self._awaited = self._accepted
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything handed over so far is delivered."""
        with self._changed:
            awaited = self._awaited = self._accepted
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._settled >= awaited)
            self._raise_failure()

    def close(self) -> None:
        """Deliver what is left and end the thread. Twice is fine."""
        atexit.unregister(self._close_at_exit)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            self._raise_failure()

    def _close_at_exit(self) -> None:
        # A forked child has neither the thread nor anything to deliver, but it may have inherited a held lock.
        if os.getpid() == self._process:
            self.close()

    def _raise_failure(self) -> None:
        if self._failures:
            (first, *others), self._failures = self._failures, []
            for other in others:
                first.add_note(f"After it came {type(other).__name__}: {other}")
            raise first

    def _work(self) -> None:
        while batch := self._next_batch():
            failures = [failure for group in _grouped(batch) if (failure := _failure_of(*group))]
            with self._changed:
                self._failures += failures
                self._settled += len(batch)
                self._changed.notify_all()

    def _next_batch(self) -> list[tuple[Deliver, Any]]:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            self._changed.wait_for(lambda: self._awaited > self._settled or self._closed, timeout=_GATHER_SECONDS)
            batch = list(self._queue)
            self._queue.clear()
            return batch


def _failure_of(deliver: Deliver, messages: list[Any]) -> BaseException | None:
    try:
        deliver(messages)
    except BaseException as failure:
        return failure
    return None


def _grouped(batch: list[tuple[Deliver, Any]]) -> list[tuple[Deliver, list[Any]]]:
    groups: dict[Deliver, list[Any]] = {}
    for deliver, message in batch:
        groups.setdefault(deliver, []).append(message)
    return list(groups.items())
