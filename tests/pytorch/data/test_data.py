"""`pytorch.DataLoader` by itself: arguments, order, shards, positions and random numbers in workers."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, RandomSampler, Sampler, SequentialSampler, get_worker_info

from determined import pytorch
from exactness import Samples
from trials import line_data

pytestmark = [
    # Python 3.12 and later say so of every loader worker that torch forks beside another thread.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
    # So does torch on machines with few cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(itertools.count())


def batches_of(loader: Any, count: int | None = None) -> list[list[int]]:
    """Return the first batches of a loader of numbers."""
    return [[int(one) for one in batch] for batch in itertools.islice(loader, count)]


def numbers(size: int, batch_size: int = 1, **options: Any) -> pytorch.DataLoader:
    """Return a loader over 0, 1, 2, ... that gives batches as lists."""
    return pytorch.DataLoader(range(size), batch_size, collate_fn=list, **options)


# Arguments


MISTAKES: dict[str, dict[str, Any]] = {
    "shuffle with sampler": {"shuffle": True, "sampler": SequentialSampler(range(4))},
    "shuffle with batch_sampler": {"shuffle": True, "batch_sampler": [[0]]},
    "sampler with batch_sampler": {"sampler": [0], "batch_sampler": [[0]]},
    "batch_size with batch_sampler": {"batch_size": 2, "batch_sampler": [[0]]},
    "drop_last with batch_sampler": {"drop_last": True, "batch_sampler": [[0]]},
    "no batch_size with batch_sampler": {"batch_size": None, "batch_sampler": [[0]]},
    "batch_size of zero": {"batch_size": 0},
    "negative batch_size": {"batch_size": -1},
    "fractional batch_size": {"batch_size": 1.5},
    "negative num_workers": {"num_workers": -1},
    "negative timeout": {"timeout": -1},
    "prefetch_factor without workers": {"prefetch_factor": 2},
    "persistent_workers without workers": {"persistent_workers": True},
    "start method without workers": {"multiprocessing_context": "spawn"},
    "start method that does not exist": {"num_workers": 1, "multiprocessing_context": "teleport"},
    "shuffle of an iterable": {"dataset": Endless(), "shuffle": True},
    "sampler of an iterable": {"dataset": Endless(), "sampler": [0]},
    "batch_sampler of an iterable": {"dataset": Endless(), "batch_sampler": [[0]]},
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_wrong_arguments_are_refused_at_once_as_torch_does(name: str) -> None:
    arguments = {"dataset": range(4)} | MISTAKES[name]
    with pytest.raises(ValueError) as of_torch:
        TorchDataLoader(**arguments)
    with pytest.raises(ValueError) as ours:
        pytorch.DataLoader(**arguments)
    assert str(ours.value) == str(of_torch.value)


def test_argument_that_torch_does_not_know_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="bach_size"):
        pytorch.DataLoader(range(4), bach_size=2)


def test_single_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size=1"):
        pytorch.DataLoader(range(4), batch_size=None)


def test_arguments_go_in_the_order_of_torch() -> None:
    loader = pytorch.DataLoader(range(5), 2, False, None, None, 0, list, False, True, 0, None, None, None)
    assert batches_of(loader) == [[0, 1], [2, 3]]


def test_options_that_torch_added_reach_its_loader() -> None:
    made = numbers(4, num_workers=1, in_order=False, prefetch_factor=3, persistent_workers=True).get_data_loader()
    assert (made.in_order, made.prefetch_factor, made.persistent_workers) == (False, 3, True)


def test_worker_init_fn_and_collate_fn_reach_its_loader() -> None:
    made = pytorch.DataLoader(range(4), 2, collate_fn=sum, worker_init_fn=print, timeout=0).get_data_loader()
    assert list(made) == [1, 5]
    assert made.worker_init_fn is print


def test_loader_has_the_attributes_of_torchs() -> None:
    options: dict[str, Any] = {
        "collate_fn": list,
        "generator": torch.Generator(),
        "pin_memory": False,
        "timeout": 3,
        "worker_init_fn": print,
        "prefetch_factor": 4,
        "persistent_workers": True,
        "sampler": SequentialSampler(range(4)),
    }
    loader = pytorch.DataLoader(range(4), 2, num_workers=1, multiprocessing_context="spawn", **options)
    assert {name: getattr(loader, name) for name in options} == options
    assert loader.multiprocessing_context.get_start_method() == "spawn"
    assert list(loader.batch_sampler) == [[0, 1], [2, 3]]
    with pytest.raises(AttributeError, match="'DataLoader' object has no attribute 'colate_fn'"):
        loader.colate_fn  # noqa: B018  # the access is the test


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ({"skip": -1}, "skip=-1"),
        ({"num_replicas": 0}, "num_replicas=0"),
        ({"num_replicas": 2, "rank": 2}, "rank=2"),
        ({"rank": -1}, "rank=-1"),
    ],
)
def test_impossible_positions_are_refused(position: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        numbers(4).get_data_loader(**position)


# Order


@given(
    size=st.integers(1, 30),
    batch_size=st.integers(1, 8),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    num_replicas=st.integers(1, 9),
    rank=st.integers(0, 8),
    skip=st.integers(0, 25),
    seed=st.integers(0, 2**32 - 1),
)
def test_shard_and_position_equal_brute_force(
    size: int, batch_size: int, drop_last: bool, shuffle: bool, num_replicas: int, rank: int, skip: int, seed: int
) -> None:
    batch_size, rank = min(batch_size, size), rank % num_replicas
    loader = numbers(size, batch_size, shuffle=shuffle, drop_last=drop_last)
    wanted = 6
    every = batches_of(loader.get_data_loader(repeat=True, seed=seed), num_replicas * (skip + wanted))
    mine = loader.get_data_loader(repeat=True, skip=skip, num_replicas=num_replicas, rank=rank, seed=seed)
    assert batches_of(mine, wanted) == every[rank::num_replicas][skip:]
    once = batches_of(loader.get_data_loader(seed=seed))
    part = loader.get_data_loader(skip=skip, num_replicas=num_replicas, rank=rank, seed=seed)
    assert batches_of(part) == once[rank::num_replicas][skip:]
    assert len(part) == len(once[rank::num_replicas])
    assert every[: len(once)] == once[: len(every)]


@given(size=st.integers(1, 40), batch_size=st.integers(1, 50), seed=st.integers(0, 2**62))
def test_every_shuffled_epoch_holds_every_sample_once(size: int, batch_size: int, seed: int) -> None:
    loader = numbers(size, batch_size, shuffle=True)
    stream = batches_of(loader.get_data_loader(repeat=True, seed=seed), 3 * len(loader))
    for epoch in range(3):
        batches = stream[epoch * len(loader) : (epoch + 1) * len(loader)]
        assert sorted(itertools.chain(*batches)) == list(range(size))
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(loader) - 1)


@given(size=st.integers(1, 40), batch_size=st.integers(1, 10), drop_last=st.booleans())
def test_plain_order_is_that_of_torch(size: int, batch_size: int, drop_last: bool) -> None:
    loader = numbers(size, batch_size, drop_last=drop_last)
    torch_loader = TorchDataLoader(range(size), batch_size, drop_last=drop_last, collate_fn=list)
    assert batches_of(loader) == batches_of(torch_loader)
    assert len(loader) == len(torch_loader)


@given(
    batches=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=7),
    num_replicas=st.integers(1, 4),
    rank=st.integers(0, 3),
    skip=st.integers(0, 20),
)
def test_batch_sampler_equals_adapt_batch_sampler(
    batches: list[list[int]], num_replicas: int, rank: int, skip: int
) -> None:
    position = {"repeat": True, "skip": skip, "num_replicas": num_replicas, "rank": rank % num_replicas}
    made = pytorch.DataLoader(range(10), batch_sampler=batches, collate_fn=list).get_data_loader(**position)
    assert batches_of(made, 9) == list(itertools.islice(pytorch.adapt_batch_sampler(batches, **position), 9))


def test_epochs_have_different_orders() -> None:
    stream = batches_of(numbers(50, 50, shuffle=True).get_data_loader(repeat=True, seed=1), 5)
    assert len({tuple(batch) for batch in stream}) == 5


def test_seed_decides_the_order() -> None:
    orders = [batches_of(numbers(50, 5, shuffle=True).get_data_loader(seed=seed)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_order_depends_on_no_global_state() -> None:
    orders = []
    for state in (1, 2):
        torch.manual_seed(state)
        np.random.seed(state)
        random.seed(state)
        orders.append(batches_of(numbers(50, 5, shuffle=True).get_data_loader(seed=7)))
    assert orders[0] == orders[1]


@pytest.mark.parametrize("sampler", [False, True])
def test_loader_leaves_global_generators_alone(sampler: bool) -> None:
    chosen: dict[str, Any] = {"sampler": RandomSampler(range(50))} if sampler else {"shuffle": True}
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    batches_of(numbers(50, 5, num_workers=1, **chosen).get_data_loader(seed=7))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_generator_of_a_sampler_is_left_as_it_was() -> None:
    generator = torch.Generator().manual_seed(3)
    batches_of(numbers(50, 5, sampler=RandomSampler(range(50), generator=generator)).get_data_loader(seed=7))
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(3).get_state())


def test_generator_of_the_loader_decides_the_order() -> None:
    orders = []
    for seed in (3, 3, 4):
        loader = numbers(50, 5, shuffle=True, generator=torch.Generator().manual_seed(seed))
        orders.append(batches_of(loader.get_data_loader(seed=7)))
    assert orders[0] == orders[1] != orders[2]


class Unsized(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


@pytest.mark.parametrize(
    "arguments", [{"sampler": Unsized()}, {"batch_sampler": (batch for batch in ([0], [1], [2], [3], [4]))}]
)
def test_samplers_without_a_length_can_be_iterated(arguments: dict[str, Any]) -> None:
    assert batches_of(pytorch.DataLoader(range(5), collate_fn=list, **arguments)) == [[0], [1], [2], [3], [4]]


# Without a trial


def test_length_without_a_trial_is_the_number_of_batches() -> None:
    assert len(numbers(10, 4)) == 3
    assert len(numbers(10, 4, drop_last=True)) == 2


@pytest.mark.parametrize(
    "chosen",
    [
        {"shuffle": True},
        {"shuffle": True, "generator": torch.Generator().manual_seed(2)},
        {"sampler": RandomSampler(range(50))},
        {"sampler": RandomSampler(range(50), generator=torch.Generator().manual_seed(2))},
    ],
)
def test_iterating_twice_gives_two_orders_of_the_same_samples(chosen: dict[str, Any]) -> None:
    loader = numbers(50, 5, **chosen)
    first, second = batches_of(loader), batches_of(loader)
    assert first != second
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(50))


def test_iterating_without_a_trial_repeats_after_the_same_seed() -> None:
    orders = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        orders.append(batches_of(numbers(50, 5, shuffle=True)))
    assert orders[0] == orders[1] != orders[2]


def test_iterable_without_a_trial_gives_its_batches() -> None:
    assert batches_of(pytorch.DataLoader(Endless(), 3), 2) == [[0, 1, 2], [3, 4, 5]]


# Workers


@pytest.mark.parametrize("workers", [2, 3])
def test_random_numbers_in_workers_do_not_depend_on_their_number(workers: int) -> None:
    def noisy(num_workers: int) -> list[Any]:
        made = pytorch.DataLoader(Samples(13, noise=True), 3, shuffle=True, num_workers=num_workers)
        stream = itertools.islice(made.get_data_loader(repeat=True, seed=5), 8)
        return [x.tolist() for _, x, _ in stream]

    assert noisy(workers) == noisy(1)


def test_random_numbers_in_workers_depend_on_position_and_seed_alone() -> None:
    loader = pytorch.DataLoader(Samples(13, noise=True), 3, num_workers=2)

    def noise(skip: int, seed: int) -> list[Any]:
        return [x.tolist() for _, x, _ in itertools.islice(loader.get_data_loader(True, skip, seed=seed), 4)]

    assert noise(6, seed=5) == [*noise(5, seed=5)[1:], noise(9, seed=5)[0]]
    assert noise(6, seed=5) != noise(6, seed=6)
    assert noise(0, seed=5) != noise(5, seed=5)  # the same samples an epoch later


def test_collate_fn_in_workers_draws_by_position_too() -> None:
    def draws(skip: int) -> list[float]:
        loader = pytorch.DataLoader(range(12), 2, num_workers=2, collate_fn=lambda batch: torch.rand(1).item())
        return list(itertools.islice(loader.get_data_loader(True, skip, seed=5), 4))

    assert draws(0)[1:] == draws(1)[:3]
    assert len(set(draws(0))) == 4


class Described(Dataset[int]):
    """A data set with more to it than its items, which come a batch at a time."""

    classes = ("cat", "dog")

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        raise AssertionError("batches are to be fetched at once")

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [10 * len(indices) + index for index in indices]


@pytest.mark.parametrize("workers", [0, 1])
def test_data_set_that_fetches_whole_batches_is_asked_for_them(workers: int) -> None:
    loader = pytorch.DataLoader(Described(), 4, num_workers=workers, collate_fn=list)
    assert batches_of(loader.get_data_loader()) == [[40, 41, 42, 43], [24, 25]]


@pytest.mark.parametrize("workers", [0, 1])
def test_data_set_of_the_real_loader_has_the_attributes_of_the_users(workers: int) -> None:
    data = pytorch.DataLoader(Described(), 4, num_workers=workers).get_data_loader().dataset
    assert data.classes == ("cat", "dog")
    assert len(data) == 6
    with pytest.raises(AttributeError, match="breeds"):
        data.breeds  # noqa: B018  # the access is the test


class Adjustable(Dataset[Any]):
    """Says what was set on it, and what its process does about Ctrl-C."""

    shard = -1

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[int, bool]:
        return self.shard, signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def set_shard(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.shard = 10 + worker_id  # type: ignore[attr-defined]  # that of Adjustable


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_take_what_worker_init_fn_sets_and_leave_ctrl_c_to_the_training(method: str) -> None:
    loader = pytorch.DataLoader(
        Adjustable(),
        collate_fn=list,
        num_workers=2,
        worker_init_fn=set_shard,
        multiprocessing_context=method,
    )
    assert list(loader.get_data_loader(seed=1)) == [[(10, True)], [(11, True)]]


def test_workers_may_be_spawned() -> None:
    loader = pytorch.DataLoader(line_data(4), 2, num_workers=1, multiprocessing_context="spawn")
    assert len(list(loader.get_data_loader(seed=1))) == 2
