"""What ranks hear of each other beside the collectives: events, and ranks that leave."""

from __future__ import annotations

import queue
import signal
from typing import Any

import pytest
from core_ranks import SECONDS, Ranks, contexts, free_port, together

from determined import core


class Inbox:
    """Keeps what one rank is told, to be awaited."""

    def __init__(self) -> None:
        self._events: queue.Queue[tuple[int, Any]] = queue.Queue()
        self._left: queue.Queue[tuple[int, str]] = queue.Queue()

    def on_event(self, sender: int, event: dict[str, Any]) -> None:
        self._events.put((sender, event["n"]))

    def on_left(self, rank: int, why: str) -> None:
        self._left.put((rank, why))

    def event(self) -> tuple[int, Any]:
        return self._events.get(timeout=SECONDS)

    def left(self) -> tuple[int, str]:
        return self._left.get(timeout=SECONDS)


@pytest.fixture
def three() -> Any:
    with contexts(3, pub_port=free_port()) as made:
        yield made


def listen(made: list[Any]) -> list[Inbox]:
    inboxes = [Inbox() for _ in made]
    for context, inbox in zip(made, inboxes, strict=True):
        context.exchange.listen(inbox, 30.0)
    return inboxes


def publish(context: Any, *numbers: int) -> None:
    for number in numbers:
        context.exchange.publish({"kind": "test", "n": number}).result(SECONDS)


def test_one_process_has_no_exchange() -> None:
    assert core.DistributedContext.single().exchange is None


def test_events_of_any_rank_reach_all_in_the_same_order(three: list[Any]) -> None:
    inboxes = listen(three)
    together(three, lambda each: publish(each, *range(20)))
    received = [[inbox.event() for _ in range(60)] for inbox in inboxes]
    assert received[0] == received[1] == received[2]
    for rank in range(3):
        assert [number for sender, number in received[0] if sender == rank] == list(range(20))


def test_what_was_published_before_a_rank_listens_reaches_it_too(three: list[Any]) -> None:
    first, *_ = listen(three[:1])
    publish(three[0], 0, 1, 2)
    assert [first.event() for _ in range(3)] == [(0, 0), (0, 1), (0, 2)]
    together(three, lambda each: each.allgather(1))  # which reads the log as well
    second, third = listen(three[1:])
    for inbox in (second, third):
        assert [inbox.event() for _ in range(3)] == [(0, 0), (0, 1), (0, 2)]


def test_collectives_go_on_beside_events(three: list[Any]) -> None:
    inboxes = listen(three)

    def act(context: Any) -> Any:
        context.exchange.publish({"kind": "test", "n": context.rank})
        return context.allgather(context.rank)

    assert together(three, act) == [[0, 1, 2]] * 3
    assert {inboxes[0].event()[0] for _ in range(3)} == {0, 1, 2}


def test_last_events_before_the_chief_closes_arrive(three: list[Any]) -> None:
    _, *others = listen(three)
    together(three, lambda each: each.allgather(1))
    publish(three[0], 7)
    three[0].close()
    assert [inbox.event() for inbox in others] == [(0, 7)] * 2


@pytest.mark.parametrize("leaving", [0, 1])
def test_rank_that_closes_has_left_in_order(leaving: int, three: list[Any]) -> None:
    inboxes = listen(three)
    together(three, lambda each: each.allgather(1))
    three[leaving].close()
    for inbox in inboxes[:leaving] + inboxes[leaving + 1 :]:
        assert inbox.left() == (leaving, "has closed its DistributedContext")


PROGRAM = """
class Listener:
    def on_event(self, sender, event):
        say("event", sender, event["n"])
    def on_left(self, rank, why):
        say("left", rank, why)
context.exchange.listen(Listener(), %s)
context.allgather(rank)
say("here")
hear()
context.exchange.publish({"kind": "test", "n": rank}).result(60)
%s
hear()
"""


def start(ranks: Ranks, size: int, silence: float = 30.0, then: str = "") -> list[Any]:
    """Ranks that all listen, and say what they are told."""
    started = ranks.job(PROGRAM % (silence, then), size, pub_port=free_port())
    assert {each.line() for each in started} == {"here"}
    return started


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_rank_is_known_to_all_others_at_once(killed: int, ranks: Ranks) -> None:
    started = start(ranks, 3)
    started.pop(killed).kill()
    for survivor in started:
        assert survivor.line().startswith(f"left {killed} its process ended")


def test_last_words_of_a_process_arrive_before_its_end(ranks: Ranks) -> None:
    chief, worker = start(ranks, 2, then="os._exit(1)")
    worker.tell()
    assert chief.line() == "event 1 1"
    assert chief.line().startswith("left 1 its process ended")


def test_frozen_worker_is_lost_after_the_silence_and_learns_of_it(ranks: Ranks) -> None:
    started = start(ranks, 3, silence=3)
    started[2].signal(signal.SIGSTOP)
    for survivor in started[:2]:
        assert survivor.line().startswith("left 2 nothing was heard of it for 3 s")
    started[0].tell()
    for survivor in started[:2]:  # quiet as they are, they are not lost
        assert survivor.line() == "event 0 0"
    started[2].signal(signal.SIGCONT)
    assert started[2].line().startswith("left 0 ")


def test_frozen_chief_is_lost_after_the_silence(ranks: Ranks) -> None:
    started = start(ranks, 2, silence=3)
    started[0].signal(signal.SIGSTOP)
    assert started[1].line().startswith("left 0 nothing was heard of it for 3 s")
