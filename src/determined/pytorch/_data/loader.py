"""The data loader whose real loader is made once rank, seed and position are known."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset, IterDataPipe, TensorDataset, default_collate
from torch.utils.data import DataLoader as TorchDataLoader

from determined.pytorch import samplers
from determined.pytorch._data import rng
from determined.pytorch._data.order import Grouping, OrderedBatches, Start, grouping_of, order_of
from determined.pytorch._data.workers import KeyedDataset, KeyedIterable, WorkerStart

_ATTRIBUTES_OF_TORCH = frozenset(
    (
        "sampler",
        "batch_sampler",
        "collate_fn",
        "generator",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "prefetch_factor",
        "persistent_workers",
    )
)


class DataLoader:
    """Takes the arguments of `torch.utils.data.DataLoader` and makes such a loader when it is known where to start.

    The order of a shuffled epoch depends on the seed and the epoch's number alone, so that a resumed run goes
    on in the same order at once. Iterating it, or `len()`, works without a trial too.
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
        # Torch checks all arguments here, with its own words; no worker starts before a loader is iterated.
        self._plain = TorchDataLoader(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            drop_last=drop_last,
            **self._options,
        )

    def get_data_loader(
        self,
        repeat: bool = False,
        skip: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
        *,
        seed: int | None = None,
    ) -> TorchDataLoader[Any]:
        """Return the torch loader of one rank: repeated, then sharded by batch, then begun after `skip` batches.

        `seed` decides the order of a shuffled epoch; without it, torch's own seed does.
        """
        _check_position(skip, num_replicas, rank)
        if self.is_iterable and skip:
            raise ValueError(
                f"get_data_loader(skip={skip}): an IterableDataset has no positions to go to; iterate past batches."
            )
        if self.is_iterable:
            own_seed = self._seed_or_own(seed)
            dataset, options = self._keyed_dataset(own_seed), self._options_of_loader(own_seed)
            return TorchDataLoader(dataset, self.batch_size, drop_last=self.drop_last, **options)
        return self.torch_loader(seed, repeat=repeat, skip=skip, num_replicas=num_replicas, rank=rank)

    def torch_loader(self, seed: int | None = None, **position: Any) -> TorchDataLoader[Any]:
        """Return the torch loader that begins at a position, which `OrderedBatches` describes.

        With `shares`, the batch sizes of all ranks, these cut their parts from common batches.
        """
        seed = self._seed_or_own(seed)
        batches = self._batches(seed, **position)
        return TorchDataLoader(self._keyed_dataset(seed), batch_sampler=batches, **self._options_of_loader(seed))

    @property
    def grouping(self) -> Grouping | None:
        """How an epoch's items are grouped to batches; None for a sampler that does not know its length."""
        given = self._batch_sampler if self._batch_sampler is not None else self._sampler
        if given is not None and not isinstance(given, Sized):
            return None
        return grouping_of(
            dataset=self.dataset,
            batch_size=self.batch_size or 1,
            drop_last=self.drop_last,
            sampler=self._sampler,
            batch_sampler=self._batch_sampler,
        )

    @property
    def num_workers(self) -> int:
        """Processes that load batches; 0 for loading in the training process."""
        return int(self._options["num_workers"])

    @property
    def is_iterable(self) -> bool:
        """Whether the data set is an `IterableDataset`, which decides itself what comes next."""
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
        """Return the attributes of torch's loader, such as `sampler` and `collate_fn`."""
        if name not in _ATTRIBUTES_OF_TORCH:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._plain, name)

    def _seed_or_own(self, seed: int | None) -> int:
        if seed is not None and self._options["generator"] is None:
            return seed
        return int((self._options["generator"] or torch.default_generator).initial_seed())

    def _options_of_loader(self, seed: int) -> dict[str, Any]:
        options = self._options | {"generator": _worker_generator(seed)}
        if self.num_workers:
            options["worker_init_fn"] = WorkerStart(options["worker_init_fn"])
        return options

    def _batches(
        self,
        seed: int,
        *,
        repeat: bool = False,
        skip: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
        start: Start = Start(),  # noqa: B008  # immutable
        shares: Sequence[int] | None = None,
    ) -> Any:
        grouping = self.grouping
        if grouping is None:
            unsized = self._batch_sampler or BatchSampler(self._sampler, self.batch_size or 1, self.drop_last)
            return samplers.adapt_batch_sampler(unsized, repeat, skip, num_replicas, rank)
        share = None
        if shares is not None:  # all ranks cut their parts from the same batches
            before = sum(shares[:rank])
            share = slice(before, before + shares[rank])
            grouping = Grouping(grouping.items, sum(shares), repeat or grouping.drop_last)
            num_replicas, rank = 1, 0
        if repeat and grouping.batches() == 0:
            raise ValueError(
                f"The training data loader has no batches: batch_size is "
                f"{grouping.group} and drop_last is {grouping.drop_last}. Give it more data or a smaller batch size."
            )
        return OrderedBatches(
            order_of(
                grouping,
                shuffle=self._shuffle,
                sampler=self._sampler,
                batch_sampler=self._batch_sampler,
                seed=seed,
                repeats=repeat,
            ),
            repeat=repeat,
            skip=skip,
            num_replicas=num_replicas,
            rank=rank,
            start=start,
            share=share,
            keyed=self.num_workers > 0,
        )

    def _keyed_dataset(self, seed: int) -> Any:
        if not self.num_workers:
            return self.dataset
        if not self.is_iterable:
            return KeyedDataset(self.dataset, seed)
        # Workers that live for one pass are seeded for it by torch, and pipes get their seeds from torch too.
        reseeds = self._options["persistent_workers"] and not isinstance(self.dataset, IterDataPipe)
        return KeyedIterable(self.dataset, seed) if reseeds else self.dataset


def batches_of(loader: Any) -> Iterator[Any]:
    """Iterate over a loader; without workers or pinned memory, by the shortest way from indices to a batch.

    It does what torch's iterator does for such loaders, without the bookkeeping, which takes longer than a small
    batch.
    """
    direct = type(loader) is TorchDataLoader and isinstance(loader.batch_sampler, OrderedBatches)
    if direct and loader.num_workers == 0 and not loader.pin_memory:
        collate = _collate if loader.collate_fn is default_collate else loader.collate_fn
        if collate is _collate and _holds_rows(loader.dataset):
            return _gathered(loader.dataset, loader.batch_sampler)
        return _collated(loader.dataset, loader.batch_sampler, collate)
    return iter(loader)


def _collated(dataset: Any, batches: Iterable[list[Any]], collate: Callable[[Any], Any]) -> Iterator[Any]:
    if callable(fetch := getattr(dataset, "__getitems__", None)):
        for indices in batches:
            yield collate(fetch(indices))
    else:
        for indices in batches:
            yield collate([dataset[i] for i in indices])


def _collate(samples: Any) -> Any:
    """Return what torch's `default_collate` makes of samples; for tuples of tensors in a fraction of its time."""
    if {*map(type, samples)} == {tuple} and {*map(type, itertools.chain(*samples))} == {Tensor}:
        with contextlib.suppress(ValueError):  # of unequal lengths
            return [torch.stack(column) for column in zip(*samples, strict=True)]
    return default_collate(samples)


def _holds_rows(dataset: Any) -> bool:
    """Say whether samples are rows of plain tensors in host memory, from which whole batches can be taken at once."""
    return type(dataset) is TensorDataset and all(
        type(tensor) is Tensor and tensor.is_cpu and tensor.is_contiguous() and not tensor.requires_grad
        for tensor in dataset.tensors
    )


def _gathered(dataset: TensorDataset, batches: Iterable[list[Any]]) -> Iterator[Any]:
    for indices in batches:
        if {*map(type, indices)} == {int}:
            rows = torch.tensor(indices)
            yield [tensor[rows] for tensor in dataset.tensors]
        else:  # of a sampler that has its own idea of an index
            yield _collate([dataset[i] for i in indices])


def _worker_generator(seed: int) -> torch.Generator:
    """Return the generator of worker seeds, so that starting workers draws nothing from the training's."""
    return torch.Generator().manual_seed(rng.derive(seed, 2**32 - 1))


def _check_position(skip: int, num_replicas: int, rank: int) -> None:
    if skip < 0:
        raise ValueError(f"get_data_loader(skip={skip}): the number of batches to skip is 0 or more.")
    if not 0 <= rank < num_replicas:
        raise ValueError(
            f"get_data_loader(num_replicas={num_replicas}, rank={rank}): ranks count from 0 to num_replicas - 1."
        )
