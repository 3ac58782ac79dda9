"""The order of training data: a pure function of seed and epoch, entered at any position."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import BatchSampler, Sampler, SequentialSampler

from determined.pytorch import _rng

logger = logging.getLogger("determined.pytorch")


class BatchKey(list[Any]):
    """The indices of a batch, with a key that tells this batch from all others of the training."""

    def __init__(self, indices: Iterable[Any], key: tuple[int, int]) -> None:
        super().__init__(indices)
        self.key = key


class SizedIterable(Sized, Iterable[Any], Protocol):
    """What a batch sampler with a length is."""


class Order(Protocol):
    """The batches of an epoch, as a function of its number."""

    def __len__(self) -> int: ...

    def enter(self, epoch: int) -> None:
        """Make ready to begin with this epoch, of which the earlier ones were run by another process."""
        ...

    def batches(self, epoch: int, start: int, step: int) -> Iterator[list[Any]]:
        """Yield every `step`-th batch of an epoch from batch `start` on."""
        ...


class ComputedOrder:
    """Plain or shuffled order over a data set: any position is computed, none is replayed."""

    def __init__(self, size: int, batch_size: int, drop_last: bool, seed: int | None) -> None:
        self._size = size
        self._batch_size = batch_size
        self._length = size // batch_size if drop_last else -(-size // batch_size)
        self._seed = seed

    def __len__(self) -> int:
        return self._length

    def enter(self, epoch: int) -> None:
        """Do nothing: epochs do not depend on each other."""

    def batches(self, epoch: int, start: int, step: int) -> Iterator[list[Any]]:
        """Yield every `step`-th batch of an epoch from batch `start` on."""
        if self._seed is None:
            indices = list(range(self._size))
        else:
            shuffle = np.random.Generator(np.random.PCG64(_rng.derive(self._seed, epoch)))
            indices = shuffle.permutation(self._size).tolist()
        size = self._batch_size
        for number in range(start, self._length, step):
            yield indices[number * size : (number + 1) * size]


class SamplerOrder:
    """The order that a sampler of the user's gives, made a function of the epoch by seeding its randomness."""

    def __init__(self, batch_sampler: SizedIterable, seed: int) -> None:
        self._batch_sampler = batch_sampler
        self._seed = seed
        self._length = len(batch_sampler)

    def __len__(self) -> int:
        return self._length

    def enter(self, epoch: int) -> None:
        """Draw the indices of all epochs before, where what the sampler remembers of them may decide its order."""
        remembering = [part for part in _parts(self._batch_sampler) if not _knows_epoch(part)]
        if not (epoch and remembering):
            return
        logger.warning(
            "%s has neither set_epoch() nor a torch generator, so the indices of the %d epochs before are drawn again "
            "to find its order. Give it a method set_epoch(epoch) that decides the order to go on at once.",
            type(remembering[0]).__name__,
            epoch,
        )
        for earlier in range(epoch):
            self._drawn(earlier)

    def batches(self, epoch: int, start: int, step: int) -> Iterator[list[Any]]:
        """Yield every `step`-th batch of an epoch from batch `start` on."""
        yield from self._drawn(epoch)[start::step]

    def _drawn(self, epoch: int) -> list[list[Any]]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_rng.seeded(_rng.derive(self._seed, epoch)))
            for part in _parts(self._batch_sampler):
                stack.enter_context(in_epoch(part, epoch))
            # All at once: later draws of the sampler must not mix with those of the training.
            return list(itertools.islice(self._batch_sampler, self._length))


class OrderedBatches(Sampler[list[Any]]):
    """A batch sampler over an order: repeated, sharded by batch, and begun after `skip` of its batches.

    With `keyed` the batches carry the key by which loader workers seed themselves. Without `repeat` it gives
    one epoch, that of number `epoch`.
    """

    def __init__(
        self,
        order: Order,
        *,
        repeat: bool,
        skip: int,
        num_replicas: int,
        rank: int,
        epoch: int = 0,
        keyed: bool = True,
    ) -> None:
        self._order = order
        self._keyed = keyed
        self._epoch = epoch
        self._repeat = repeat
        self._first = rank + skip * num_replicas
        self._stride = num_replicas
        self._per_pass = (len(order) - rank + num_replicas - 1) // num_replicas

    def __len__(self) -> int:
        return self._per_pass

    def __iter__(self) -> Iterator[list[Any]]:
        length = len(self._order)
        epoch, start = divmod(self._first, length) if self._repeat else (self._epoch, self._first)
        if self._repeat:
            self._order.enter(epoch)
        while True:
            batches = self._order.batches(epoch, start, self._stride)
            if self._keyed:
                for number, indices in enumerate(batches):
                    yield BatchKey(indices, (epoch, start + number * self._stride))
            else:
                yield from batches
            if not self._repeat:
                return
            # Where the stride lands in the next epoch.
            start = (start - length) % self._stride
            epoch += 1


def _parts(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and all samplers that it is made of."""
    while sampler is not None and not isinstance(sampler, SequentialSampler):
        yield sampler
        sampler = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)


def _knows_epoch(sampler: Any) -> bool:
    """Say whether what a sampler yields depends on the epoch and on generators that `in_epoch` sets, alone."""
    if callable(getattr(sampler, "set_epoch", None)):
        return True
    # Not by isinstance: a subclass of the user's may remember more.
    known = type(sampler).__module__.partition(".")[0] in ("builtins", "numpy", "torch", "determined")
    return known or isinstance(getattr(sampler, "generator", None), torch.Generator)


@contextlib.contextmanager
def in_epoch(sampler: Any, epoch: int) -> Iterator[None]:
    """Make the own randomness of a sampler or loader that of an epoch; its generator is left as it was."""
    generator = getattr(sampler, "generator", None)
    if not isinstance(generator, torch.Generator):
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        yield
        return
    before = generator.get_state()
    generator.manual_seed(_rng.derive(generator.initial_seed(), epoch))
    try:
        yield
    finally:
        generator.set_state(before)


def order_of(
    *,
    dataset: Any,
    batch_size: int,
    shuffle: bool,
    drop_last: bool,
    sampler: Any,
    batch_sampler: Any,
    seed: int,
) -> Order:
    """Return the order that the arguments of a data loader ask for."""
    if batch_sampler is not None:
        return SamplerOrder(batch_sampler, seed)
    if sampler is not None:
        return SamplerOrder(BatchSampler(sampler, batch_size, drop_last), seed)
    return ComputedOrder(len(dataset), batch_size, drop_last, seed if shuffle else None)
