"""One background thread that delivers what the training thread hands over."""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from determined import errors

Deliver = Callable[[Sequence[Any]], None]

_GATHER_S = 1.0  # one transaction serves all reports of this time


class Outbox:
    """Delivers messages on a background thread: those to one destination together and in order.

    A failure on the thread is raised on the caller's thread by the next `put`, `flush` or `close`. The messages that
    were delivered together with the failed one are lost; later messages are still delivered.
    """

    def __init__(self) -> None:
        self._queue: list[tuple[Deliver, Any]] = []
        self._changed = threading.Condition()
        self._failures: list[BaseException] = []
        self._due = math.inf  # when to deliver what is in the queue
        self._accepted = self._settled = 0  # counts of messages; a failed one is settled too
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="resolute-outbox", daemon=True)
        self._thread.start()
        # The thread must not keep the program alive, nor end before it has delivered everything.
        self._process = os.getpid()
        atexit.register(self._close_at_exit)

    def put(self, deliver: Deliver, message: Any, *, within_s: float = _GATHER_S) -> None:
        """Hand over a message and return at once; if an earlier failure is raised, the message is not accepted.

        Messages gather until one of them has waited for its `within_s`; then all are delivered.
        """
        with self._changed:
            self._raise_failure()
            if self._closed:
                raise errors.InternalException(
                    "A report came after the run was closed; report within the `with ...init() as context:` block."
                )
            self._queue.append((deliver, message))
            self._accepted += 1
            self._deliver_by(time.monotonic() + within_s)

    def put_again(self, deliver: Deliver, *, within_s: float) -> None:
        """Call `deliver` with no message some time later; those that it delivers to use it. Not while this closes."""
        with self._changed:
            if not self._closed:
                self._queue.append((deliver, None))
                self._accepted += 1
                self._deliver_by(time.monotonic() + within_s)

    def hurry(self) -> None:
        """Deliver everything handed over so far without waiting for more; returns before that is done."""
        with self._changed:
            if self._queue:
                self._deliver_by(-math.inf)

    def _deliver_by(self, due: float) -> None:
        if due < self._due:
            self._due = due
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything handed over so far is delivered."""
        with self._changed:
            self.hurry()
            awaited = self._accepted
            self._changed.wait_for(lambda: self._settled >= awaited)
            self._raise_failure()

    def close(self) -> None:
        """Deliver what is left and end the thread. Calling it twice is fine."""
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
                first.add_note(f"It was followed by {type(other).__name__}: {other}")
            raise first

    def _work(self) -> None:
        while batch := self._next_batch():
            by_destination: dict[Deliver, list[Any]] = {}
            for deliver, message in batch:
                by_destination.setdefault(deliver, []).append(message)
            failures: list[BaseException] = []
            for deliver, messages in by_destination.items():
                try:
                    deliver(messages)
                except BaseException as failure:
                    failures.append(failure)
            with self._changed:
                self._failures += failures
                self._settled += len(batch)
                self._changed.notify_all()

    def _next_batch(self) -> list[tuple[Deliver, Any]]:
        with self._changed:
            while not self._closed and (left := self._due - time.monotonic()) > 0:
                self._changed.wait(None if left == math.inf else left)
            batch, self._queue, self._due = self._queue, [], math.inf
            return batch
