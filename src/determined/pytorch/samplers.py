"""Samplers that compose: repeat, shard, skip and shuffle the elements of another sampler.

Every kind comes twice: over indices (`RepeatSampler`), to be used before `torch.utils.data.BatchSampler`, and over
batches (`RepeatBatchSampler`), to be used after it. The sampler inside is the attribute `sampler`.

    >>> from torch.utils.data import BatchSampler, SequentialSampler
    >>> batches = BatchSampler(SequentialSampler(range(6)), batch_size=2, drop_last=False)
    >>> list(DistributedBatchSampler(batches, num_workers=2, rank=0))
    [[0, 1], [4, 5]]
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import Sampler

__all__ = [
    "DistributedBatchSampler",
    "DistributedSampler",
    "RepeatBatchSampler",
    "RepeatSampler",
    "ReproducibleShuffleBatchSampler",
    "ReproducibleShuffleSampler",
    "SkipBatchSampler",
    "SkipSampler",
    "adapt_batch_sampler",
]

T = TypeVar("T")


class _OverSampler(Sampler[T]):
    """A sampler over another one, with the length of that one."""

    def __init__(self, sampler: Iterable[T]) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        if not isinstance(self.sampler, Sized):
            raise TypeError(
                f"len({type(self).__name__}) is the length of the inner sampler, and {self.sampler!r} has none; "
                "give that sampler a __len__ method."
            )
        return len(self.sampler)


class RepeatSampler(_OverSampler[T]):
    """The elements of `sampler`, pass after pass, endlessly.

    `len()` is the length of one pass. Every pass iterates `sampler` again, so one that shuffles gives each pass
    another order. A pass that yields nothing raises `ValueError`.

        >>> list(itertools.islice(RepeatSampler(range(3)), 7))
        [0, 1, 2, 0, 1, 2, 0]
    """

    def __iter__(self) -> Iterator[T]:
        while True:
            elements = iter(self.sampler)
            for first in elements:
                yield first
                break
            else:
                raise ValueError(
                    f"{type(self).__name__} got nothing from a pass over {self.sampler!r} and would repeat it forever; "
                    "pass a sampler that yields something on every pass (a dataset that is not empty, fewer ranks, a "
                    "list rather than a generator)."
                )
            yield from elements


class RepeatBatchSampler(RepeatSampler[list[T]]):
    """The batches of `batch_sampler`, pass after pass, endlessly; see `RepeatSampler`.

    >>> list(itertools.islice(RepeatBatchSampler([[0, 1], [2]]), 3))
    [[0, 1], [2], [0, 1]]
    """

    def __init__(self, batch_sampler: Iterable[list[T]]) -> None:
        super().__init__(batch_sampler)


class DistributedSampler(_OverSampler[T]):
    """The elements of `sampler` that belong to `rank`: element i belongs to rank i modulo `num_workers`.

    Together the ranks yield every element once. `len()` is the number of elements that this rank gets from
    one pass, so it may differ by one between ranks.

        >>> list(DistributedSampler(range(5), num_workers=2, rank=1))
        [1, 3]
    """

    def __init__(self, sampler: Iterable[T], num_workers: int, rank: int) -> None:
        super().__init__(sampler)
        self.num_workers, self.rank = _shard(type(self).__name__, "num_workers", num_workers, rank)

    def __len__(self) -> int:
        return len(range(self.rank, super().__len__(), self.num_workers))

    def __iter__(self) -> Iterator[T]:
        return itertools.islice(self.sampler, self.rank, None, self.num_workers)


class DistributedBatchSampler(DistributedSampler[list[T]]):
    """The batches of `batch_sampler` that belong to `rank`; see `DistributedSampler`.

    >>> list(DistributedBatchSampler([[0, 1], [2, 3], [4]], num_workers=2, rank=0))
    [[0, 1], [4]]
    """

    def __init__(self, batch_sampler: Iterable[list[T]], num_workers: int, rank: int) -> None:
        super().__init__(batch_sampler, num_workers, rank)


class SkipSampler(_OverSampler[T]):
    """The elements of `sampler` without the first `skip` ones.

    Meant to be outermost, over an endless `RepeatSampler`, to continue where an earlier run stopped. Every
    iteration skips. `len()` is still the length of `sampler`, an epoch.

        >>> list(SkipSampler(range(5), skip=3))
        [3, 4]
        >>> len(SkipSampler(range(5), skip=3))
        5
    """

    def __init__(self, sampler: Iterable[T], skip: int) -> None:
        super().__init__(sampler)
        self.skip = _skip(type(self).__name__, skip)

    def __iter__(self) -> Iterator[T]:
        return itertools.islice(self.sampler, self.skip, None)


class SkipBatchSampler(SkipSampler[list[T]]):
    """The batches of `batch_sampler` without the first `skip` ones; see `SkipSampler`.

    >>> list(SkipBatchSampler([[0, 1], [2, 3], [4]], skip=2))
    [[4]]
    """

    def __init__(self, batch_sampler: Iterable[list[T]], skip: int) -> None:
        super().__init__(batch_sampler, skip)


class ReproducibleShuffleSampler(_OverSampler[T]):
    """The elements of `sampler` in an order that depends on `seed` and the epoch alone.

    The first iteration is epoch 0, the next one epoch 1. Orders come from one
    `numpy.random.RandomState(seed)`: epoch k is its k-th shuffle. `set_epoch` goes to any epoch, provided that
    `sampler` yields the same number of elements in every epoch.

        >>> shuffled = ReproducibleShuffleSampler(range(5), seed=7)
        >>> list(shuffled), list(shuffled)
        ([0, 3, 2, 1, 4], [2, 1, 0, 4, 3])
        >>> shuffled.set_epoch(1)
        >>> list(shuffled)
        [2, 1, 0, 4, 3]
    """

    def __init__(self, sampler: Iterable[T], seed: int) -> None:
        super().__init__(sampler)
        remedy = "pass context.get_trial_seed() or a number such as 42."
        self.seed = _integer(type(self).__name__, "seed", seed, 0, remedy)
        if self.seed >= 2**32:
            raise ValueError(f"{type(self).__name__}(seed={seed}): seed must be at most 2**32 - 1; {remedy}")
        self._epoch = 0
        self._rewind()

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration yield `epoch`, also in the next inner sampler that has `set_epoch`.

        The next iteration shuffles once for every epoch left out; to go back, it starts from the seed.
        """
        remedy = "pass the number of epochs trained so far."
        self._epoch = _integer(type(self).__name__ + ".set_epoch", "epoch", epoch, 0, remedy)
        if self._epoch < self._shuffles:
            self._rewind()
        inner: Any = self.sampler
        while inner is not None and not callable(getattr(inner, "set_epoch", None)):
            inner = getattr(inner, "sampler", None)
        if inner is not None:
            inner.set_epoch(self._epoch)

    def __iter__(self) -> Iterator[T]:
        # A generator, so that only an iteration that starts counts: torch's loaders with worker
        # processes call iter() twice for every pass and drop the first result.
        elements = list(self.sampler)
        while self._shuffles < self._epoch:
            # What a shuffle draws depends on the number of elements alone; bytes are moved fastest.
            self._shuffle(np.empty(len(elements), np.int8))
        # Positions in an array take the order that the list of elements would, many times faster.
        order = np.arange(len(elements))
        self._shuffle(order)
        self._epoch += 1
        yield from map(elements.__getitem__, order.tolist())

    def _rewind(self) -> None:
        self._generator = np.random.RandomState(self.seed)
        self._shuffles = 0

    def _shuffle(self, array: np.ndarray[Any, Any]) -> None:
        self._generator.shuffle(array)
        self._shuffles += 1


class ReproducibleShuffleBatchSampler(ReproducibleShuffleSampler[list[T]]):
    """The batches of `batch_sampler` in an order of `seed` and epoch; see `ReproducibleShuffleSampler`.

    The batches themselves stay as they are.

        >>> list(ReproducibleShuffleBatchSampler([[0, 1], [2, 3], [4]], seed=1))
        [[0, 1], [4], [2, 3]]
    """

    def __init__(self, batch_sampler: Iterable[list[T]], seed: int) -> None:
        super().__init__(batch_sampler, seed)


def adapt_batch_sampler(
    batch_sampler: Iterable[list[T]], repeat: bool = False, skip: int = 0, num_replicas: int = 1, rank: int = 0
) -> Iterable[list[T]]:
    """Return the batches that one rank trains on: repeated, then sharded, then skipped.

    `skip` counts batches of this rank. The defaults return `batch_sampler` itself.

        >>> mine = adapt_batch_sampler([[0], [1], [2]], repeat=True, skip=1, num_replicas=2, rank=0)
        >>> list(itertools.islice(mine, 3))
        [[2], [1], [0]]
    """
    skip, num_replicas, rank = check_position("adapt_batch_sampler", skip, num_replicas, rank)
    if repeat:
        batch_sampler = RepeatBatchSampler(batch_sampler)
    if num_replicas > 1:
        batch_sampler = DistributedBatchSampler(batch_sampler, num_replicas, rank)
    if skip > 0:
        batch_sampler = SkipBatchSampler(batch_sampler, skip)
    return batch_sampler


def check_position(where: str, skip: object, num_replicas: object, rank: object) -> tuple[int, int, int]:
    """Return the arguments of the function `where` as integers; raise `ValueError` for what is not a position."""
    return _skip(where, skip), *_shard(where, "num_replicas", num_replicas, rank)


def _shard(where: str, ranks_name: str, ranks: object, rank: object) -> tuple[int, int]:
    size = _integer(where, ranks_name, ranks, 1, "pass context.distributed.get_size(), or 1 for one process.")
    remedy = f"ranks count from 0, pass context.distributed.get_rank() with {ranks_name}=get_size()."
    rank = _integer(where, "rank", rank, 0, remedy)
    if rank >= size:
        raise ValueError(f"{where}({ranks_name}={size}, rank={rank}): rank must be below {ranks_name}; {remedy}")
    return size, rank


def _skip(where: str, skip: object) -> int:
    return _integer(where, "skip", skip, 0, "pass the number of elements to leave out, or 0 for none.")


def _integer(where: str, name: str, value: object, lowest: int, remedy: str) -> int:
    if not isinstance(value, bool) and isinstance(value, numbers.Integral) and int(value) >= lowest:
        return int(value)
    raise ValueError(f"{where}({name}={value!r}): {name} must be an int >= {lowest}; {remedy}")
