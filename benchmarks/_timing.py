"""How the benchmarks time a turn of training."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

PROFILED = 30


def time_at_rest() -> float:
    """Return the time when the GPU, if there is one, has done all that was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Watch:
    """Seconds a batch, from the first quarter of a turn to its end, with a GPU at rest at both if there is one."""

    def __init__(self, batches: int) -> None:
        self._first, self._last = batches // 4, batches - 1
        self._began = 0.0
        self.seconds = 0.0

    def tick(self, batch_idx: int) -> None:
        if batch_idx == self._first:
            self._began = time_at_rest()
        elif batch_idx == self._last:
            self.seconds = (time_at_rest() - self._began) / (self._last - self._first)


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


class Alternation:
    """Hands on batches to one loop, and lets others train as many after each block of them; times all.

    Blocks end halfway between two reports of any loop, so that what follows a report falls into the same block.
    """

    def __init__(self, block: int, others: Sequence[Iterator[None]]) -> None:
        self._block = block
        self._others = others
        self._count = 0
        self._began: float | None = None
        self.blocks: list[list[float]] = []
        """Seconds a batch: of the loop that takes the batches, and of each of the others."""

    def collate(self, batch: Any) -> Any:
        if self._count % self._block == self._block // 2:
            self._hand_over()
        self._count += 1
        return batch

    def _hand_over(self) -> None:
        is_first = self._began is None
        times = [time_at_rest()]
        for other in self._others:
            for _ in range(self._block // 2 if is_first else self._block):
                next(other)
            times.append(time_at_rest())
        if self._began is not None:
            self.blocks.append(
                [(end - begin) / self._block for begin, end in itertools.pairwise([self._began, *times])]
            )
        self._began = times[-1]
