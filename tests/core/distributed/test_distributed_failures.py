"""What the other ranks see when one of them dies, freezes, errs or leaves."""

from __future__ import annotations

import os
import pickle
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from core_ranks import Ranks, contexts, free_port, numbers, together

from determined import core, errors

# An item that says when its collective begins.
ANNOUNCED = """
class Announced:
    def __init__(self, content):
        self.content = content
    def __reduce__(self):
        say("begins")
        return Announced, (self.content,)
"""

# The rank that comes second names both calls.
MISMATCH = r"rank 1 called gather\(\) while rank [02] called allgather\(\)|" + (
    r"rank [02] called allgather\(\) while rank 1 called gather\(\)"
)

# Rank 2 does not come to the second collective.
WITHOUT_RANK_2 = """
say(context.allgather(rank))
if rank == 2:
    hear()
say(outcome(context.allgather, rank))
say(outcome(context.broadcast, rank))
hear()
"""


@pytest.mark.parametrize("force_tcp", [False, True])
def test_killed_rank_is_named_on_all_others_at_once(force_tcp: bool, ranks: Ranks) -> None:
    started = ranks.job(WITHOUT_RANK_2, 4, force_tcp=force_tcp, pub_port=free_port())
    assert {each.line() for each in started} == {"[0, 1, 2, 3]"}
    started[2].kill()
    for survivor in (started[0], started[1], started[3]):
        assert survivor.line().startswith("PeerLostException: allgather(): rank 2 is gone")


def test_rank_that_comes_after_the_others_failed_is_told_at_once() -> None:
    with contexts(3) as made:
        together(made[:2], lambda each: each.gather(1) if each.rank == 1 else each.allgather(1))
        with pytest.raises(errors.MisuseError, match=MISMATCH):
            made[2].allgather(1)


def test_calls_after_a_loss_fail_at_once_and_tell_of_it(ranks: Ranks) -> None:
    started = ranks.job(WITHOUT_RANK_2, 3)
    assert {each.line() for each in started} == {"[0, 1, 2]"}
    started[2].kill()
    for survivor in started[:2]:
        survivor.line()
        assert "broadcast(): the ranks cannot exchange objects any more since: allgather(): rank 2" in survivor.line()


def test_killed_chief_is_named_on_all_workers(ranks: Ranks) -> None:
    started = ranks.job("say(context.allgather(rank))\nif rank == 0: hear()\nsay(outcome(context.gather, 1))", 3)
    assert {each.line() for each in started} == {"[0, 1, 2]"}
    started[0].kill()
    for survivor in started[1:]:
        assert survivor.line().startswith("PeerLostException: gather(): rank 0 is gone")


def test_rank_killed_while_it_sends_is_named(ranks: Ranks) -> None:
    program = (
        ANNOUNCED
        + """
say(context.allgather(rank))
if rank == 0:
    hear()
say(outcome(context.allgather, Announced(bytes(100_000_000))))
"""
    )
    chief, worker = ranks.job(program, 2)
    assert [chief.line(), worker.line(), worker.line()] == ["[0, 1]", "[0, 1]", "begins"]
    worker.kill()
    chief.tell()
    assert chief.line() == "begins"
    assert "rank 1 is gone" in chief.line()


def test_frozen_rank_is_named_after_the_timeout(ranks: Ranks) -> None:
    started = ranks.job(WITHOUT_RANK_2, 3, timeout=3)
    assert {each.line() for each in started} == {"[0, 1, 2]"}
    started[2].signal(signal.SIGSTOP)
    for survivor in started[:2]:
        assert "allgather(): rank 2 did not come within 3 s" in survivor.line()


def test_frozen_chief_is_named_after_the_timeout(ranks: Ranks) -> None:
    program = "say(context.allgather(rank))\nif rank == 0: hear()\nsay(outcome(context.allgather, 1))"
    chief, worker = ranks.job(program, 2, timeout=3)
    assert [chief.line(), worker.line()] == ["[0, 1]", "[0, 1]"]
    chief.signal(signal.SIGSTOP)
    assert re.search(r"rank 0 could not be reached at .* \(its store does not answer\) within 3 s", worker.line())


def test_timeout_comes_from_the_environment_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_DISTRIBUTED_TIMEOUT", "0.2")
    with contexts(3, timeout=None) as (chief, _, worker):
        results = together([chief, worker], lambda each: each.allgather(1))
    assert all("rank 1 did not come within 0.2 s" in str(result) for result in results)
    assert all("DET_DISTRIBUTED_TIMEOUT" in str(result) and result.ranks == (1,) for result in results)


def test_chief_that_never_comes_is_named_with_its_address() -> None:
    port = free_port()
    worker = core.DistributedContext(**numbers(1, 2), timeout=0.2, pub_port=port)
    with pytest.raises(errors.PeerLostException, match=f"rank 0 could not be reached at .*:{port} .* within 0.2 s"):
        worker.allgather(1)
    worker.close()


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf"])
def test_impossible_timeouts_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_DISTRIBUTED_TIMEOUT", value)
    with pytest.raises(ValueError, match=f"DET_DISTRIBUTED_TIMEOUT='{value}': pass a number of seconds"):
        core.DistributedContext.single()


@pytest.mark.parametrize("value", [0, -1, float("nan"), "soon"])
def test_impossible_timeout_arguments_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="timeout="):
        core.DistributedContext(**numbers(0, 1), timeout=value)


class Stubborn:
    """Cannot be pickled on one rank."""

    def __reduce__(self) -> Any:
        raise RuntimeError("never")


class Brittle:
    """Can be pickled, but made again only in the threads that it likes."""

    def __init__(self, disliked: int) -> None:
        self.disliked = disliked

    def __reduce__(self) -> Any:
        return _make_again, (self.disliked,)


here = threading.local()


def _make_again(disliked: int) -> Brittle:
    if here.rank == disliked:
        raise RuntimeError("not here")
    return Brittle(disliked)


def calling(call: str, item_of: Callable[[int], Any]) -> Callable[[Any], Any]:
    def act(context: Any) -> Any:
        here.rank = context.rank
        return getattr(context, call)(item_of(context.rank))

    return act


@pytest.mark.parametrize(("call", "failing"), [("allgather", 0), ("allgather", 1), ("gather", 2), ("broadcast", 0)])
def test_item_that_cannot_be_pickled_is_named_where_it_is_and_elsewhere(call: str, failing: int) -> None:
    with contexts(3) as made:
        results = together(made, calling(call, lambda rank: Stubborn() if rank == failing else rank))
    own = results.pop(failing)
    assert isinstance(own, TypeError)
    assert "Stubborn cannot be pickled: RuntimeError: never" in str(own)
    assert all(isinstance(each, errors.PeerLostException) and each.ranks == (failing,) for each in results)
    assert all(f"Rank {failing} failed" in str(each) and "Stubborn" in str(each) for each in results)


def test_ranks_go_on_after_an_item_that_could_not_be_pickled() -> None:
    with contexts(3) as made:
        together(made, calling("allgather", lambda rank: Stubborn() if rank == 1 else rank))
        assert together(made, calling("allgather", lambda rank: rank)) == [[0, 1, 2]] * 3


@pytest.mark.parametrize(("failing", "call", "other"), [(0, "gather", 1), (0, "allgather", 1), (1, "broadcast", 0)])
def test_item_that_cannot_be_unpickled_is_named_there_and_then_elsewhere(failing: int, call: str, other: int) -> None:
    with contexts(3) as made:
        results = together(made, calling(call, lambda rank: Brittle(failing)))
        assert isinstance(results[failing], TypeError)
        item = f"the item of rank {other}, a test_distributed_failures.Brittle, cannot be unpickled here"
        assert item in str(results[failing])
        for after in together(made, calling(call, lambda rank: 0)):
            assert isinstance(after, errors.PeerLostException)
            assert after.ranks == (failing,)
            assert "not here" in str(after)


def test_different_calls_at_the_same_time_are_named_on_all_ranks() -> None:
    with contexts(3) as made:
        results = together(made, lambda each: each.gather(1) if each.rank == 1 else each.allgather(1))
    for each in results:
        assert isinstance(each, errors.MisuseError)
        assert re.search(MISMATCH, str(each))


@pytest.mark.parametrize("leaving", [0, 1])
def test_rank_that_closes_while_others_wait_is_named(leaving: int) -> None:
    with contexts(3) as made:
        together(made, lambda each: each.allgather(1))
        results = together(made, lambda each: each.close() if each.rank == leaving else each.allgather(1))
    results.pop(leaving)
    for each in results:
        assert isinstance(each, errors.PeerLostException)
        assert f"rank {leaving} has closed its DistributedContext" in str(each)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("have_met", [False, True])
def test_closing_ends_the_wait_of_another_thread(rank: int, have_met: bool) -> None:
    with contexts(3) as made:
        together(made if have_met else [], lambda each: each.allgather(1))
        entered = threading.Event()

        class Entering:
            def __reduce__(self) -> Any:
                entered.set()
                return int, ()

        def act(close: bool) -> Any:
            if close:
                entered.wait()
                return made[rank].close()
            return made[rank].allgather(Entering())

        _, waiting = together([True, False], act)
    assert isinstance(waiting, errors.InternalException)
    assert "after close()" in str(waiting)


def test_calls_after_close_are_refused() -> None:
    with contexts(2) as (chief, _):
        chief.close()
        with pytest.raises(errors.InternalException, match=r"gather\(\) cannot go on after close"):
            chief.gather(1)


def test_interrupted_rank_leaves_nobody_waiting(ranks: Ranks) -> None:
    program = (
        ANNOUNCED
        + """
say(context.allgather(rank))
if rank == 0:
    hear()
try:
    context.allgather(Announced(rank) if rank else rank)
except errors.PeerLostException as error:
    say(error)
except KeyboardInterrupt:
    say(outcome(context.allgather, rank))
"""
    )
    chief, worker = ranks.job(program, 2)
    assert [chief.line(), worker.line(), worker.line()] == ["[0, 1]", "[0, 1]", "begins"]
    worker.signal(signal.SIGINT)
    assert "was interrupted here by KeyboardInterrupt()" in worker.line()
    chief.tell()
    # The reason comes along unless the interrupt has torn a frame.
    told = chief.line()
    assert "rank 1 failed: allgather() was interrupted here by KeyboardInterrupt()" in told or "rank 1 is gone" in told


def test_ranks_that_end_without_closing_are_gone_in_order(ranks: Ranks) -> None:
    started = ranks.job("context.allgather(rank); say('done')", 3)
    assert [each.line() for each in started] == ["done"] * 3
    assert [each.process.wait() for each in started] == [0, 0, 0]


FORKING = """
import time
say(context.allgather(rank))
if rank == 1:
    child = os.fork()
    if not child:
        say(outcome(context.allgather, rank))
        context.close()
        time.sleep(600)
    say(child)
hear()
say(outcome(context.allgather, rank))
"""


def test_forked_child_can_neither_take_part_nor_keep_its_dead_parent_alive(ranks: Ranks) -> None:
    chief, worker = ranks.job(FORKING, 2)
    assert [chief.line(), worker.line()] == ["[0, 1]", "[0, 1]"]
    told = sorted([worker.line(), worker.line()])
    child = int(told[0])
    try:
        assert "belongs to process" in told[1]
        worker.kill()
        chief.tell()
        assert "rank 1 is gone" in chief.line()
    finally:
        os.kill(child, signal.SIGKILL)


def test_forked_child_leaves_the_connections_of_its_parent_alone(ranks: Ranks) -> None:
    program = FORKING.replace("time.sleep(600)", "os._exit(0)").replace("say(child)", "os.waitpid(child, 0)")
    chief, worker = ranks.job(program, 2)
    assert [chief.line(), worker.line()] == ["[0, 1]", "[0, 1]"]
    assert "belongs to process" in worker.line()
    chief.tell()
    worker.tell()
    assert [chief.line(), worker.line()] == ["[0, 1]", "[0, 1]"]


def test_the_exception_survives_pickling() -> None:
    again = pickle.loads(pickle.dumps(errors.PeerLostException("gone", [3])))
    assert (str(again), again.ranks) == ("gone", (3,))
