from __future__ import annotations

import doctest
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler

from determined.pytorch import samplers

SHOWN = 60  # elements of an endless stream that are compared

COUNTS = st.integers(0, 12)
SHARDS = st.integers(1, 5).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1)))
STEPS = st.one_of(
    st.tuples(st.just("shard"), SHARDS),
    st.tuples(st.just("skip"), st.integers(0, 15)),
    st.tuples(st.just("shuffle"), st.integers(0, 2**32 - 1)),
)
ENDLESS_STEPS = st.one_of(
    st.tuples(st.just("shard"), SHARDS),
    st.tuples(st.just("skip"), st.integers(0, 15)),
)


def build(inner: Iterable[Any], steps: list[tuple[str, Any]], suffix: str) -> Any:
    """Compose the public samplers: suffix "Sampler" over elements, "BatchSampler" over batches."""
    kinds = {"repeat": "Repeat", "shard": "Distributed", "skip": "Skip", "shuffle": "ReproducibleShuffle"}
    for name, argument in steps:
        cls = getattr(samplers, kinds[name] + suffix)
        arguments = {"repeat": (), "shard": argument}.get(name, (argument,))
        inner = cls(inner, *arguments)
    return inner


def passes_of(elements: list[Any], steps: list[tuple[str, Any]], count: int) -> list[list[Any]]:
    """What `count` iterations yield, by lists alone."""
    passes = [list(elements) for _ in range(count)]
    for name, argument in steps:
        if name == "shard":
            size, rank = argument
            passes = [[e for i, e in enumerate(p) if i % size == rank] for p in passes]
        elif name == "skip":
            passes = [p[argument:] for p in passes]
        else:
            generator = np.random.RandomState(argument)
            for p in passes:
                generator.shuffle(p)
    return passes


def batches_of(count: int) -> list[list[int]]:
    return [[2 * i, 2 * i + 1] for i in range(count)]


@given(count=COUNTS, steps=st.lists(STEPS, max_size=4), iterations=st.integers(1, 3))
def test_any_finite_composition_equals_the_plain_lists(
    count: int, steps: list[tuple[str, Any]], iterations: int
) -> None:
    sampler = build(range(count), steps, "Sampler")
    assert [list(sampler) for _ in range(iterations)] == passes_of(list(range(count)), steps, iterations)


@given(count=COUNTS, steps=st.lists(STEPS, max_size=4), iterations=st.integers(1, 3))
def test_any_finite_composition_of_batches_equals_the_plain_lists(
    count: int, steps: list[tuple[str, Any]], iterations: int
) -> None:
    sampler = build(batches_of(count), steps, "BatchSampler")
    assert [list(sampler) for _ in range(iterations)] == passes_of(batches_of(count), steps, iterations)


@given(
    count=st.integers(1, 12),
    before=st.lists(STEPS, max_size=3),
    after=st.lists(ENDLESS_STEPS, max_size=3),
    suffix=st.sampled_from(["Sampler", "BatchSampler"]),
)
def test_any_endless_composition_equals_the_plain_lists(
    count: int, before: list[tuple[str, Any]], after: list[tuple[str, Any]], suffix: str
) -> None:
    elements = batches_of(count)
    one_pass = len(passes_of(elements, before, 1)[0])
    sampler = build(elements, [*before, ("repeat", None), *after], suffix)
    if one_pass == 0:
        with pytest.raises(ValueError, match="got nothing"):
            next(iter(sampler))
        return
    stream = list(itertools.chain(*passes_of(elements, before, -(-SHOWN // one_pass))))
    expected = passes_of(stream, after, 1)[0]
    assert list(itertools.islice(sampler, len(expected))) == expected


@given(
    count=st.integers(1, 12),
    repeat=st.booleans(),
    skip=st.integers(0, 10),
    shard=SHARDS,
)
def test_adapting_repeats_then_shards_then_skips(count: int, repeat: bool, skip: int, shard: tuple[int, int]) -> None:
    stream = batches_of(count) * (SHOWN if repeat else 1)
    size, rank = shard
    expected = [batch for i, batch in enumerate(stream) if i % size == rank][skip:]
    adapted = samplers.adapt_batch_sampler(batches_of(count), repeat, skip, size, rank)
    assert list(itertools.islice(adapted, len(expected))) == expected


def test_adapting_to_nothing_returns_the_sampler_itself() -> None:
    inner = BatchSampler(SequentialSampler(range(4)), 2, False)
    assert samplers.adapt_batch_sampler(inner) is inner


@given(count=COUNTS, size=st.integers(1, 6), suffix=st.sampled_from(["Sampler", "BatchSampler"]))
def test_the_ranks_partition_the_elements(count: int, size: int, suffix: str) -> None:
    shards = [list(build(batches_of(count), [("shard", (size, rank))], suffix)) for rank in range(size)]
    assert sorted(itertools.chain(*shards)) == batches_of(count)


@given(count=COUNTS, shard=SHARDS, suffix=st.sampled_from(["Sampler", "BatchSampler"]))
def test_the_length_of_a_shard_is_what_its_rank_gets(count: int, shard: tuple[int, int], suffix: str) -> None:
    sampler = build(batches_of(count), [("shard", shard)], suffix)
    assert len(sampler) == len(list(sampler))


@given(count=COUNTS, shard=SHARDS)
def test_the_length_of_a_shard_of_an_endless_stream_is_that_of_one_pass(count: int, shard: tuple[int, int]) -> None:
    endless = build(range(count), [("repeat", None), ("shard", shard)], "Sampler")
    assert len(endless) == len(range(count)[shard[1] :: shard[0]])


@given(
    count=COUNTS,
    step=st.sampled_from([("repeat", None), ("skip", 3), ("shuffle", 5)]),
    suffix=st.sampled_from(["Sampler", "BatchSampler"]),
)
def test_repeating_skipping_and_shuffling_keep_the_length(count: int, step: tuple[str, Any], suffix: str) -> None:
    assert len(build(batches_of(count), [step], suffix)) == count


class Lengthless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_sampler_without_a_length_still_iterates() -> None:
    assert list(samplers.DistributedSampler(Lengthless(), 2, 0)) == [0, 2]


def test_the_length_over_a_sampler_without_one_is_a_type_error_with_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"Lengthless.*has none; give that sampler a __len__"):
        len(samplers.SkipSampler(Lengthless(), 1))


@pytest.mark.parametrize("cls", [samplers.RepeatSampler, samplers.RepeatBatchSampler])
def test_repeating_nothing_is_an_error_with_the_remedy(cls: type) -> None:
    with pytest.raises(ValueError, match=r"got nothing from a pass over \[\].*pass a sampler that yields"):
        next(iter(cls([])))


def test_repeating_a_generator_is_an_error_at_its_second_pass() -> None:
    stream = iter(samplers.RepeatSampler(x for x in range(2)))
    assert [next(stream), next(stream)] == [0, 1]
    with pytest.raises(ValueError, match="a list rather than a generator"):
        next(stream)


@given(
    count=COUNTS,
    seed=st.integers(0, 2**32 - 1),
    epochs=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    suffix=st.sampled_from(["Sampler", "BatchSampler"]),
)
def test_set_epoch_gives_the_order_of_that_epoch(count: int, seed: int, epochs: list[int], suffix: str) -> None:
    orders = passes_of(batches_of(count), [("shuffle", seed)], 8)
    sampler = build(batches_of(count), [("shuffle", seed)], suffix)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        assert [list(sampler), list(sampler)] == [orders[epoch], orders[epoch + 1]]


def test_set_epoch_reaches_the_shuffles_underneath() -> None:
    def twice_shuffled() -> samplers.ReproducibleShuffleBatchSampler[int]:
        batches = BatchSampler(samplers.ReproducibleShuffleSampler(range(10), 1), 3, False)
        return samplers.ReproducibleShuffleBatchSampler(samplers.SkipBatchSampler(batches, 1), 2)

    walked, jumped = twice_shuffled(), twice_shuffled()
    orders = [list(walked) for _ in range(4)]
    jumped.set_epoch(3)
    assert list(jumped) == orders[3]


def test_an_iteration_that_never_starts_uses_up_no_order() -> None:
    sampler = samplers.ReproducibleShuffleSampler(range(20), 3)
    iter(sampler)
    assert list(sampler) == list(samplers.ReproducibleShuffleSampler(range(20), 3))


def test_an_iteration_that_is_left_early_uses_up_one_order() -> None:
    left, whole = (samplers.ReproducibleShuffleSampler(range(20), 3) for _ in range(2))
    next(iter(left))
    list(whole)
    assert list(left) == list(whole)


def test_a_worker_process_does_not_change_the_order_of_epochs() -> None:
    def epochs(**options: Any) -> list[list[int]]:
        sampler = samplers.ReproducibleShuffleBatchSampler(batches_of(8), 3)
        loader: Any = DataLoader(list(range(16)), batch_sampler=sampler, **options)
        return [[batch.tolist() for batch in loader] for _ in range(2)]

    # Spawned, since a fork of a process with threads is unsafe; kept, since starting one is slow.
    worker = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}
    assert epochs(**worker) == epochs()


def test_a_pickled_shuffle_goes_on_at_its_epoch() -> None:
    sampler = samplers.ReproducibleShuffleSampler(range(9), 3)
    list(sampler)
    copied = pickle.loads(pickle.dumps(sampler))
    assert list(copied) == list(sampler)


@pytest.mark.parametrize("name", [name for name in samplers.__all__ if name.endswith("Sampler")])
def test_every_sampler_is_one_of_torch(name: str) -> None:
    assert issubclass(getattr(samplers, name), Sampler)


def test_numpy_integers_are_ints() -> None:
    assert list(samplers.SkipSampler(range(4), np.int64(3))) == [3]  # type: ignore[arg-type]


SHARD_MAKERS = [
    (samplers.DistributedSampler, "num_workers"),
    (samplers.DistributedBatchSampler, "num_workers"),
    (samplers.adapt_batch_sampler, "num_replicas"),
]


@pytest.mark.parametrize(("make", "name"), SHARD_MAKERS)
@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True, None])
def test_a_number_of_ranks_below_one_or_of_another_type_is_refused(
    make: Callable[..., Any], name: str, value: object
) -> None:
    rule = rf"{make.__name__}\({name}={value!r}\): {name} must be an int >= 1; pass context.distributed"
    with pytest.raises(ValueError, match=rule):
        make([[0]], **{name: value, "rank": 0})


@pytest.mark.parametrize(("make", "name"), SHARD_MAKERS)
@pytest.mark.parametrize("value", [-1, 0.0, "0", False, None])
def test_a_negative_rank_or_one_of_another_type_is_refused(make: Callable[..., Any], name: str, value: object) -> None:
    rule = rf"{make.__name__}\(rank={value!r}\): rank must be an int >= 0; ranks count from 0, pass"
    with pytest.raises(ValueError, match=rule):
        make([[0]], **{name: 2, "rank": value})


@pytest.mark.parametrize(("make", "name"), SHARD_MAKERS)
@pytest.mark.parametrize("value", [2, 7])
def test_a_rank_beyond_the_last_is_refused(make: Callable[..., Any], name: str, value: int) -> None:
    rule = rf"{make.__name__}\({name}=2, rank={value}\): rank must be below {name}; ranks count from 0, pass"
    with pytest.raises(ValueError, match=rule):
        make([[0]], **{name: 2, "rank": value})


@pytest.mark.parametrize("make", [samplers.SkipSampler, samplers.SkipBatchSampler, samplers.adapt_batch_sampler])
@pytest.mark.parametrize("value", [-1, 1.0, "1", True, None])
def test_a_skip_that_is_no_count_is_refused(make: Callable[..., Any], value: object) -> None:
    rule = rf"{make.__name__}\(skip={value!r}\): skip must be an int >= 0; pass the number"
    with pytest.raises(ValueError, match=rule):
        make([[0]], skip=value)


SHUFFLES = [samplers.ReproducibleShuffleSampler, samplers.ReproducibleShuffleBatchSampler]


@pytest.mark.parametrize("make", SHUFFLES)
@pytest.mark.parametrize("value", [-1, 1.0, "1", True, None])
def test_a_seed_that_is_no_count_is_refused(make: Callable[..., Any], value: object) -> None:
    rule = rf"{make.__name__}\(seed={value!r}\): seed must be an int >= 0; pass context.get_trial_seed"
    with pytest.raises(ValueError, match=rule):
        make([[0]], seed=value)


@pytest.mark.parametrize("make", SHUFFLES)
def test_a_seed_that_numpy_cannot_take_is_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"seed=4294967296\): seed must be at most 2\*\*32 - 1; pass"):
        make([[0]], seed=2**32)


@pytest.mark.parametrize("make", SHUFFLES)
@pytest.mark.parametrize("value", [-1, 1.0, "1", True, None])
def test_an_epoch_that_is_no_count_is_refused(make: Callable[..., Any], value: Any) -> None:
    rule = rf"{make.__name__}.set_epoch\(epoch={value!r}\): epoch must be an int >= 0; pass the number"
    with pytest.raises(ValueError, match=rule):
        make([[0]], seed=1).set_epoch(value)


def test_the_examples_of_the_documentation_hold() -> None:
    assert doctest.testmod(samplers).failed == 0
