"""Values that several requests share."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

_MAX_ENTRIES = 8
_SLOW_S = 0.2
_REST_FACTOR = 5
"""A value that took t seconds to read, more than `_SLOW_S`, is valid for this many times t."""


class _Entry(Generic[T]):
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.began = -1.0
        self.valid_until = -1.0
        self.version: object = None
        self.value: T | None = None


class Cache(Generic[T]):
    """The latest value of each of a few ids. A call for one that is being read waits for it."""

    def __init__(self, read: Callable[[int], T]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[int, _Entry[T]] = collections.OrderedDict()

    def get(self, id: int, version: Hashable) -> T:
        """Return the value that was read for this version, or by a read that began after this call."""
        asked = time.monotonic()
        entry = self._entry(id)
        with entry.lock:
            is_new = entry.version == version or entry.began >= asked or asked < entry.valid_until
            if entry.value is None or not is_new:
                entry.began, entry.version = time.monotonic(), version
                entry.value = None  # dropped if it can no longer be read
                entry.value = self._read(id)
                took = time.monotonic() - entry.began
                entry.valid_until = time.monotonic() + (_REST_FACTOR * took if took > _SLOW_S else 0.0)
            return entry.value

    def _entry(self, id: int) -> _Entry[T]:
        with self._lock:
            entry = self._entries.setdefault(id, _Entry())
            self._entries.move_to_end(id)
            while len(self._entries) > _MAX_ENTRIES:
                self._entries.popitem(last=False)
            return entry
