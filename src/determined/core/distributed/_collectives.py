"""The collectives of a group of ranks, on values in the store.

Every collective is one round: each member stores a record with the name of its call and its item, waits for the records
of all others, and reads the items that it wants. So every rank finds out by itself, in the round where it happens, that
another one is gone, late, or in another call.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from determined import errors
from determined.core.distributed._exchange import Exchange, PeerLeft
from determined.core.distributed._lifeline import CLOSED

T = TypeVar("T")

GRACE_PERIOD_S = 1.0
SIGNAL_INTERVAL_S = 0.5
FIRST_CHECK_S = 1.0
MAX_INLINE = 1 << 16
CLUES = (
    "Its own output says why it ended; without any, check whether the system killed it (out of memory: dmesg) or its "
    "machine or network failed."
)


class Record(NamedTuple):
    """What a member stores in a round: the name of its call, and its item, or why that cannot be pickled."""

    call: str
    type: str = ""
    error: str | None = None
    payload: bytes | None = b""
    """The pickled item; None if it is so large that it has a key of its own, because not every member wants it."""

    @classmethod
    def of(cls, call: str, item: Any) -> Record:
        """Return the record of an item. One that cannot be pickled has a record too, so that the round takes place."""
        kind = type(item)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        try:
            pickled = pickle.dumps(item, protocol=5)
        except Exception as cause:
            return cls(call, error=f"{call}(item): a {name} cannot be pickled: {type(cause).__name__}: {cause}")
        return cls(call, name, None, pickled)


class Collectives:
    """What one rank can do in a group: all ranks, or those of a machine. A group of one needs no exchange."""

    def __init__(
        self,
        exchange: Exchange | None,
        lock: threading.Lock,
        timeout: float,
        *,
        size: int,
        index: int,
        machine: int | None = None,
    ) -> None:
        self._exchange = exchange
        self._lock = lock
        self._timeout = timeout
        self._index = index
        self._machine = machine
        self._prefix = "all" if machine is None else f"machine-{machine}"
        self._members = range(size)
        self._others = [other for other in self._members if other != index]
        self._round = 0
        self._stored: list[str] = []

    def gather(self, call: str, item: T) -> list[T] | None:
        """Return all items on the first member, None elsewhere."""
        is_first = self._index == 0
        items = self._run(call, item, gives=not is_first, wanted=self._others if is_first else [])
        return [items[index] for index in self._members] if is_first else None

    def allgather(self, call: str, item: T) -> list[T]:
        """Return all items, ordered; the item of this rank as it is."""
        items = self._run(call, item, gives=True, wanted=self._others)
        return [items[index] for index in self._members]

    def broadcast(self, call: str, item: T) -> T:
        """Return the first member's item."""
        is_first = self._index == 0
        return self._run(call, item, gives=is_first, wanted=[] if is_first else [0])[0]

    def _run(self, call: str, item: T, *, gives: bool, wanted: Sequence[int]) -> dict[int, T]:
        """Make a round, to which this member may give its item; returns that and those of the wanted members."""
        if (exchange := self._exchange) is None:
            return {self._index: item}
        with self._lock:
            _check_usable(exchange, call)
            self._round += 1
            try:
                mine = Record.of(call, item) if gives else Record(call)
                records = self._wait(exchange, call, lambda: self._exchanged(exchange, mine, wanted))
                self._raise_failed(records)
                return {self._index: item, **{index: self._unpickled(index, records[index]) for index in wanted}}
            except (errors.DeterminedException, TypeError):
                if exchange.is_closed:
                    raise _closed(call) from None
                raise
            except BaseException as error:
                # Where the others are in this round cannot be known any more.
                self._break(self._lost([self._index], f"{call}() was interrupted here by {error!r}."))
                with contextlib.suppress(Exception):  # it may end this process, so the others are told first
                    exchange.submit(lambda: None).result(GRACE_PERIOD_S)
                raise

    def _wait(self, exchange: Exchange, call: str, action: Callable[[], T]) -> T:
        """Return what a function returns on the thread of the exchange; a failure ends the exchange of all ranks."""
        future = exchange.submit(action)
        deadline = time.monotonic() + self._timeout + GRACE_PERIOD_S
        try:
            while time.monotonic() < deadline:
                # A signal that arrives just before a wait begins is handled when it ends: so no wait is long.
                with contextlib.suppress(TimeoutError):
                    return future.result(SIGNAL_INTERVAL_S)
            raise ConnectionError("its store does not answer")  # else that thread would have noticed the deadline
        except PeerLeft as left:
            rank, why = left.args
            text = f"rank {rank} {why}." if why == CLOSED else f"rank {rank} is gone ({why}). {CLUES}"
            raise self._break(errors.PeerLostException(f"{call}(): {text}", [rank])) from None
        except ConnectionError as error:
            text = self._late(call, f"rank 0 could not be reached at {exchange.address} ({error})")
            raise self._break(errors.PeerLostException(text, [0])) from None

    # These two run on the thread of the exchange.

    def _exchanged(self, exchange: Exchange, mine: Record, wanted: Sequence[int]) -> list[Record]:
        """Store a record, wait for those of all members and return them, with the pickles of the wanted ones."""
        deadline = time.monotonic() + self._timeout
        exchange.join(deadline)
        store, names = exchange.store, [f"{self._prefix}/{self._round}/{index}" for index in self._members]
        own, stored = names[self._index], []
        if mine.payload and len(mine.payload) > MAX_INLINE:
            stored, mine = store.put(f"{own}/payload", mine.payload), mine._replace(payload=None)
        stored += store.put(own, pickle.dumps(tuple(mine)))
        check_after = FIRST_CHECK_S
        while missing := exchange.wait_for(names, self._machine, min(deadline, time.monotonic() + check_after)):
            late = [index for index in self._others if names[index] in missing]
            self._read(exchange, mine, [name for name in names if name not in missing])
            if time.monotonic() >= deadline:
                raise self._break(self._lost(late, self._late(mine.call, f"{self._names(late)} did not come")))
            check_after *= 2
        records = self._read(exchange, mine, names)
        for index in wanted:
            if records[index].payload is None:
                records[index] = records[index]._replace(payload=store.get([f"{names[index]}/payload"])[0])
        # All members have come to this round, so nobody reads what this one stored in the round before.
        unread, self._stored = self._stored, stored
        exchange.submit(lambda: exchange.store.delete(unread))
        return records

    def _read(self, exchange: Exchange, mine: Record, names: Sequence[str]) -> list[Record]:
        """Return the records under these names. Raises MisuseError if one is of another call."""
        records = [Record(*pickle.loads(value)) for value in exchange.store.get(names)]
        for name, record in zip(names, records, strict=True):
            if record.call != mine.call:
                here, there = self._names([self._index]), self._names([int(name.rsplit("/", 1)[1])])
                text = f"{here} called {mine.call}() while {there} called {record.call}()"
                raise self._break(errors.MisuseError(f"{text}; every rank must make the same calls in the same order."))
        return records

    def _raise_failed(self, records: Sequence[Record]) -> None:
        """Raise an error if a member could not pickle its item; the next round can take place all the same."""
        if (mine := records[self._index]).error is not None:
            raise TypeError(mine.error)
        for index, record in enumerate(records):
            if record.error is not None:
                raise self._lost([index], f"{self._names([index]).capitalize()} failed: {record.error}")

    def _unpickled(self, index: int, record: Record) -> Any:
        try:
            return pickle.loads(record.payload or b"")
        except Exception as cause:
            error = TypeError(
                f"{record.call}(): the item of {self._names([index])}, a {record.type}, cannot be unpickled here: "
                f"{type(cause).__name__}: {cause}"
            )
            # The others are through with this round; the next one tells them.
            self._break(self._lost([self._index], str(error)))
            raise error from cause

    def _late(self, call: str, what: str) -> str:
        return (
            f"{call}(): {what} within {self._timeout:g} s. Either it hangs, or it does not call {call}(); if it is "
            "only slow, set DET_DISTRIBUTED_TIMEOUT (seconds) higher."
        )

    def _names(self, indices: Sequence[int]) -> str:
        noun = "rank" if len(indices) == 1 else "ranks"
        numbers = ", ".join(map(str, indices))
        return f"{noun} {numbers}" if self._machine is None else f"local {noun} {numbers} of machine {self._machine}"

    def _lost(self, indices: Iterable[int], text: str) -> errors.PeerLostException:
        return errors.PeerLostException(text, indices if self._machine is None else ())

    def _break(self, error: errors.DeterminedException) -> errors.DeterminedException:
        """End the exchange for all ranks, and return the error."""
        assert self._exchange is not None
        ranks = error.ranks if isinstance(error, errors.PeerLostException) else ()
        is_own = self._machine is None and self._index in ranks
        text = f"{self._names([self._index])} failed: {error}" if is_own else str(error)
        self._exchange.end(error, text, list(ranks))
        return error


def _check_usable(exchange: Exchange, call: str) -> None:
    if exchange.is_closed:
        raise _closed(call)
    if (broken := exchange.broken) is not None:
        text = f"{call}(): the ranks cannot exchange objects any more since: {broken}"
        if isinstance(broken, errors.PeerLostException):
            raise errors.PeerLostException(text, broken.ranks)
        raise type(broken)(text)


def _closed(call: str) -> errors.InternalException:
    return errors.InternalException(f"{call}() cannot go on after close(); make another DistributedContext.")
