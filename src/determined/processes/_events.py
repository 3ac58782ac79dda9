"""Wait for file descriptors and for points in time."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from typing import Protocol

Action = Callable[[], object]


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


class EventLoop:
    """Calls actions when something can be read, or when their time has come."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._times: dict[Action, float] = {}

    def watch(self, source: int | _HasFileno, action: Action) -> None:
        """Call `action` whenever there is something to read."""
        self._selector.register(source, selectors.EVENT_READ, action)

    def unwatch(self, source: int | _HasFileno) -> None:
        """Stop watching a source, before it is closed."""
        self._selector.unregister(source)

    def after(self, seconds: float, action: Action) -> None:
        """Call `action` once in `seconds`, or earlier if that was planned already."""
        at = time.monotonic() + seconds
        self._times[action] = min(at, self._times.get(action, at))

    def cancel(self, *actions: Action) -> None:
        """Call off planned actions."""
        for action in actions:
            self._times.pop(action, None)

    def run_once(self, timeout_s: float | None = None) -> None:
        """Wait for something to do, at most `timeout_s` seconds, and do it."""
        waits = [max(0.0, at - time.monotonic()) for at in self._times.values()]
        for key, _ in self._selector.select(min([*waits, *([] if timeout_s is None else [timeout_s])], default=None)):
            key.data()
        for action in [action for action, at in self._times.items() if at <= time.monotonic()]:
            if self._times.pop(action, None) is not None:  # none of those before has called it off
                action()

    def close(self) -> None:
        self._selector.close()
