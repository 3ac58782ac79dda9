"""The background thread that delivers reports: order, grouping, flushing, failures, many threads."""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from determined import errors
from determined.core._outbox import Outbox

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    outbox = Outbox()
    yield outbox
    outbox.close()


class Sink:
    """Keeps what is delivered; a message that is an exception is raised instead."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    @property
    def messages(self) -> list[Any]:
        return [message for call in self.calls for message in call]

    def __call__(self, messages: Sequence[Any]) -> None:
        self.calls.append(list(messages))
        for message in messages:
            if isinstance(message, BaseException):
                raise message


class Gate:
    """A delivery that lasts until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.opened = threading.Event()

    def __call__(self, messages: Sequence[Any]) -> None:
        self.begun.set()
        assert self.opened.wait(30)
        for message in messages:
            if isinstance(message, BaseException):
                raise message


def test_messages_arrive_in_order(outbox: Outbox) -> None:
    sink = Sink()
    for number in range(1000):
        outbox.put(sink, number)
    outbox.flush()
    assert sink.messages == list(range(1000))


def test_messages_are_delivered_without_a_flush(outbox: Outbox) -> None:
    arrived = threading.Event()
    outbox.put(lambda _: arrived.set(), None)
    assert arrived.wait(30)


def test_urgent_message_takes_those_before_it_along(outbox: Outbox) -> None:
    sink, arrived = Sink(), threading.Event()
    outbox.put(sink, "patient")
    outbox.put(lambda _: arrived.set(), None, within_s=0)
    assert arrived.wait(30)
    assert sink.messages == ["patient"]


def test_what_gathers_for_one_destination_is_delivered_together(outbox: Outbox) -> None:
    gate, first, second = Gate(), Sink(), Sink()
    outbox.put(gate, None, within_s=0)
    assert gate.begun.wait(30)
    for sink, message in [(first, 1), (first, 2), (second, 3), (first, 4)]:
        outbox.put(sink, message)
    gate.opened.set()
    outbox.flush()
    assert (first.calls, second.calls) == ([[1, 2, 4]], [[3]])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 2), st.just("flush")), max_size=30))
def test_every_destination_gets_its_messages_in_order(steps: list[int | str]) -> None:
    outbox, sinks = Outbox(), [Sink() for _ in range(3)]
    sent: list[list[int]] = [[] for _ in sinks]
    for number, step in enumerate(steps):
        if isinstance(step, str):
            outbox.flush()
            assert [sink.messages for sink in sinks] == sent
        else:
            outbox.put(sinks[step], number)
            sent[step].append(number)
    outbox.close()
    assert [sink.messages for sink in sinks] == sent


def test_put_does_not_wait_for_delivery(outbox: Outbox) -> None:
    gate = Gate()
    outbox.put(gate, None, within_s=0)
    assert gate.begun.wait(30)
    outbox.put(gate, None)
    gate.opened.set()


def test_flush_waits_for_a_delivery_under_way(outbox: Outbox) -> None:
    gate, sink = Gate(), Sink()
    outbox.put(gate, None, within_s=0)
    assert gate.begun.wait(30)
    outbox.put(sink, "later")
    with ThreadPoolExecutor() as pool:
        flushed = pool.submit(outbox.flush)
        assert not flushed.done()
        gate.opened.set()
        flushed.result(timeout=30)
    assert sink.messages == ["later"]


def test_flush_of_nothing_returns(outbox: Outbox) -> None:
    outbox.flush()


def test_flush_ends_while_others_go_on_putting(outbox: Outbox) -> None:
    stop = threading.Event()

    def slow(_: Sequence[Any]) -> None:
        time.sleep(0.001)  # so that there is always something under way or in the queue

    def keep_putting() -> None:
        while not stop.is_set():
            outbox.put(slow, None)

    with ThreadPoolExecutor() as pool:
        pool.submit(keep_putting)
        try:
            pool.submit(outbox.flush).result(timeout=30)
        finally:
            stop.set()


def test_close_delivers_what_is_left() -> None:
    outbox, sink = Outbox(), Sink()
    for number in range(100):
        outbox.put(sink, number)
    outbox.close()
    assert sink.messages == list(range(100))


def test_close_twice_is_fine() -> None:
    outbox = Outbox()
    outbox.close()
    outbox.close()


def test_put_after_close_is_refused() -> None:
    outbox = Outbox()
    outbox.close()
    with pytest.raises(errors.InternalException):
        outbox.put(Sink(), 1)


def test_closed_outbox_is_not_kept_alive() -> None:
    class Marked(Outbox):
        alive = 0

        def __init__(self) -> None:
            Marked.alive += 1
            super().__init__()

        def __del__(self) -> None:
            Marked.alive -= 1

    Marked().close()
    gc.collect()
    assert Marked.alive == 0


@pytest.mark.parametrize("surface", [lambda o: o.put(Sink(), 1), Outbox.flush, Outbox.close])
def test_failure_surfaces_on_the_callers_thread(surface: Callable[[Outbox], None]) -> None:
    outbox, failed = Outbox(), threading.Event()

    def fail(_: Sequence[Any]) -> None:
        failed.set()
        raise KeyError("lost")

    outbox.put(fail, None, within_s=0)
    assert failed.wait(30)

    def surface_soon() -> None:
        # A put may come before the outbox has taken note, and is then simply taken.
        for _ in range(1_000_000):
            surface(outbox)

    with pytest.raises(KeyError, match="lost"):
        surface_soon()
    outbox.close()


def test_failure_is_raised_once(outbox: Outbox) -> None:
    outbox.put(Sink(), KeyError("once"))
    with pytest.raises(KeyError):
        outbox.flush()
    outbox.flush()


def test_messages_after_a_failure_are_delivered(outbox: Outbox) -> None:
    sink = Sink()
    outbox.put(Sink(), KeyError("lost"))
    with pytest.raises(KeyError):
        outbox.flush()
    outbox.put(sink, "after")
    outbox.flush()
    assert sink.messages == ["after"]


def test_other_destinations_get_what_was_waiting_with_a_failed_message(outbox: Outbox) -> None:
    gate, sink = Gate(), Sink()
    outbox.put(gate, None, within_s=0)
    assert gate.begun.wait(30)
    outbox.put(Sink(), KeyError("lost"))
    outbox.put(sink, "kept")
    gate.opened.set()
    with pytest.raises(KeyError):
        outbox.flush()
    assert sink.messages == ["kept"]


def test_later_failures_come_as_notes_of_the_first(outbox: Outbox) -> None:
    gate = Gate()
    outbox.put(gate, KeyError("first"), within_s=0)
    assert gate.begun.wait(30)
    outbox.put(Sink(), IndexError("second"))
    gate.opened.set()
    with ThreadPoolExecutor() as pool, pytest.raises(KeyError, match="first") as caught:
        pool.submit(outbox.flush).result(timeout=30)
    assert caught.value.__notes__ == ["It was followed by IndexError: second"]


def test_flush_that_waits_ends_when_delivery_fails(outbox: Outbox) -> None:
    gate = Gate()
    outbox.put(gate, KeyError("under way"), within_s=0)
    assert gate.begun.wait(30)
    with ThreadPoolExecutor() as pool:
        flushed = pool.submit(outbox.flush)
        gate.opened.set()
        with pytest.raises(KeyError, match="under way"):
            flushed.result(timeout=30)


def test_even_system_exit_on_the_thread_surfaces(outbox: Outbox) -> None:
    outbox.put(Sink(), SystemExit(5))
    with pytest.raises(SystemExit):
        outbox.flush()


def test_many_threads_lose_nothing_and_keep_their_own_order() -> None:
    outbox, sink = Outbox(), Sink()

    def send(sender: int) -> None:
        for number in range(200):
            outbox.put(sink, (sender, number))
            if number % 50 == 0:
                outbox.flush()

    with ThreadPoolExecutor(8) as pool:
        for sent in [pool.submit(send, sender) for sender in range(8)]:
            sent.result(timeout=30)
    outbox.close()
    for sender in range(8):
        assert [number for who, number in sink.messages if who == sender] == list(range(200))


@settings(max_examples=10, deadline=None)
@given(st.sets(st.integers(0, 79), min_size=1, max_size=20))
def test_no_failure_is_lost_among_many_threads(failing: set[int]) -> None:
    outbox, raised, surfaced = Outbox(), list[KeyError](), list[BaseException | str]()

    def deliver(messages: Sequence[int]) -> None:
        if bad := [number for number in messages if number in failing]:
            raised.append(KeyError(bad))
            raise raised[-1]

    def collect(action: Callable[[], None]) -> None:
        try:
            action()
        except KeyError as error:
            surfaced.extend([error, *getattr(error, "__notes__", [])])

    def send(sender: int) -> None:
        for number in range(sender, 80, 4):
            collect(functools.partial(outbox.put, deliver, number))
            if number % 3 == 0:
                collect(outbox.flush)

    with ThreadPoolExecutor(4) as pool:
        for sent in [pool.submit(send, sender) for sender in range(4)]:
            sent.result(timeout=30)
    collect(outbox.close)
    assert len(surfaced) == len(raised)
