"""The side line of core.DistributedContext: messages beside the collectives, and word of lost ranks."""

from __future__ import annotations

import contextlib
import queue
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from core_ranks import SECONDS, Ranks, contexts, free_port, together

from determined import core, errors

pytestmark = pytest.mark.usefixtures("meeting_folder")


class Inbox:
    """Keeps what the handlers of one rank get, to be awaited."""

    def __init__(self) -> None:
        self._messages: queue.Queue[tuple[int, Any]] = queue.Queue()
        self._losses: queue.Queue[tuple[int, str]] = queue.Queue()

    def on_message(self, rank: int, message: dict[str, Any]) -> None:
        self._messages.put((rank, message))

    def on_lost(self, rank: int, why: str) -> None:
        self._losses.put((rank, why))

    def message(self) -> tuple[int, Any]:
        return self._messages.get(timeout=SECONDS)

    def loss(self) -> tuple[int, str]:
        return self._losses.get(timeout=SECONDS)

    @property
    def is_empty(self) -> bool:
        return self._messages.empty() and self._losses.empty()


@contextlib.contextmanager
def lines(size: int, **options: Any) -> Iterator[tuple[list[Any], list[Inbox]]]:
    """Started side lines of all ranks, in this process."""
    with contexts(size, **options) as made:
        inboxes = [Inbox() for _ in made]
        started = [context.side_line() for context in made]
        for line, inbox in zip(started, inboxes, strict=True):
            line.start(inbox.on_message, inbox.on_lost)
        try:
            yield started, inboxes
        finally:
            together(started, lambda line: line.close())


def test_one_process_has_none() -> None:
    assert core.DistributedContext.single().side_line() is None


def test_it_is_the_same_each_time() -> None:
    with contexts(2) as (chief, worker):
        assert chief.side_line() is chief.side_line()
        assert worker.side_line() is worker.side_line()


@pytest.mark.parametrize("sender", [0, 1, 2])
@pytest.mark.parametrize("force_tcp", [False, True])
def test_sent_messages_reach_the_chief_with_the_rank_of_the_sender(sender: int, force_tcp: bool) -> None:
    with lines(3, force_tcp=force_tcp, pub_port=free_port()) as (started, inboxes):
        started[sender].send({"text": "héllo", "list": [1, None]})
        assert inboxes[0].message() == (sender, {"text": "héllo", "list": [1, None]})


def test_published_messages_reach_all_in_the_same_order() -> None:
    with lines(3) as (started, inboxes):
        together([0, 1], lambda half: [started[0].publish({"half": half, "n": n}) for n in range(100)])
        received = [[inbox.message() for _ in range(200)] for inbox in inboxes]
    assert received[0] == received[1] == received[2]
    assert sorted(message["n"] for _, message in received[0] if message["half"] == 1) == list(range(100))
    assert {rank for rank, _ in received[0]} == {0}


def test_what_was_published_before_a_worker_came_reaches_it_first() -> None:
    with contexts(2) as (chief, worker):
        inboxes = [Inbox(), Inbox()]
        chief.side_line().start(inboxes[0].on_message, inboxes[0].on_lost)
        for number in range(3):
            chief.side_line().publish({"n": number})
        assert [inboxes[0].message()[1]["n"] for _ in range(3)] == [0, 1, 2]
        worker.side_line().start(inboxes[1].on_message, inboxes[1].on_lost)
        assert [inboxes[1].message()[1]["n"] for _ in range(3)] == [0, 1, 2]
        together([worker, chief], lambda each: each.side_line().close())


def test_handlers_can_answer() -> None:
    with contexts(2) as (chief, worker):
        inbox = Inbox()
        line = chief.side_line()
        line.start(lambda rank, message: line.publish({"answer": rank}) if "ask" in message else None, inbox.on_lost)
        worker.side_line().start(inbox.on_message, inbox.on_lost)
        worker.side_line().send({"ask": 1})
        assert inbox.message() == (0, {"answer": 1})
        together([worker, chief], lambda each: each.side_line().close())


def test_handler_that_fails_is_logged_and_the_line_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with contexts(2) as (chief, worker):
        inbox = Inbox()

        def fail_once(rank: int, message: dict[str, Any]) -> None:
            if message["n"] == 0:
                raise RuntimeError("oops")
            inbox.on_message(rank, message)

        chief.side_line().start(fail_once, inbox.on_lost)
        worker.side_line().start(inbox.on_message, inbox.on_lost)
        worker.side_line().send({"n": 0})
        worker.side_line().send({"n": 1})
        assert inbox.message() == (1, {"n": 1})
        together([worker, chief], lambda each: each.side_line().close())
    assert "oops" in caplog.text


def test_messages_of_one_megabyte_arrive() -> None:
    with lines(2) as (started, inboxes):
        message = {"text": "x" * 999_000}
        started[1].send(message)
        assert inboxes[0].message() == (1, message)


def test_collectives_go_on_beside_it() -> None:
    with contexts(2) as made:
        inboxes = [Inbox(), Inbox()]
        for context, inbox in zip(made, inboxes, strict=True):
            context.side_line().start(inbox.on_message, inbox.on_lost)

        def act(context: Any) -> Any:
            context.side_line().send({"n": context.rank})
            return context.allgather(context.rank)

        assert together(made, act) == [[0, 1]] * 2
        assert {inboxes[0].message()[0], inboxes[0].message()[0]} == {0, 1}
        together(made, lambda each: each.side_line().close())


def test_leaving_with_a_goodbye_is_no_loss() -> None:
    with lines(3) as (started, inboxes):
        together(started, lambda line: line.send({}))
        for _ in range(3):
            inboxes[0].message()
        started[2].close()
        started[0].publish({"still": "here"})
        assert inboxes[1].message() == (0, {"still": "here"})
        assert inboxes[0].message() == (0, {"still": "here"})
        started[0].close()
        started[1].close()
        assert all(inbox.is_empty for inbox in inboxes)


def test_last_messages_before_closing_arrive() -> None:
    with lines(2) as (started, inboxes):
        started[1].send({"last": "words"})
        started[1].close()
        assert inboxes[0].message() == (1, {"last": "words"})


def test_closing_twice_is_fine() -> None:
    with lines(2) as (started, _):
        for line in (*started, *started):
            line.close()


def test_line_that_was_never_started_closes_with_its_context() -> None:
    with contexts(2) as (chief, worker):
        inbox = Inbox()
        chief.side_line()
        worker.side_line().start(inbox.on_message, inbox.on_lost)
        worker.side_line().send({})
        together([chief, worker], lambda each: each.allgather(1))
        chief.close()
        worker.side_line().close()
        assert inbox.is_empty


@pytest.mark.parametrize("call", ["send", "publish"])
def test_messages_after_closing_are_refused(call: str) -> None:
    with lines(2) as (started, _):
        started[0].close()
        with pytest.raises(errors.InternalException, match=r"after close\(\)"):
            getattr(started[0], call)({})


def test_workers_cannot_publish() -> None:
    with lines(2) as (started, _), pytest.raises(errors.MisuseError, match=r"publish\(\) was called on rank 1"):
        started[1].publish({})


@pytest.mark.parametrize("message", [[1], "text", {"object": object()}, {"array": {1, 2}}])
def test_what_is_no_message_is_refused(message: Any) -> None:
    with lines(2) as (started, _), pytest.raises(TypeError, match="SideLine: "):
        started[1].send(message)


def test_too_long_messages_are_refused() -> None:
    with lines(2) as (started, _), pytest.raises(ValueError, match="at most 1000000"):
        started[1].send({"text": "x" * 1_000_000})


def test_starting_twice_is_refused() -> None:
    with lines(2) as (started, _), pytest.raises(errors.InternalException, match="called twice"):
        started[0].start(lambda rank, message: None, lambda rank, why: None)


def test_silence_shorter_than_the_heartbeat_is_refused() -> None:
    with contexts(2) as (chief, _), pytest.raises(ValueError, match="silence=1"):
        chief.side_line().start(lambda rank, message: None, lambda rank, why: None, silence=1)


PROGRAM = """
line = context.side_line()
hear_of = lambda lost, why: say("lost", lost, why)
line.start(lambda sender, message: say("message", sender, message), hear_of, silence=%s)
context.allgather(rank)
line.send({"here": rank})
hear()
if rank == 0:
    line.publish({"all": "well"})
    hear()
"""


def start(ranks: Ranks, size: int, silence: float = 30.0) -> list[Any]:
    """Ranks that are all on the line, and say what they get."""
    started = ranks.job(PROGRAM % silence, size)
    for _ in range(size):
        assert started[0].line().startswith("message")
    return started


def test_killed_worker_is_known_to_all_others_at_once(ranks: Ranks) -> None:
    started = start(ranks, 3)
    started[1].kill()
    for survivor in (started[0], started[2]):
        assert survivor.line().startswith("lost 1 its process ended")


def test_killed_chief_is_known_to_all_workers_at_once(ranks: Ranks) -> None:
    started = start(ranks, 3)
    started[0].kill()
    for survivor in started[1:]:
        assert survivor.line().startswith("lost 0 its process ended")


def test_worker_that_ends_without_goodbye_is_lost(ranks: Ranks) -> None:
    started = start(ranks, 2)
    started[1].tell()
    assert started[0].line().startswith("lost 1 its process ended")


LAST_WORDS = """
import os, sys
sys.setswitchinterval(5)  # other threads get a turn only when this one waits
line = context.side_line()
line.start(lambda sender, message: say("message", sender, message), lambda lost, why: say("lost", lost, why))
context.allgather(rank)
if rank == 1:
    line.send({"last": "words"})
    line.flush(10)
    os._exit(1)
hear()
"""


def test_last_words_of_a_process_arrive_before_its_end(ranks: Ranks) -> None:
    chief, _ = ranks.job(LAST_WORDS, 2)
    assert chief.line().startswith("message 1 {'last': 'words'}")
    assert chief.line().startswith("lost 1 its process ended")


ANSWERED = """
import os, time

def answer(sender, message):
    say("message", sender, message)
    if message == {"first": "words"}:
        time.sleep(1)  # meanwhile all that follows comes, with the end of the process
    elif sender == 1:
        line.publish({"heard": "all"})

line = context.side_line()
line.start(answer, lambda lost, why: say("lost", lost, why))
context.allgather(rank)
if rank == 1:
    line.send({"first": "words"})
    line.send({"last": "words"})
    line.flush(10)
    os._exit(1)
hear()
"""


def test_answers_to_last_words_come_before_word_of_the_end(ranks: Ranks) -> None:
    chief, _ = ranks.job(ANSWERED, 2)
    found = [chief.line() for _ in range(4)]
    starts = "message 1 {'first'", "message 1 {'last'", "message 0 {'heard'", "lost 1 its process ended"
    assert all(line.startswith(start) for line, start in zip(found, starts, strict=True)), found


def test_frozen_worker_is_lost_after_the_silence_and_learns_of_it(ranks: Ranks) -> None:
    started = start(ranks, 3, silence=2.5)
    started[2].signal(signal.SIGSTOP)
    for survivor in started[:2]:
        assert survivor.line().startswith("lost 2 nothing was heard of it for 2.5 s")
    started[0].tell()
    for survivor in started[:2]:  # quiet as they are, they are not lost
        assert survivor.line() == "message 0 {'all': 'well'}"
    started[2].signal(signal.SIGCONT)
    assert started[2].line().startswith("lost 0 it has given this rank up")


def test_frozen_chief_is_lost_after_the_silence(ranks: Ranks) -> None:
    started = start(ranks, 2, silence=2.5)
    started[0].signal(signal.SIGSTOP)
    assert started[1].line().startswith("lost 0 nothing was heard of it for 2.5 s")


def test_worker_that_never_comes_is_lost_after_the_timeout() -> None:
    with contexts(2, timeout=0.5) as (chief, _):
        inbox = Inbox()
        chief.side_line().start(inbox.on_message, inbox.on_lost)
        assert inbox.loss() == (1, "it did not come within 0.5 s (DET_DISTRIBUTED_TIMEOUT)")
        chief.side_line().close()


def test_chief_that_cannot_be_reached_is_lost_after_the_timeout() -> None:
    with contexts(2, timeout=0.5) as (chief, worker):
        inbox = Inbox()
        chief.close()
        worker.side_line().start(inbox.on_message, inbox.on_lost)
        rank, why = inbox.loss()
        assert rank == 0
        assert "could not be reached" in why
        worker.side_line().close()
