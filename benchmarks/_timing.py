"""How the benchmarks time a turn of training."""

from __future__ import annotations

import time
from typing import Any

import torch

PROFILED = 30


class Watch:
    """Seconds a batch, from the first quarter of a turn to its end, with a GPU at rest at both if there is one."""

    def __init__(self, batches: int) -> None:
        self._first, self._last = batches // 4, batches - 1
        self._waits = torch.cuda.is_available()
        self._began = 0.0
        self.seconds = 0.0

    def tick(self, batch_idx: int) -> None:
        if self._waits and batch_idx in (self._first, self._last):
            torch.cuda.synchronize()
        if batch_idx == self._first:
            self._began = time.perf_counter()
        elif batch_idx == self._last:
            self.seconds = (time.perf_counter() - self._began) / (self._last - self._first)


class TimedBatches:
    """Hands on batches, and times a turn by when it is asked for them; a profiler sees the last of them."""

    def __init__(self, batches: int, profiler: torch.profiler.profile | None = None) -> None:
        self.watch = Watch(batches)
        self._count = 0
        self._changes = {} if profiler is None else {batches - PROFILED: profiler.start, batches - 1: profiler.stop}

    def collate(self, batch: Any) -> Any:
        self.watch.tick(self._count)
        self._changes.get(self._count, lambda: None)()
        self._count += 1
        return batch
