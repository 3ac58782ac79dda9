"""The collectives of core.DistributedContext among several ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from core_ranks import Ranks, contexts, free_port, numbers, together
from hypothesis import given
from hypothesis import strategies as st

CALLS = ("gather", "gather_local", "allgather", "allgather_local", "broadcast", "broadcast_local")


ALL_CALLS = """
import numpy
items = [
    ["nested", {"rank": rank, "more": (None, {1, 2}, b"bytes")}],
    numpy.full((2, 3), rank, dtype="float32"),
    None,
    errors.PeerLostException("gone", [rank]),
    "",
]
for call in %r:
    for item in items:
        say(call, repr(getattr(context, call)(item)))
context.close()
"""


def expected_of_all_calls(rank: int, size: int) -> list[str]:
    def items(of: int) -> list[Any]:
        nested = ["nested", {"rank": of, "more": (None, {1, 2}, b"bytes")}]
        return [nested, np.full((2, 3), of, dtype="float32"), None, LostOf(of), ""]

    lines = []
    for call in CALLS:
        for position in range(5):
            everything: Any = [items(each)[position] for each in range(size)]
            if call.startswith("gather") and rank:
                everything = None
            elif call.startswith("broadcast"):
                everything = everything[0]
            lines.append(f"{call} {everything!r}".replace("\n", " "))
    return lines


class LostOf:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __repr__(self) -> str:
        return "PeerLostException('gone')"


@pytest.mark.parametrize(("size", "force_tcp"), [(2, False), (2, True), (4, False), (4, True)])
def test_every_rank_gets_what_each_collective_promises(size: int, force_tcp: bool, ranks: Ranks) -> None:
    started = ranks.job(ALL_CALLS % (CALLS,), size, force_tcp=force_tcp, pub_port=free_port())
    told = [[each.line() for _ in range(30)] for each in started]
    assert told == [expected_of_all_calls(rank, size) for rank in range(size)]


def test_exceptions_keep_their_attributes_on_the_way() -> None:
    from determined import errors

    with contexts(2) as both:
        got = together(both, lambda each: each.allgather(errors.PeerLostException("gone", [each.rank])))
    assert [[error.ranks for error in errors_of] for errors_of in got] == [[(0,), (1,)]] * 2


TWO_MACHINES = """
for call in %r:
    say(call, outcome(getattr(context, call), rank))
context.close()
"""


def test_local_collectives_stay_on_their_machine(ranks: Ranks) -> None:
    options = {"chief_ip": "127.0.0.1", "pub_port": free_port(), "pull_port": free_port(), "timeout": 60}
    arguments = [{**numbers(rank, 4, machines=2), **options} for rank in range(4)]
    started = ranks.start(TWO_MACHINES % (CALLS,), *arguments, DET_DISTRIBUTED_KEY="secret")
    told = [dict(each.line().split(" ", 1) for _ in CALLS) for each in started]
    machines = [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert told == [
        {
            "gather": str([0, 1, 2, 3] if rank == 0 else None),
            "gather_local": str(machines[rank] if rank % 2 == 0 else None),
            "allgather": "[0, 1, 2, 3]",
            "allgather_local": str(machines[rank]),
            "broadcast": "0",
            "broadcast_local": str(machines[rank][0]),
        }
        for rank in range(4)
    ]


def test_machines_of_one_rank_have_it_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_DISTRIBUTED_KEY", "secret")
    with contexts(2, machines=2, chief_ip="127.0.0.1", pub_port=free_port()) as both:
        assert together(both, lambda each: each.allgather_local(each.rank)) == [[0], [1]]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_contexts_can_be_made_in_any_order(order: tuple[int, ...]) -> None:
    with contexts(3, order=order) as made:
        assert together(made, lambda each: each.allgather(each.rank)) == [[0, 1, 2]] * 3


def test_workers_wait_for_a_chief_that_starts_later(ranks: Ranks) -> None:
    program = "say('ready'); say(context.allgather(rank))"
    port = free_port()
    places = [{**numbers(rank, 2), "timeout": 60, "pub_port": port} for rank in range(2)]
    (worker,) = ranks.start(program, places[1])
    assert worker.line() == "ready"
    (chief,) = ranks.start(program, places[0])
    assert [chief.line(), chief.line(), worker.line()] == ["ready", "[0, 1]", "[0, 1]"]


LARGE = """
import hashlib, numpy
item = (bytes([rank]) * 50_000_000, numpy.arange(rank, rank + 6_250_000, dtype="int64"))
for blob, array in context.allgather(item):
    say(hashlib.sha256(blob).hexdigest()[:8], hashlib.sha256(array).hexdigest()[:8], array.flags.writeable)
"""


def test_hundred_megabytes_arrive_whole(ranks: Ranks) -> None:
    first, second = ([each.line() for _ in range(2)] for each in ranks.job(LARGE, 2))
    assert first == second
    assert len(set(first)) == 2


OBJECTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Any]]:
    with contexts(2) as both:
        yield both


@given(st.tuples(OBJECTS, OBJECTS))
def test_any_object_comes_back_equal(pair: list[Any], items: tuple[Any, Any]) -> None:
    assert together(pair, lambda each: each.allgather(items[each.rank])) == [list(items)] * 2


@given(st.lists(st.sampled_from(["float32", "int8", "complex128"]), max_size=5), st.integers(0, 40))
def test_arrays_come_back_equal_writable_and_aligned(pair: list[Any], kinds: list[str], length: int) -> None:
    arrays = [np.arange(length).astype(kind) for kind in kinds]
    for received in together(pair, lambda each: each.broadcast(arrays if each.is_chief else None)):
        assert all(np.array_equal(one, two) for one, two in zip(arrays, received, strict=True))
        assert all(each.flags.writeable and each.flags.aligned for each in received)


def test_the_item_of_the_rank_itself_is_not_a_copy() -> None:
    with contexts(2) as both:
        items = [object(), object()]
        got = together(both, lambda each: each.allgather(items[each.rank]))
    assert got[0][0] is items[0]
    assert got[1][1] is items[1]


def test_threads_of_a_rank_take_turns() -> None:
    with contexts(2) as both:
        four = [each for each in both for _ in range(2)]
        got = together(four, lambda each: [each.allgather("same") for _ in range(50)])
    assert got == [[["same", "same"]] * 50] * 4


def test_closing_and_making_another_at_the_same_port() -> None:
    port = free_port()
    for _ in range(3):
        with contexts(2, pub_port=port) as both:
            assert together(both, lambda each: each.broadcast(each.rank)) == [0, 0]
