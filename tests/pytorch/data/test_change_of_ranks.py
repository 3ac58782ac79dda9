"""Which samples ranks train when their number changes: the rest of the epoch, each once, in the same batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, IterableDataset, Sampler, SequentialSampler, TensorDataset

from determined import core
from determined.pytorch import DataLoader
from determined.pytorch._data.split import Sizing
from determined.pytorch._data.stream import IndexedStream, stream_of

SEED = 3


@dataclasses.dataclass
class Rank:
    """One of several ranks that have loaders with these batch sizes."""

    rank: int
    sizes: Sequence[int]

    @property
    def size(self) -> int:
        return len(self.sizes)

    @property
    def is_chief(self) -> bool:
        return self.rank == 0

    def allgather(self, own: Any) -> list[Any]:
        return list(self.sizes)


class Halves(Sampler[int]):
    """The even indices, then the odd ones; without a length if `length` is None."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(range(0, self.count, 2), range(1, self.count, 2))


class SizedHalves(Halves):
    def __len__(self) -> int:
        return self.count


@dataclasses.dataclass(frozen=True)
class Data:
    """How a program makes its loader."""

    samples: int
    batch_size: int = 2
    is_global: bool = False
    """Whether the batch size is that of all ranks together."""
    shuffle: bool = False
    drop_last: bool = False
    sampler: str = ""

    def sizes(self, ranks: int) -> list[int]:
        if not self.is_global:
            return [self.batch_size] * ranks
        part, rest = divmod(self.batch_size, ranks)
        return [part + (rank < rest) for rank in range(ranks)]

    def loader(self, batch_size: int) -> DataLoader:
        data = TensorDataset(torch.arange(self.samples))
        if self.sampler == "batches":
            return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), batch_size, self.drop_last))
        sampler = {"sized": SizedHalves, "unsized": Halves}.get(self.sampler)
        return DataLoader(
            data,
            batch_size,
            shuffle=self.shuffle,
            sampler=sampler(self.samples) if sampler else None,
            drop_last=self.drop_last,
        )

    def epoch(self, number: int) -> list[int]:
        """Return the samples of an epoch in their order, as one rank trains them in batches of one."""
        if self.sampler in ("sized", "unsized"):
            return list(Halves(self.samples))
        whole = dataclasses.replace(self, drop_last=False)
        fetch = stream_of(whole.loader(1), cast(Any, core.DistributedContext.single()), SEED).open(0, SEED)
        return [int(fetch()[0]) for _ in range((number + 1) * self.samples)][number * self.samples :]


@dataclasses.dataclass
class Training:
    """A training that is stopped and resumed with other numbers of ranks."""

    data: Data
    sizing: Sizing = Sizing()  # noqa: RUF009  # immutable
    batches: list[list[list[int]]] = dataclasses.field(default_factory=list)
    """The loader's batches that make up each batch, in the order of the data."""
    state: dict[str, Any] | None = None

    def train(self, ranks: int, count: int) -> None:
        """Train batches with a number of ranks, and stop."""
        done, sizes = len(self.batches), self.data.sizes(ranks)
        streams = [self._stream(Rank(rank, sizes)) for rank in range(ranks)]
        if self.state is not None:
            for stream in streams:
                stream.load_state_dict(self.state, done)
        fetches = [stream.open(done, SEED) for stream in streams]
        micro_batches = streams[0].micro_batches
        for _ in range(count):
            parts = [[fetch()[0].tolist() for fetch in fetches] for _ in range(micro_batches)]
            self.batches.append([part for of_all in parts for part in of_all])
        self.state = streams[0].state_dict()
        self.epochs = streams[0].epochs

    def _stream(self, rank: Rank) -> IndexedStream:
        loader = self.data.loader(rank.sizes[rank.rank])
        return cast(IndexedStream, stream_of(loader, cast(Any, rank), SEED, sizing=self.sizing))

    @property
    def samples(self) -> list[int]:
        return [index for batch in self.batches for part in batch for index in part]


CHANGES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=6)
ORDERS = st.sampled_from([{}, {"shuffle": True}, {"sampler": "sized"}, {"sampler": "batches"}])
FIXED = st.fixed_dictionaries({"samples": st.integers(1, 40), "batch_size": st.integers(1, 7)})
# Of sizes that divide by every number of ranks.
DIVIDED = st.fixed_dictionaries(
    {"samples": st.integers(1, 90), "batch_size": st.sampled_from([12, 24]), "is_global": st.just(True)}
)
# In plain order, in which no sample can be taken for one of the next epoch.
DROPPING = st.fixed_dictionaries({"samples": st.integers(9, 60), "batch_size": st.integers(4, 9)})


def made(parts: tuple[dict[str, Any], dict[str, Any]]) -> Data:
    sizes, order = parts
    return Data(**sizes, **(order if order.get("sampler") != "batches" or not sizes.get("is_global") else {}))


FIXED_DATA = st.tuples(FIXED, ORDERS).map(made)
DATA = FIXED_DATA | st.tuples(DIVIDED, ORDERS).map(made)


def trained(data: Data, changes: Sequence[tuple[int, int]]) -> Training:
    training = Training(data)
    for ranks, count in changes:
        training.train(ranks, count)
    return training


@given(DATA, CHANGES)
@settings(deadline=None)
def test_every_sample_of_an_epoch_is_trained_once(data: Data, changes: list[tuple[int, int]]) -> None:
    samples = trained(data, changes).samples
    expected = itertools.chain.from_iterable(map(data.epoch, itertools.count()))
    assert samples == list(itertools.islice(expected, len(samples)))


@given(DROPPING, st.booleans(), CHANGES)
@settings(deadline=None)
def test_with_drop_last_or_unequal_parts_less_than_a_batch_of_an_epoch_is_left_out(
    sizes: dict[str, int], is_global: bool, changes: list[tuple[int, int]]
) -> None:
    data = Data(**sizes, is_global=is_global, drop_last=True)
    samples = trained(data, changes).samples
    for here, following in itertools.pairwise(samples):
        if following != here + 1:
            assert following == 0, "no sample is left out in the middle of an epoch, and none comes twice"
            assert data.samples - here - 1 < data.batch_size, "what is left out does not fill a batch"


@given(DATA, CHANGES)
@settings(deadline=None)
def test_the_epochs_are_those_of_the_samples(data: Data, changes: list[tuple[int, int]]) -> None:
    training = trained(data, changes)
    assert training.epochs.of(len(training.batches)) == len(training.samples) // data.samples


@given(FIXED_DATA, st.sampled_from([2, 4, 6]), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=5))
@settings(deadline=None)
def test_batches_stay_the_same_where_the_ranks_divide(data: Data, most: int, changes: list[tuple[int, int]]) -> None:
    divisors = [n for n in range(1, most + 1) if most % n == 0]
    training = Training(data, Sizing(planned_ranks=most))
    for choice, count in changes:
        training.train(divisors[choice % len(divisors)], count)
    unchanged = Training(data)
    unchanged.train(most, len(training.batches))
    assert training.batches == unchanged.batches


def test_a_batch_gets_its_size_back() -> None:
    training = Training(Data(samples=60, batch_size=3))
    sizes = []
    for ranks in (2, 3, 1, 4, 2):
        training.train(ranks, 1)
        sizes.append(len(list(itertools.chain.from_iterable(training.batches[-1]))))
    assert sizes == [6, 9, 6, 12, 6]  # 3 and 4 ranks cannot train 6 samples in batches of 3


def test_a_sampler_without_a_length_continues_with_its_next_sample() -> None:
    training = Training(Data(samples=50, batch_size=2, sampler="unsized"))
    for ranks in (2, 3, 1, 4):
        training.train(ranks, 3)
    assert training.samples == (list(Halves(50)) * 2)[: len(training.samples)]


def test_unequal_parts_are_followed_by_equal_ones() -> None:
    training = Training(Data(samples=20, batch_size=8, is_global=True))
    training.train(3, 3)  # the second epoch begins after 2 batches, since 4 samples fill none
    training.train(4, 2)
    assert training.samples == [*range(16), *range(20), *range(4)]


def test_a_batch_sampler_that_makes_batches_for_each_rank_continues_at_its_batch() -> None:
    training = Training(Data(samples=60, batch_size=12, is_global=True, sampler="batches"))
    for ranks, count in ((2, 2), (1, 1), (4, 1), (3, 4)):
        training.train(ranks, count)
    assert training.samples == (list(range(60)) * 2)[: 8 * 12]


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))

    def __len__(self) -> int:
        return 10


def test_iterable_data_begins_its_pass_again_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def stream() -> Any:
        return stream_of(DataLoader(Numbers(), batch_size=2), core.DistributedContext.single(), SEED)

    first = stream()
    first.load_state_dict({"passes": 1, "in_pass": 2, "ranks": 2}, 7)
    fetch = first.open(7, SEED)
    assert "begins the pass again" in caplog.text
    assert "Use a map-style data set" in caplog.text
    assert first.micro_batches == 2
    assert [fetch().tolist() for _ in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert first.epochs.of(7) == 1
    # The same number of ranks continues where it was.
    second = stream()
    second.load_state_dict(first.state_dict(), 9)
    assert second.micro_batches == 2
    assert second.open(9, SEED)().tolist() == [8, 9]
    assert (second.epochs.of(9), second.epochs.of(10)) == (1, 2)


def test_a_program_that_updates_its_scaler_trains_a_batch_at_once(caplog: pytest.LogCaptureFixture) -> None:
    training = Training(Data(samples=60, batch_size=3), Sizing(accumulates=False))
    training.train(2, 1)
    training.train(1, 1)
    assert training.batches[1:] == [[[6, 7, 8]]]
    assert "A batch had a size of 6" in caplog.text


def test_other_batch_sizes_with_the_same_ranks_are_those_of_the_program() -> None:
    training = Training(Data(samples=60, batch_size=3))
    training.train(2, 1)
    training.data = dataclasses.replace(training.data, batch_size=6)
    training.train(2, 1)
    assert training.batches[1:] == [[[*range(6, 12)], [*range(12, 18)]]]
    training.train(1, 1)
    assert training.batches[2:] == [[[*range(18, 24)], [*range(24, 30)]]]
