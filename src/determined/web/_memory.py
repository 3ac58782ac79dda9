"""Readings that several requests share."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

_MOST = 8
_SLOW = 0.2
_RESTING = 5
"""How much longer than it took a slow reading is good in any case, so that such do not follow each other."""


class _Entry(Generic[T]):
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.began = -1.0
        self.good_until = -1.0
        self.at: object = None
        self.value: T | None = None


class Memory(Generic[T]):
    """The latest reading of each of a few things. Whoever asks for one that is being read waits for it."""

    def __init__(self, read: Callable[[int], T]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[int, _Entry[T]] = collections.OrderedDict()

    def get(self, id: int, moment: Hashable) -> T:
        """Return what was read at this moment, or by a reading that began after this call."""
        asked = time.monotonic()
        entry = self._entry(id)
        with entry.lock:
            is_new = entry.at == moment or entry.began >= asked or asked < entry.good_until
            if entry.value is None or not is_new:
                entry.began, entry.at = time.monotonic(), moment
                entry.value = None  # not kept if it cannot be read any more
                entry.value = self._read(id)
                took = time.monotonic() - entry.began
                entry.good_until = time.monotonic() + (_RESTING * took if took > _SLOW else 0.0)
            return entry.value

    def _entry(self, id: int) -> _Entry[T]:
        with self._lock:
            entry = self._entries.setdefault(id, _Entry())
            self._entries.move_to_end(id)
            while len(self._entries) > _MOST:
                self._entries.popitem(last=False)
            return entry
