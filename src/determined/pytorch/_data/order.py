"""The order of training data: a pure function of seed and epoch that can start at any position."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler, SequentialSampler

from determined.pytorch import samplers
from determined.pytorch._data import rng

logger = logging.getLogger("determined.pytorch")


class BatchKey(list[Any]):
    """The indices of a batch, with a key that no other batch of the training has."""

    def __init__(self, indices: Iterable[Any], key: tuple[int, ...]) -> None:
        super().__init__(indices)
        self.key = key


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """A position in the data at which ranks start: after `items` items of an epoch."""

    epoch: int = 0
    items: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Grouping:
    """How many items an epoch has, and how they are grouped into batches.

    Items are samples; with a batch sampler, each item is one of its batches.
    """

    items: int
    group: int
    drop_last: bool

    def batches(self, used: int = 0) -> int:
        """Return the number of batches of an epoch after its first `used` items."""
        left = max(self.items - used, 0)
        return left // self.group if self.drop_last else -(-left // self.group)

    def after(self, start: Start, batches: int) -> Start:
        """Return the position that is `batches` batches after another one."""
        if (whole := self.batches()) == 0:
            return start
        first = self.batches(start.items)
        if batches < first:
            return Start(start.epoch, start.items + batches * self.group)
        epochs, rest = divmod(batches - first, whole)
        return Start(start.epoch + 1 + epochs, rest * self.group)


@dataclasses.dataclass(frozen=True, slots=True)
class ComputedOrder:
    """Plain or, with a seed, shuffled order over samples: computed for any epoch, without the ones before."""

    length: int
    seed: int | None

    def items(self, epoch: int) -> list[Any]:
        """Return the indices of an epoch, in order."""
        if self.seed is None:
            return list(range(self.length))
        shuffle = np.random.Generator(np.random.PCG64(rng.derive(self.seed, epoch)))
        indices: list[Any] = shuffle.permutation(self.length).tolist()
        return indices

    def enter(self, epoch: int) -> None:
        """Do nothing: epochs do not depend on each other."""


@dataclasses.dataclass(slots=True)
class SamplerOrder:
    """The order of the user's sampler or batch sampler; a function of the epoch, because it is seeded for each."""

    sampler: Any
    length: int
    seed: int
    kind: str
    """What the sampler yields: indices or batches."""
    exact: bool
    """Whether to raise `ValueError` for a sampler that yields fewer items than its length."""
    _warned: bool = False

    def enter(self, epoch: int) -> None:
        """Prepare to start with an epoch: draw all epochs before it if the sampler may keep state between them."""
        remembering = [part for part in _parts(self.sampler) if not _knows_epoch(part)]
        if not (epoch and remembering):
            return
        logger.warning(
            "%s has neither set_epoch() nor a torch generator, so the indices of the %d epochs before are drawn again "
            "to find its order. Give it a method set_epoch(epoch) that sets the order to continue at once.",
            type(remembering[0]).__name__,
            epoch,
        )
        for earlier in range(epoch):
            self.items(earlier)

    def items(self, epoch: int) -> list[Any]:
        """Return what the sampler yields in an epoch: indices, or batches of a batch sampler."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(rng.seeded(rng.derive(self.seed, epoch)))
            for part in _parts(self.sampler):
                stack.enter_context(in_epoch(part, epoch))
            # All at once: later draws of the sampler must not mix with the training's random numbers.
            drawn = list(itertools.islice(self.sampler, self.length + 1))
        if len(drawn) != self.length:
            self._check_length(len(drawn))
        return drawn[: self.length]

    def _check_length(self, drawn: int) -> None:
        """Raise for a sampler that yields less than its length; warn once about one that yields more."""
        length, kind = self.length, self.kind
        if drawn < length and self.exact:
            raise ValueError(
                f"len({type(self.sampler).__name__}) is {length}, but an epoch of it has {drawn} {kind}. Epochs, and "
                "the position at which a resumed run continues, are computed from the length: make __len__ return the "
                f"number of {kind} that __iter__ yields, or remove __len__ and use pytorch.Batch for lengths and "
                "periods."
            )
        if drawn > length and not (self._warned or is_endless(self.sampler)):
            self._warned = True
            logger.warning(
                "len(%s) is %d, but it yields more %s: an epoch ends at the length, and the rest is left out. "
                "Make __len__ return the number of %s that __iter__ yields.",
                type(self.sampler).__name__,
                length,
                kind,
                kind,
            )


@dataclasses.dataclass(eq=False, kw_only=True)
class OrderedBatches(Sampler[list[Any]]):
    """A batch sampler over an order: repeated, then sharded by batch, then started after `skip` batches.

    Without `repeat` it yields one epoch, that of `start`. With `share` it cuts each batch to that slice, for ranks
    with unequal batch sizes. With `keyed` batches carry the key by which loader workers seed themselves.
    """

    order: ComputedOrder | SamplerOrder
    grouping: Grouping
    repeat: bool
    skip: int
    num_replicas: int
    rank: int
    start: Start
    share: slice | None
    batched: bool
    keyed: bool

    def __len__(self) -> int:
        return (self.grouping.batches() - self.rank + self.num_replicas - 1) // self.num_replicas

    def __iter__(self) -> Iterator[list[Any]]:
        size = self.grouping.group
        for epoch, used, first in self._epochs():
            items = self.order.items(epoch)
            for number in range(first, self.grouping.batches(used), self.num_replicas):
                begin = used + number * size
                batch = items[begin] if self.batched else items[begin : begin + size]
                if self.share is not None and not (batch := batch[self.share]):
                    continue
                if self.keyed:
                    batch = BatchKey(batch, (epoch, number, used) if used else (epoch, number))
                yield batch

    def _epochs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (epoch, items used before, first batch of this rank) for each epoch to go through."""
        grouping, stride = self.grouping, self.num_replicas
        epoch, used, first = self.start.epoch, self.start.items, self.rank + self.skip * stride
        if not self.repeat:
            yield epoch, used, first
            return
        if first >= (rest := grouping.batches(used)):
            skipped, first = divmod(first - rest, grouping.batches())
            epoch, used = epoch + 1 + skipped, 0
        self.order.enter(epoch)
        while True:
            yield epoch, used, first
            # The first batch of this rank in the next epoch; it may even be after that epoch.
            count = grouping.batches(used)
            first += -(-max(count - first, 0) // stride) * stride - count
            epoch, used = epoch + 1, 0


def _parts(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and all samplers that it is made of."""
    while sampler is not None and not isinstance(sampler, SequentialSampler):
        yield sampler
        sampler = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)


def is_endless(sampler: Any) -> bool:
    """Return whether a sampler repeats forever, so that its length is the length of one pass."""
    return any(isinstance(part, samplers.RepeatSampler) for part in _parts(sampler))


def _knows_epoch(sampler: Any) -> bool:
    """Return whether a sampler depends only on the epoch and on generators that `in_epoch` seeds."""
    if callable(getattr(sampler, "set_epoch", None)):
        return True
    # Not isinstance: a subclass of the user may keep more state.
    known = type(sampler).__module__.partition(".")[0] in ("builtins", "numpy", "torch", "determined")
    return known or isinstance(getattr(sampler, "generator", None), torch.Generator)


@contextlib.contextmanager
def in_epoch(sampler: Any, epoch: int) -> Iterator[None]:
    """Seed a sampler or loader for an epoch inside the block; its generator is restored after it."""
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
