"""The data loader that makes its torch loader once rank, seed and position are known."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset, IterDataPipe, TensorDataset, default_collate
from torch.utils.data import DataLoader as TorchDataLoader

from determined.pytorch import samplers
from determined.pytorch._data import rng
from determined.pytorch._data.order import ComputedOrder, Grouping, OrderedBatches, SamplerOrder, Start
from determined.pytorch._data.workers import KeyedDataset, KeyedIterable, WorkerStart


class DataLoader:
    """Takes the arguments of `torch.utils.data.DataLoader` and makes such a loader when rank and position are known.

    The order of a shuffled epoch depends on the seed and the epoch's number alone, so a resumed run continues in the
    same order at once. Iterating it and `len()` also work without a trial.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = False,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        **torch_options: Any,
    ) -> None:
        if batch_size is None and batch_sampler is None:
            raise ValueError(
                "DataLoader(batch_size=None) would yield single samples; training counts in batches. "
                "Pass batch_size=1, or a batch_sampler."
            )
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
            "timeout": timeout,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
            "generator": generator,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            **torch_options,
        }
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._shuffle = bool(shuffle)
        self._sampler = sampler
        self._batch_sampler = batch_sampler
        self._passes = 0
        # Torch checks all arguments here; no worker starts before a loader is iterated.
        self._plain: TorchDataLoader[Any] = TorchDataLoader(
            dataset, batch_size, shuffle, sampler, batch_sampler, drop_last=drop_last, **self._options
        )

    def get_data_loader(
        self, repeat: bool = False, skip: int = 0, num_replicas: int = 1, rank: int = 0, *, seed: int | None = None
    ) -> TorchDataLoader[Any]:
        """Return the torch loader of one rank: repeated, then sharded by batch, then started after `skip` batches.

        `seed` decides the order of a shuffled epoch. Default: torch's own seed.
        """
        skip, num_replicas, rank = samplers.check_position("get_data_loader", skip, num_replicas, rank)
        if self.is_iterable and skip:
            raise ValueError(
                f"get_data_loader(skip={skip}): an IterableDataset has no positions to go to; iterate past batches."
            )
        if self.is_iterable:
            return self._make(self._seed_or_own(seed), batch_size=self.batch_size, drop_last=self.drop_last)
        return self.torch_loader(seed, repeat=repeat, skip=skip, num_replicas=num_replicas, rank=rank)

    def torch_loader(
        self,
        seed: int | None = None,
        *,
        repeat: bool = False,
        skip: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
        start: Start = Start(),  # noqa: B008  # immutable
        shares: Sequence[int] | None = None,
    ) -> TorchDataLoader[Any]:
        """Return the torch loader that starts at a position, as described in `OrderedBatches`.

        With `shares`, the batch sizes of all ranks, each rank cuts its part from common batches.
        """
        seed, grouping = self._seed_or_own(seed), self.grouping(shares, repeat)
        if grouping is None:
            unsized = self._batch_sampler or BatchSampler(self._sampler, self.batch_size or 1, self.drop_last)
            begun = samplers.adapt_batch_sampler(unsized, repeat, start.items)
            own_batches = samplers.adapt_batch_sampler(begun, False, skip, num_replicas, rank)
            return self._make(seed, batch_sampler=own_batches)
        share = None
        if shares is not None:
            before = sum(shares[:rank])
            share = slice(before, before + shares[rank])
            num_replicas, rank = 1, 0
        if repeat and grouping.batches() == 0:
            raise ValueError(
                f"The training data loader has no batches: batch_size is "
                f"{grouping.group} and drop_last is {grouping.drop_last}. Give it more data or a smaller batch size."
            )
        batches = OrderedBatches(
            order=self._order(seed, exact=repeat),
            grouping=grouping,
            repeat=repeat,
            skip=skip,
            num_replicas=num_replicas,
            rank=rank,
            start=start,
            share=share,
            batched=self._batch_sampler is not None,
            keyed=self.num_workers > 0,
        )
        return self._make(seed, batch_sampler=batches)

    def grouping(self, shares: Sequence[int] | None, repeat: bool) -> Grouping | None:
        """Return how an epoch's items are grouped into batches; None for a sampler without a length."""
        items = next(one for one in (self._batch_sampler, self._sampler, self.dataset) if one is not None)
        if items is not self.dataset and not isinstance(items, Sized):
            return None
        if shares is not None:  # in training, every rank needs its part of the last batch
            return Grouping(len(items), sum(shares), repeat or self.drop_last)
        if self._batch_sampler is not None:
            return Grouping(len(items), 1, False)
        return Grouping(len(items), self.batch_size or 1, self.drop_last)

    @property
    def num_workers(self) -> int:
        """The number of processes that load batches; 0 for loading in the training process."""
        return int(self._options["num_workers"])

    @property
    def batches_samples(self) -> bool:
        """Whether the loader groups samples into batches, not a batch sampler."""
        return self._batch_sampler is None

    @property
    def is_iterable(self) -> bool:
        """Whether the data set is an `IterableDataset`, which has no indices."""
        return isinstance(self.dataset, IterableDataset)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over one pass; a shuffled loader gives every pass another order."""
        if self.is_iterable:
            return iter(self._plain)
        epoch, self._passes = self._passes, self._passes + 1
        return iter(self.torch_loader(start=Start(epoch)))

    def __len__(self) -> int:
        return len(self._plain)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of torch's loader, such as `sampler` and `collate_fn`."""
        if name.startswith("_"):  # also while a copy is made, which has no `_plain` yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._plain, name)

    def _seed_or_own(self, seed: int | None) -> int:
        if seed is not None and self._options["generator"] is None:
            return seed
        return int((self._options["generator"] or torch.default_generator).initial_seed())

    def _order(self, seed: int, exact: bool) -> ComputedOrder | SamplerOrder:
        if self._batch_sampler is not None:
            return SamplerOrder(self._batch_sampler, len(self._batch_sampler), seed, "batches", exact)
        if self._sampler is not None:
            return SamplerOrder(self._sampler, len(self._sampler), seed, "indices", exact)
        return ComputedOrder(len(self.dataset), seed if self._shuffle else None)

    def _make(self, seed: int, **batching: Any) -> TorchDataLoader[Any]:
        # Worker seeds come from a separate generator, so that starting workers does not affect the training's.
        generator = torch.Generator().manual_seed(rng.derive(seed, 2**32 - 1))
        options = self._options | {"generator": generator}
        if self.num_workers:
            options["worker_init_fn"] = WorkerStart(options["worker_init_fn"])
        return TorchDataLoader(self._keyed_dataset(seed), **batching, **options)

    def _keyed_dataset(self, seed: int) -> Any:
        if not self.num_workers:
            return self.dataset
        if not self.is_iterable:
            return KeyedDataset(self.dataset, seed)
        # Torch seeds workers that live for one pass, and data pipes.
        reseeds = self._options["persistent_workers"] and not isinstance(self.dataset, IterDataPipe)
        return KeyedIterable(self.dataset, seed) if reseeds else self.dataset


def batches_of(loader: Any) -> Iterator[Any]:
    """Iterate over a loader. Without workers and pinned memory, skip torch's iterator.

    Its bookkeeping takes longer than a small batch; the batches are the same.
    """
    direct = type(loader) is TorchDataLoader and isinstance(loader.batch_sampler, OrderedBatches)
    if not direct or loader.num_workers or loader.pin_memory:
        return iter(loader)
    fetch = _fetcher(loader.dataset, loader.collate_fn)
    return (fetch(indices) for indices in loader.batch_sampler)


def _fetcher(dataset: Any, collate_fn: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
    """Return the function that makes a batch from its indices."""
    collate = _collate if collate_fn is default_collate else collate_fn

    def rows(indices: list[Any]) -> Any:
        if {*map(type, indices)} == {int}:
            chosen = torch.tensor(indices)
            return [tensor[chosen] for tensor in dataset.tensors]
        return _collate([dataset[i] for i in indices])  # a sampler with other kinds of indices

    if collate is _collate and _holds_rows(dataset):
        return rows
    if callable(get_items := getattr(dataset, "__getitems__", None)):
        return lambda indices: collate(get_items(indices))
    return lambda indices: collate([dataset[i] for i in indices])


def _collate(samples: Any) -> Any:
    """Return what torch's `default_collate` returns; for tuples of tensors in a fraction of its time."""
    if {*map(type, samples)} == {tuple} and {*map(type, itertools.chain(*samples))} == {Tensor}:
        with contextlib.suppress(ValueError):  # of unequal lengths
            return [torch.stack(column) for column in zip(*samples, strict=True)]
    return default_collate(samples)


def _holds_rows(dataset: Any) -> bool:
    """Return whether samples are rows of plain tensors in host memory, so that a batch takes one index operation."""
    return type(dataset) is TensorDataset and all(
        type(tensor) is Tensor and tensor.is_cpu and tensor.is_contiguous() and not tensor.requires_grad
        for tensor in dataset.tensors
    )
