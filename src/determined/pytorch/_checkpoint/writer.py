"""One write at a time, beside the training."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWriter:
    """Runs writes on a thread, one after another; what goes wrong there is raised by `wait` or `finished`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="resolute-writer")
        self._running: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Begin a write. The one before must have been waited for."""
        self._running = self._pool.submit(write)

    def finished(self) -> bool:
        """Say whether no write is under way."""
        if self._running is not None and self._running.done():
            self.wait()
        return self._running is None

    def wait(self) -> None:
        """Wait for the write that is under way, if one is."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait for what is under way and end the thread; says nothing of what went wrong."""
        self._running = None
        self._pool.shutdown(wait=True)
