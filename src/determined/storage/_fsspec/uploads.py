"""Uploads in the background: training goes on meanwhile, also while the store is away."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable

from determined import errors
from determined.storage._fsspec.objects import will_stay

logger = logging.getLogger("determined.storage")

FIRST_DELAY_S = 0.2
MAX_DELAY_S = 30.0
MAX_OUTAGE_S = 3600.0
"""How long the end of a run waits for a store that is away; what is still staged goes up later."""
MAX_REFUSAL_S = 30.0
"""The same for an error that does not pass by itself, such as missing permission."""
_QUIET_S = 2.0  # waiting that is not worth a line
_REPORT_EVERY_S = 10.0


@dataclasses.dataclass(eq=False)
class Upload:
    """One checkpoint on its way to the store."""

    checkpoint_id: str
    lock: contextlib.ExitStack
    """Held until the checkpoint is in the store."""
    size: int = 0
    sent: int = 0
    actions: list[Callable[[], None]] = dataclasses.field(default_factory=list)

    def add_sent(self, count: int) -> None:
        """Count bytes that were sent."""
        self.sent += count

    def take_actions(self) -> list[Callable[[], None]]:
        """Return what is to be called when the checkpoint is in the store; none is returned twice."""
        taken, self.actions = self.actions, []
        return taken


class Uploads:
    """Sends checkpoints to a store one after another, on a thread of this process.

    An upload that fails is repeated after a delay, which grows, until it succeeds or the process ends.
    """

    def __init__(
        self,
        location: str,
        send: Callable[[Upload], None],
        finish: Callable[[str], None],
        explain: Callable[[BaseException], str],
    ) -> None:
        """`send` uploads what is not in the store yet, and returns when the checkpoint is complete there.

        `finish` is called with its id after all that waited for it.
        """
        self._location = location
        self._send = send
        self._finish = finish
        self._explain = explain
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._queue: list[Upload] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failing_since: float | None = None
        self._failure: BaseException | None = None
        self._raised: list[Exception] = []

    def put(self, checkpoint_id: str, size: int, lock: contextlib.ExitStack) -> None:
        """Begin to upload a checkpoint of this size, whose lock is held; returns at once."""
        self._leave_parent()
        with self._changed:
            self._queue.append(Upload(checkpoint_id, lock, size))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="resolute-uploads", daemon=True)
                self._thread.start()

    def when_done(self, checkpoint_id: str, action: Callable[[], None]) -> None:
        """Call `action` when a checkpoint is in the store: on the thread, or at once if it is not on its way."""
        self._leave_parent()
        with self._changed:
            for upload in self._queue:
                if upload.checkpoint_id == checkpoint_id:
                    upload.actions.append(action)
                    return
        action()

    def wait(self, checkpoint_id: str | None = None) -> None:
        """Wait until one checkpoint, or all, are in the store, and log the progress.

        Raises `StorageException` if the store is away for too long, and what an action raised.
        """
        self._leave_parent()
        begin = reported = time.monotonic()
        with self._changed:
            while left := [one for one in self._queue if checkpoint_id in (None, one.checkpoint_id)]:
                self._raise_if_away(begin, len(left))
                now = time.monotonic()
                if now - begin >= _QUIET_S and (reported == begin or now - reported >= _REPORT_EVERY_S):
                    reported = now
                    logger.warning(*self._progress(left))
                self._changed.wait(0.5)
            if self._raised:
                raise self._raised.pop(0)

    def _progress(self, left: list[Upload]) -> tuple[object, ...]:
        size, sent = sum(one.size for one in left), sum(min(one.sent, one.size) for one in left)
        text = "Waiting for uploads to %s: %.1f of %.1f MB are sent. Checkpoints left: %d."
        return text, self._location, sent / 1e6, size / 1e6, len(left)

    def _raise_if_away(self, begin: float, count: int) -> None:
        if self._failing_since is None or self._failure is None:
            return
        limit = MAX_REFUSAL_S if will_stay(self._failure) else MAX_OUTAGE_S
        if time.monotonic() - max(begin, self._failing_since) > limit:
            raise errors.StorageException(
                f"Checkpoints that are not in {self._location} yet: {count}. {self._explain(self._failure)} They are "
                "safe in the home folder: the next run with this checkpoint_storage uploads them, and so does `det gc`."
            )

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                upload = self._queue[0]
            is_there = self._deliver(upload)
            while not self._is_finished(upload, is_there):
                for action in upload.take_actions():
                    try:
                        action()
                    except Exception as error:  # raised by `wait`, on the thread of the program
                        self._raised.append(error)

    def _is_finished(self, upload: Upload, is_there: bool) -> bool:
        with self._changed:
            if is_there and upload.actions:
                return False
            with contextlib.suppress(OSError), upload.lock:
                if is_there:
                    self._finish(upload.checkpoint_id)
            self._queue.remove(upload)
            self._changed.notify_all()
            return True

    def _deliver(self, upload: Upload) -> bool:
        """Return whether the checkpoint is in the store, after as many attempts as that takes."""
        delay = FIRST_DELAY_S
        while True:
            upload.sent = 0
            try:
                self._send(upload)
                break
            except errors.DeterminedException as error:  # another attempt would not help
                self._raised.append(error)
                return False
            except Exception as error:  # each client library raises its own types
                self._note_failure(upload, error)
            time.sleep(delay)
            delay = min(2 * delay, MAX_DELAY_S)
        self._note_success()
        return True

    def _note_failure(self, upload: Upload, error: Exception) -> None:
        with self._changed:
            self._failure = error
            if self._failing_since is not None:
                return
            self._failing_since = time.monotonic()
        logger.warning(
            "Checkpoint %s cannot be uploaded to %s now: %s It is safe in the home folder. The run continues, and the "
            "upload is repeated until it succeeds.",
            upload.checkpoint_id,
            self._location,
            self._explain(error),
        )

    def _note_success(self) -> None:
        with self._changed:
            since, self._failing_since, self._failure = self._failing_since, None, None
        if since is not None:
            seconds = time.monotonic() - since
            logger.warning("Uploads to %s work again, after %.0f s.", self._location, seconds)

    def _leave_parent(self) -> None:
        """Forget, in a forked process, the uploads of its parent, whose thread is not here."""
        if os.getpid() != self._process:
            self._reset()
