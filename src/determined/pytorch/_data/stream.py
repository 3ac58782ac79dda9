"""Endless training batches, from the position that training has reached."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from determined.core import DistributedContext
from determined.pytorch._data import rng
from determined.pytorch._data.batch import digest
from determined.pytorch._data.loader import DataLoader, batches_of
from determined.pytorch._data.order import Grouping, Start, in_epoch, is_endless
from determined.pytorch._data.split import AS_LOADED, Sizing, Split
from determined.pytorch._data.workers import begin_pass
from determined.pytorch._loop.progress import Epochs

logger = logging.getLogger("determined.pytorch")


class IndexedStream:
    """Training data with indices: the position is computed, also for another number of ranks than before."""

    def __init__(self, loader: DataLoader, ranks: DistributedContext, sizing: Sizing = AS_LOADED) -> None:
        self._loader = loader
        self._ranks = ranks
        self._shares = unequal_batch_sizes(loader, ranks)
        self._grouping = loader.grouping(self._shares, repeat=True)
        self._start = Start()
        self._since = 0
        self._make()  # raises for data without a batch
        self._split = Split.of(ranks.size, sum(self._shares or [self._group] * ranks.size), sizing)
        self.gradient_scale = 1.0
        self.drops_rest = False

    @property
    def epochs(self) -> Epochs:
        """Which batch belongs to which epoch; final once `load_state_dict` was called."""
        if self._grouping is None:
            return Epochs(length=length_of(self._make()))
        whole = self._grouping.batches()
        passed = (self._start.epoch + 1) * whole - self._grouping.batches(self._start.items)
        return Epochs(length=whole, ranks=self._stride, since=self._since, passed=passed)

    @property
    def micro_batches(self) -> int:
        """How many batches of its loader each rank trains for one batch of the training."""
        return self._split.micro_batches

    def open(self, batches_trained: int, seed: int) -> Callable[[], Any]:
        """Go to the position after `batches_trained` batches and return the function that gets the next one."""
        self._split.describe(self._ranks)
        return batches_of(self._make(seed=seed, skip=(batches_trained - self._since) * self.micro_batches)).__next__

    def state_dict(self) -> dict[str, Any]:
        """Return where these ranks began and how they split the data; the number of batches gives the position."""
        position = {"since": self._since, "epoch": self._start.epoch, "items": self._start.items}
        state = {**position, "ranks": self._stride, "group": self._group, **self._split.state_dict()}
        if self._shares is not None:  # `ranks` and the loader's own drop_last do not tell then
            state |= {"processes": self._ranks.size, "drop_last": 1}
        if self._grouping is not None and not self._loader.batches_samples:
            state["length"] = self._grouping.items
        return state

    def load_state_dict(self, state: dict[str, Any], batches_trained: int) -> None:
        """Continue from what `state_dict` returned after `batches_trained` batches. Call it before `open`.

        If those ranks split the data differently, the position they reached becomes the start.
        """
        if "group" not in state:  # saved by one process that began at the first batch
            return
        self._start, self._since = Start(state["epoch"], state["items"]), state["since"]
        scale = self._sampler_scale(state)
        self._split = self._split.continued(state, scale)
        self.gradient_scale = self.micro_batches / state.get("micro_batches", 1)
        if (state["ranks"], state["group"], scale) != (self._stride, self._group, 1.0):
            trained = (batches_trained - self._since) * state["ranks"]
            self._start, self._since = self._after(trained, state), batches_trained

    def _after(self, trained: int, state: Mapping[str, Any]) -> Start:
        """Return the position after a number of loader batches of earlier ranks."""
        if self._grouping is None:
            return self._after_without_length(trained, state["group"])
        drop_last = bool(state.get("drop_last", self._loader.drop_last))
        items = state.get("length", self._grouping.items)
        start = Grouping(items, state["group"], drop_last).after(self._start, trained)
        if items != self._grouping.items:
            start = Start(start.epoch, start.items * self._grouping.items // items)
        self.drops_rest = start.items > 0 and self._grouping.batches(start.items) == 0
        return Start(start.epoch + 1) if self.drops_rest else start

    def _sampler_scale(self, state: Mapping[str, Any]) -> float:
        """Return how many batches of the batch sampler take the place of one, if it makes them for other ranks now."""
        before = state.get("length")
        if self._grouping is None or before in (None, self._grouping.items) or not self._split.is_changed(state):
            return 1.0
        if self._ranks.is_chief:
            logger.warning(
                "The batch sampler of the training data has %d batches now, and had %d with the earlier number of "
                "processes, so training continues at about the same sample. Pass batch_size and sampler to the loader "
                "instead of batch_sampler to continue at the next one.",
                self._grouping.items,
                before,
            )
        return float(self._grouping.items / before)

    def _after_without_length(self, trained: int, group: int) -> Start:
        items = (self._start.items + trained) * group
        if group != self._group and self._ranks.is_chief:
            logger.warning(
                "The sampler of the training data has no length, and batches have another size than before "
                "(%d, now %d), so training continues at about the same sample. Give the sampler a __len__ to continue "
                "at the next one.",
                group,
                self._group,
            )
        return Start(0, -(-items // self._group))

    @property
    def _group(self) -> int:
        """The items in a batch of the loader; with unequal batch sizes, of all ranks together."""
        if self._grouping is not None:
            return self._grouping.group
        return self._loader.batch_size or 1 if self._loader.batches_samples else 1

    @property
    def _stride(self) -> int:
        """The number of the loader's batches in one batch of all ranks."""
        return self.micro_batches * (self._ranks.size if self._shares is None else 1)

    def _make(self, seed: int | None = None, skip: int = 0) -> Any:
        return self._loader.torch_loader(
            seed,
            repeat=True,
            skip=skip,
            num_replicas=self._ranks.size,
            rank=self._ranks.rank,
            start=self._start,
            shares=self._shares,
        )


class PassStream:
    """Training data without indices: each rank iterates its loader pass after pass.

    If the loader or its data set has `state_dict` and `load_state_dict`, these hold the position. Otherwise it is found
    by reading past the batches of the pass that were trained. `len()` is the length of a pass, until a pass ends
    elsewhere. An epoch ends for all ranks when it ends for the rank with the fewest batches. No batches are skipped if
    the loader itself starts after `begins_at` batches, because the program asked where to start.
    """

    def __init__(self, loader: Any, ranks: DistributedContext, begins_at: int = 0, sizing: Sizing = AS_LOADED) -> None:
        self._loader = loader
        self._ranks = ranks
        self._begins_at = begins_at
        self._stateful = _stateful_part(loader)
        self._restored = False
        self._in_pass = 0
        self._passes = 0
        self._contradiction: int | None = None  # batches of the first pass that did not end at the length
        self._length = length_of(loader)
        if self._length == 0:
            raise ValueError(
                f"The training data loader has no batches: the length of {loader!r} is 0. Give it more data or a "
                "smaller batch size."
            )
        lengths = ranks.allgather(self._length)
        known = [length for length in lengths if length is not None]
        self._epoch_length = min(known) if len(known) == len(lengths) else None
        self._group = getattr(loader, "batch_size", None) or 1
        self._split = Split.of(ranks.size, self._group * ranks.size, sizing)
        self._since = 0
        self._epochs_before = 0
        self.gradient_scale = 1.0
        self.drops_rest = False

    @property
    def epochs(self) -> Epochs:
        """Which batch belongs to which epoch; final once `load_state_dict` was called."""
        passed = self._epochs_before * (self._epoch_length or 0)
        return Epochs(length=self._epoch_length, ranks=self.micro_batches, since=self._since, passed=passed)

    @property
    def micro_batches(self) -> int:
        """How many batches of its loader each rank trains for one batch of the training."""
        return self._split.micro_batches

    def open(self, batches_trained: int, seed: int) -> Callable[[], Any]:
        """Go to the position after `batches_trained` batches and return the function that gets the next one."""
        if batches_trained and not self._restored:
            length = self._length
            self._passes, self._in_pass = divmod(batches_trained, length) if length else (0, batches_trained)
        self._split.describe(self._ranks)
        batches = self._endless(seed)
        if self._stateful and self._restored:
            pass  # already at its position
        elif self._begins_at:
            self._warn_of_begin(batches_trained)
        else:
            if self._is_at_end_of_pass(seed):
                self._passes, self._in_pass = self._passes + 1, 0
            self._read_past(batches)
        return (batches if self._ranks.size == 1 else self._compared(batches)).__next__

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position within the pass, and the data's own state if it has one."""
        state = {"passes": self._passes, "in_pass": self._in_pass}
        if self._contradiction is not None:
            state["contradiction"] = self._contradiction
        if self._ranks.size > 1:
            state["ranks"] = self._ranks.size
        if split := self._split.state_dict():
            state |= {**split, "group": self._group}
        if self._since:
            state |= {"since": self._since, "epoch": self._epochs_before}
        return {**state, "loader": self._stateful.state_dict()} if self._stateful else state

    def load_state_dict(self, state: dict[str, Any], batches_trained: int) -> None:
        """Continue from this rank's position if the number of ranks is the same. Call it before `open`."""
        before, micro_batches = state.get("ranks", 1), state.get("micro_batches", 1)
        self._since, self._epochs_before = state.get("since", 0), state.get("epoch", 0)
        sizes = {"ranks": before * micro_batches, "group": state.get("group", self._group)}
        self._split = self._split.continued({"processes": before, **state, **sizes})
        self.gradient_scale = self.micro_batches / micro_batches
        if before != self._ranks.size and not self._begins_at:
            logger.warning(
                "The checkpoint was saved by %s processes, and %d continue: data that each rank iterates itself cannot "
                "be split again in the middle of a pass, so each rank begins the pass again, and samples of it are "
                "repeated. Use a map-style data set to continue with the next sample, or change the number of "
                "processes at the end of an epoch.",
                before,
                self._ranks.size,
            )
            self._restored, self._passes, self._in_pass = True, state.get("passes", 0), 0
            if "passes" in state:
                self._since, self._epochs_before = batches_trained, self._passes
        elif "in_pass" in state:
            self._restored, self._passes, self._in_pass = True, state["passes"], state["in_pass"]
            self._contradiction = state.get("contradiction")
            if self._stateful and "loader" in state:
                self._stateful.load_state_dict(state["loader"])

    def _endless(self, seed: int) -> Iterator[Any]:
        while True:
            count = 0
            for batch in self._pass(seed):
                count += 1
                self._in_pass += 1
                yield batch
            if not count and not self._in_pass:
                raise ValueError(
                    "The training data loader yielded no batch in a whole pass; check that its data set is not empty "
                    "and that it starts again whenever it is iterated."
                )
            if self._in_pass != self._length:
                self._warn_of_length()
            self._in_pass = 0
            self._passes += 1

    def _pass(self, seed: int) -> Iterator[Any]:
        """Iterate over the loader once; if torch's generators decide the order, it depends on seed and pass alone."""
        with self._seeded(seed, begin_pass(self._loader, self._passes)):
            batches = iter(self._loader)
            # Samplers draw when the first batch is asked for. Data that keeps its position may be past that.
            first = [] if self._stateful else list(itertools.islice(batches, 1))
        return itertools.chain(first, batches)

    @contextlib.contextmanager
    def _seeded(self, seed: int, epoch: int) -> Iterator[None]:
        with rng.seeded(rng.derive(seed, self._passes)), in_epoch(self._loader, epoch):
            yield

    def _is_at_end_of_pass(self, seed: int) -> bool:
        """Return whether nothing is left of the pass, by indices or else by `len`, without reading data."""
        if self._in_pass != self._length or self._contradiction is not None:
            return False
        if not isinstance(self._loader, TorchDataLoader) or isinstance(self._loader.dataset, IterableDataset):
            return True
        indices = self._loader.batch_sampler or self._loader.sampler
        if is_endless(indices):
            return False
        with self._seeded(seed, self._passes):
            return sum(1 for _ in itertools.islice(indices, self._in_pass + 1)) == self._in_pass

    def _read_past(self, batches: Iterator[Any]) -> None:
        if behind := self._in_pass:
            logger.warning(
                "The training data does not save its position, so %d batches are read again to find it; this is exact "
                "only if its order depends on torch's generators alone. Give the data set state_dict() and "
                "load_state_dict() to continue at once.",
                behind,
            )
            self._in_pass = 0
            for _ in range(behind):
                next(batches)

    def _compared(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches; warn if all ranks start with the same one."""
        first = next(batches)
        digests = self._ranks.allgather(digest(first))
        if digests[0] is not None and len(set(digests)) == 1 and self._ranks.is_chief:
            logger.warning(
                "All %d ranks start with the same batch: this data loader does not shard its data, so every rank "
                "trains on every sample. Give each rank its own part, for example by "
                "`itertools.islice(samples, context.distributed.rank, None, context.distributed.size)` in the data "
                "set, or use a map-style data set in a determined.pytorch.DataLoader.",
                self._ranks.size,
            )
        yield first
        yield from batches

    def _warn_of_length(self) -> None:
        if self._length is None or self._contradiction is not None:
            return
        self._contradiction = self._in_pass
        logger.warning(
            "A pass over the training data had %d batches, but its length, len(%s), is %d. Epochs are counted by the "
            "length, so they begin in the middle of a pass now. Give the loader or its data set a __len__ that is "
            "right, or none and use pytorch.Batch for lengths and periods.",
            self._in_pass,
            type(self._loader).__name__,
            self._length,
        )

    def _warn_of_begin(self, batches_trained: int) -> None:
        logger.warning(
            "The program called context.get_initial_batch() before it built the training data loader, so the loader is "
            "assumed to start after %d batches: none are skipped. If it starts at its first batch, return a "
            "pytorch.DataLoader, or call get_initial_batch() only in train_batch.",
            self._begins_at,
        )
        if self._begins_at != batches_trained:
            logger.warning(
                "Training continues after %d batches, but get_initial_batch() returned %d: the trial's __init__ runs "
                "before fit(latest_checkpoint=...), so call context.get_initial_batch() in "
                "build_training_data_loader().",
                batches_trained,
                self._begins_at,
            )


Stream = IndexedStream | PassStream
"""Endless training data that knows its position."""


def stream_of(
    loader: Any, ranks: DistributedContext, seed: int, begins_at: int = 0, sizing: Sizing = AS_LOADED
) -> Stream:
    """Return the training stream over what `build_training_data_loader` returned. All ranks must call this.

    A loader that is not ours starts after `begins_at` batches if its program asked where to start.
    """
    if not isinstance(loader, DataLoader):
        return PassStream(loader, ranks, begins_at, sizing)
    if loader.is_iterable:
        return PassStream(loader.get_data_loader(seed=seed), ranks, sizing=sizing)
    return IndexedStream(loader, ranks, sizing)


def validation_loader(loader: DataLoader, ranks: DistributedContext | None, seed: int) -> Any:
    """Return the torch loader of this rank's part of the validation data; without ranks, of all of it."""
    if ranks is None or loader.is_iterable:
        return loader.get_data_loader(seed=seed)
    shares = unequal_batch_sizes(loader, ranks)
    return loader.torch_loader(seed, num_replicas=ranks.size, rank=ranks.rank, shares=shares)


def unequal_batch_sizes(loader: DataLoader, ranks: DistributedContext) -> list[int] | None:
    """Return the batch sizes of all ranks if they differ, else None. All ranks must call this."""
    if ranks.size == 1:
        return None
    sizes = ranks.allgather(loader.batch_size or 0)  # 0 where a batch sampler decides
    return sizes if len(set(sizes)) > 1 and all(sizes) else None


def _stateful_part(loader: Any) -> Any:
    """Return the loader or its data set if it saves and loads its position, else None."""
    # With workers, their copies of the data set advance, not the one here.
    candidates = [loader] if getattr(loader, "num_workers", 0) else [loader, getattr(loader, "dataset", None)]
    for candidate in candidates:
        if callable(getattr(candidate, "state_dict", None)) and callable(getattr(candidate, "load_state_dict", None)):
            return candidate
    return None


def length_of(loader: Any) -> int | None:
    """Return the number of batches in a pass, or None if the loader has no length."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # torch loaders have the method even where their data has no length
        return None
