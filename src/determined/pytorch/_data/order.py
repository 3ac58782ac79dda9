"""The order of training data: a pure function of seed and epoch, entered at any position."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Sampler, SequentialSampler

from determined.pytorch import samplers
from determined.pytorch._data import rng

logger = logging.getLogger("determined.pytorch")


class BatchKey(list[Any]):
    """The indices of a batch, with a key that tells this batch from all others of the training."""

    def __init__(self, indices: Iterable[Any], key: tuple[int, ...]) -> None:
        super().__init__(indices)
        self.key = key


class SizedIterable(Sized, Iterable[Any], Protocol):
    """What a batch sampler with a length is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """Where a number of ranks begins to train on the data: after some items of an epoch."""

    epoch: int = 0
    items: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Grouping:
    """How many items an epoch has, and how they are grouped to batches.

    Items are samples; of a batch sampler of the user's, whose batches stay as they are, they are batches.
    """

    items: int
    group: int
    drop_last: bool

    def batches(self, used: int = 0) -> int:
        """Return the batches of an epoch of which so many items were used before."""
        left = max(self.items - used, 0)
        return left // self.group if self.drop_last else -(-left // self.group)

    def after(self, start: Start, batches: int) -> Start:
        """Return the place that is so many batches after another one."""
        if (whole := self.batches()) == 0:
            return start
        first = self.batches(start.items)
        if batches < first:
            return Start(start.epoch, start.items + batches * self.group)
        epochs, rest = divmod(batches - first, whole)
        return Start(start.epoch + 1 + epochs, rest * self.group)


class Order(Protocol):
    """The batches of an epoch, as a function of its number."""

    grouping: Grouping

    def enter(self, epoch: int) -> None:
        """Make ready to begin with this epoch, of which the earlier ones were run by another process."""
        ...

    def batches(self, epoch: int, used: int, start: int, step: int) -> Iterator[list[Any]]:
        """Yield every `step`-th batch from batch `start` on, of an epoch of which so many items were used before."""
        ...


def _sliced(indices: list[Any], grouping: Grouping, used: int, start: int, step: int) -> Iterator[list[Any]]:
    size = grouping.group
    for number in range(start, grouping.batches(used), step):
        begin = used + number * size
        yield indices[begin : begin + size]


class ComputedOrder:
    """Plain or shuffled order over a data set: any position is computed, none is replayed."""

    def __init__(self, grouping: Grouping, seed: int | None) -> None:
        self.grouping = grouping
        self._seed = seed

    def enter(self, epoch: int) -> None:
        """Do nothing: epochs do not depend on each other."""

    def batches(self, epoch: int, used: int, start: int, step: int) -> Iterator[list[Any]]:
        """Yield every `step`-th batch from batch `start` on, of an epoch of which so many items were used before."""
        if self._seed is None:
            indices = list(range(self.grouping.items))
        else:
            shuffle = np.random.Generator(np.random.PCG64(rng.derive(self._seed, epoch)))
            indices = shuffle.permutation(self.grouping.items).tolist()
        return _sliced(indices, self.grouping, used, start, step)


class SamplerOrder:
    """The order that a sampler of the user's gives, made a function of the epoch by seeding its randomness."""

    def __init__(self, sampler: SizedIterable, grouping: Grouping, seed: int, *, batched: bool, repeats: bool) -> None:
        self._sampler = sampler
        self._seed = seed
        self._batched = batched
        self._repeats = repeats
        self._warned = False
        self.grouping = grouping

    def enter(self, epoch: int) -> None:
        """Draw the indices of all epochs before, where what the sampler remembers of them may decide its order."""
        remembering = [part for part in _parts(self._sampler) if not _knows_epoch(part)]
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

    def batches(self, epoch: int, used: int, start: int, step: int) -> Iterator[list[Any]]:
        """Yield every `step`-th batch from batch `start` on, of an epoch of which so many items were used before."""
        drawn = self._drawn(epoch)
        return iter(drawn[used + start :: step]) if self._batched else _sliced(drawn, self.grouping, used, start, step)

    def _drawn(self, epoch: int) -> list[Any]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(rng.seeded(rng.derive(self._seed, epoch)))
            for part in _parts(self._sampler):
                stack.enter_context(in_epoch(part, epoch))
            # All at once: later draws of the sampler must not mix with those of the training.
            drawn = list(itertools.islice(self._sampler, self.grouping.items + 1))
        if len(drawn) != self.grouping.items:
            self._check_length(len(drawn))
        return drawn[: self.grouping.items]

    def _check_length(self, drawn: int) -> None:
        """Refuse a sampler of training data that yields less than its length; warn once of one that yields more."""
        length, what = self.grouping.items, "batches" if self._batched else "indices"
        if drawn < length and self._repeats:
            raise ValueError(
                f"len({type(self._sampler).__name__}) is {length}, but an epoch of it has {drawn} {what}. Epochs, and "
                "the place at which a resumed run goes on, are computed from the length: make __len__ return the "
                f"number of {what} that __iter__ yields, or remove __len__ and use pytorch.Batch for lengths and "
                "periods."
            )
        if drawn > length and not (self._warned or is_endless(self._sampler)):
            self._warned = True
            logger.warning(
                "len(%s) is %d, but it yields more %s: an epoch ends at the length, and what follows is left out of "
                "it. Make __len__ return the number of %s that __iter__ yields.",
                type(self._sampler).__name__,
                length,
                what,
                what,
            )


class OrderedBatches(Sampler[list[Any]]):
    """A batch sampler over an order: repeated, sharded by batch, and begun after `skip` of its batches.

    With `keyed` the batches carry the key by which loader workers seed themselves. Without `repeat` it gives
    one epoch, that of `start`. With `share` each batch is cut to these places, for ranks of unequal batch sizes.
    """

    def __init__(
        self,
        order: Order,
        *,
        repeat: bool,
        skip: int,
        num_replicas: int,
        rank: int,
        start: Start,
        share: slice | None = None,
        keyed: bool = True,
    ) -> None:
        self._order = order
        self._keyed = keyed
        self._start = start
        self._repeat = repeat
        self._share = share
        self._first = rank + skip * num_replicas
        self._stride = num_replicas
        self._per_pass = (order.grouping.batches() - rank + num_replicas - 1) // num_replicas

    def __len__(self) -> int:
        return self._per_pass

    def __iter__(self) -> Iterator[list[Any]]:
        batches = self._keyed_batches()
        if self._share is None:
            return batches
        cut = (_cut(batch, self._share) for batch in batches)
        return (batch for batch in cut if batch)

    def _keyed_batches(self) -> Iterator[list[Any]]:
        for epoch, used, first in self._epochs():
            batches = self._order.batches(epoch, used, first, self._stride)
            if not self._keyed:
                yield from batches
                continue
            for number, batch in zip(itertools.count(first, self._stride), batches, strict=False):
                yield BatchKey(batch, (epoch, number, used) if used else (epoch, number))

    def _epochs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (epoch, items used before, first batch of this rank) for each epoch to go through."""
        grouping = self._order.grouping
        if not self._repeat:
            yield self._start.epoch, self._start.items, self._first
            return
        epoch, used, first = self._start.epoch, self._start.items, self._first
        if first >= (rest := grouping.batches(used)):
            skipped, first = divmod(first - rest, grouping.batches())
            epoch, used = epoch + 1 + skipped, 0
        self._order.enter(epoch)
        while True:
            yield epoch, used, first
            # Where the stride lands in the next epoch, which can be beyond that too.
            count = grouping.batches(used)
            first += -(-max(count - first, 0) // self._stride) * self._stride - count
            epoch, used = epoch + 1, 0


def _cut(batch: list[Any], share: slice) -> list[Any]:
    return BatchKey(batch[share], batch.key) if isinstance(batch, BatchKey) else batch[share]


def _parts(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and all samplers that it is made of."""
    while sampler is not None and not isinstance(sampler, SequentialSampler):
        yield sampler
        sampler = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)


def is_endless(sampler: Any) -> bool:
    """Say whether a sampler is known to have no end, so that its length is that of one of many passes."""
    return any(isinstance(part, samplers.RepeatSampler) for part in _parts(sampler))


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
    generator.manual_seed(rng.derive(generator.initial_seed(), epoch))
    try:
        yield
    finally:
        generator.set_state(before)


def grouping_of(
    *, dataset: Any, batch_size: int, drop_last: bool, sampler: Any = None, batch_sampler: Any = None
) -> Grouping:
    """Return how the arguments of a data loader group an epoch's items to batches."""
    if batch_sampler is not None:
        return Grouping(len(batch_sampler), 1, False)
    return Grouping(len(dataset if sampler is None else sampler), batch_size, drop_last)


def order_of(grouping: Grouping, *, shuffle: bool, sampler: Any, batch_sampler: Any, seed: int, repeats: bool) -> Order:
    """Return the order that the arguments of a data loader ask for, for one epoch or for all."""
    if batch_sampler is not None:
        return SamplerOrder(batch_sampler, grouping, seed, batched=True, repeats=repeats)
    if sampler is not None:
        return SamplerOrder(sampler, grouping, seed, batched=False, repeats=repeats)
    return ComputedOrder(grouping, seed if shuffle else None)
