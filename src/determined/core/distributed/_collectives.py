"""The collectives of a group of ranks, on values in the store.

Every collective is one round: each member stores its item, and the first member answers when it has those of all, with
its own item or with what went wrong. So a rank that is gone, late, or in another call is found in the round where it
happens, by everybody.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from typing import Any, NamedTuple, TypeVar

from determined import errors
from determined.core.distributed._exchange import Exchange, PeerLeft
from determined.core.distributed._lifeline import CLOSED

T = TypeVar("T")

# The first member notices a missing one at its timeout and tells the others; they wait this much longer for it.
GRACE_PERIOD_S = 1.0
SIGNAL_INTERVAL_S = 0.5
CLUES = (
    "Its own output says why it ended; without any, check whether the system killed it (out of memory: dmesg) or its "
    "machine or network failed."
)


class Record(NamedTuple):
    """What a member stores in a round: a pickle and the type of its object, or why there is none."""

    type: str = ""
    error: str | None = None
    ranks: Sequence[int] = ()
    payload: bytes = b""

    def packed(self) -> bytes:
        """Return the record as JSON, a newline, and the pickle."""
        return json.dumps(self[:3]).encode() + b"\n" + self.payload


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
        self._size = size
        self._index = index
        self._machine = machine
        self._prefix = "all" if machine is None else f"machine-{machine}"
        self._others = [other for other in range(size) if other != index]
        self._round = 0
        self._stored: list[str] = []

    def gather(self, call: str, item: T) -> list[T] | None:
        """Return all items on the first member, None elsewhere."""
        is_first = self._index == 0
        items = self._run(call, item, gives=not is_first, wanted=self._others if is_first else [])
        return [items[index] for index in range(self._size)] if is_first else None

    def allgather(self, call: str, item: T) -> list[T]:
        """Return all items, ordered; the item of this rank as it is."""
        items = self._run(call, item, gives=True, wanted=self._others)
        return [items[index] for index in range(self._size)]

    def broadcast(self, call: str, item: T) -> T:
        """Return the first member's item."""
        is_first = self._index == 0
        return self._run(call, item, gives=is_first, wanted=[] if is_first else [0])[0]

    def _run(self, call: str, item: T, *, gives: bool, wanted: Sequence[int]) -> dict[int, T]:
        """Make a round, to which this member may give its item; returns that and those of the wanted members."""
        if self._exchange is None:
            return {self._index: item}
        with self._lock:
            self._check_usable(self._exchange, call)
            self._round += 1
            try:
                mine = _encoded(call, item) if gives else Record()
                take_part = self._follow if self._index else self._lead
                return {self._index: item, **take_part(self._exchange, call, mine, wanted)}
            except (errors.DeterminedException, TypeError):
                if self._exchange.is_closed:
                    raise _closed(call) from None
                raise
            except BaseException as error:
                # Where the others are in this round cannot be known any more.
                self._break(self._lost([self._index], f"{call}() was interrupted here by {error!r}."))
                with contextlib.suppress(Exception):  # it may end this process, so the others are told first
                    self._exchange.submit(lambda: None).result(GRACE_PERIOD_S)
                raise

    def _check_usable(self, exchange: Exchange, call: str) -> None:
        if exchange.is_closed:
            raise _closed(call)
        if (broken := exchange.broken) is not None:
            text = f"{call}(): the ranks cannot exchange objects any more since: {broken}"
            if isinstance(broken, errors.PeerLostException):
                raise errors.PeerLostException(text, broken.ranks)
            raise type(broken)(text)

    def _lead(self, exchange: Exchange, call: str, mine: Record, wanted: Sequence[int]) -> dict[int, Any]:
        """Do the first member's part: collect what the others stored, and answer."""
        records = self._submit(exchange, call, lambda: self._collected(exchange, call, self._others, self._others))
        failed = next(((index, one.error) for index, one in enumerate([mine, *records]) if one.error is not None), None)
        items = {}
        if failed is None:
            try:
                items = {index: self._decoded(call, records[index - 1], index) for index in wanted}
            except TypeError as error:
                failed = (0, str(error))
        if failed is not None:
            lost = self._lost([failed[0]], f"{self._names([failed[0]]).capitalize()} failed: {failed[1]}")
            mine = Record(error=str(lost), ranks=lost.ranks)
        name = self._name(0)  # now, since the next round may begin before this is done
        exchange.submit(lambda: self._forget(exchange, exchange.store.put(name, mine.packed())))
        if failed is not None:
            raise lost if failed[0] else TypeError(failed[1])
        return items

    def _follow(self, exchange: Exchange, call: str, mine: Record, wanted: Sequence[int]) -> dict[int, Any]:
        """Do any other member's part: store a record, wait for the answer, and get what the members stored."""

        def act() -> list[Record]:
            exchange.join(time.monotonic() + self._timeout)
            return self._collected(exchange, call, [0], [0, *wanted], mine)

        answer, *records = self._submit(exchange, call, act)
        if mine.error is not None:
            raise TypeError(mine.error)
        if answer.error is not None:
            raise errors.PeerLostException(answer.error, answer.ranks)
        try:
            return {index: self._decoded(call, record, index) for index, record in zip(wanted, records, strict=True)}
        except TypeError as error:
            # The others are through with this round; the next one tells them.
            self._break(self._lost([self._index], str(error)))
            raise

    def _decoded(self, call: str, record: Record, index: int) -> Any:
        try:
            return pickle.loads(record.payload)
        except Exception as cause:
            raise TypeError(
                f"{call}(): the item of {self._names([index])}, a {record.type}, cannot be unpickled here: "
                f"{type(cause).__name__}: {cause}"
            ) from cause

    def _submit(self, exchange: Exchange, call: str, action: Callable[[], T]) -> T:
        """Do something on the thread of the exchange. What keeps it from its end ends the exchange of all ranks."""
        try:
            future = exchange.submit(action)
            # That thread keeps the time itself, unless the store of a rank 0 that is frozen keeps it waiting.
            deadline = time.monotonic() + self._timeout + 2 * GRACE_PERIOD_S
            # A signal that arrives just before a wait begins is handled when it ends: so no wait is long.
            while not futures.wait([future], SIGNAL_INTERVAL_S).done:
                if time.monotonic() > deadline:
                    raise TimeoutError
            return future.result()
        except PeerLeft as left:
            rank, why = left.args
            text = (
                f"{call}(): rank {rank} {why}." if why == CLOSED else f"{call}(): rank {rank} is gone ({why}). {CLUES}"
            )
            raise self._break(errors.PeerLostException(text, [rank])) from None
        except ConnectionError as error:
            text = f"{self._names([0])} could not be reached at {exchange.address} ({error})"
            raise self._break(self._late(call, [0], text)) from None
        except TimeoutError:
            text = f"{self._names([0])}, or a rank that it waits for, did not come"
            raise self._break(self._late(call, [0], text)) from None

    def _collected(
        self, exchange: Exchange, call: str, wait: Sequence[int], get: Sequence[int], mine: Record | None = None
    ) -> list[Record]:
        """Store a record if there is one, wait for those of others, and get some; on the thread of the exchange."""
        store, name = exchange.store, f"{self._prefix}/{self._round}"
        first, first_call = json.loads(store.claim(name, json.dumps([self._index, call]).encode()))
        if first_call != call:
            text = f"{self._names([self._index])} called {call}() while {self._names([first])} called {first_call}()"
            raise self._break(errors.MisuseError(f"{text}; every rank must make the same calls in the same order."))
        stored = [] if mine is None else store.put(self._name(self._index), mine.packed())
        if first == self._index:
            self._stored.append(name)
        deadline = time.monotonic() + self._timeout + (GRACE_PERIOD_S if self._index else 0.0)
        missing = exchange.wait_for([self._name(index) for index in wait], self._machine, deadline)
        if missing and self._index:
            raise TimeoutError
        if missing:
            late = [int(name.rsplit("/", 1)[1]) for name in missing]
            raise self._break(self._late(call, late, f"{self._names(late)} did not come"))
        records = [_unpacked(value) for value in store.get([self._name(index) for index in get])]
        if mine is not None:
            exchange.submit(lambda: self._forget(exchange, stored))  # later, since nobody waits for it
        return records

    def _forget(self, exchange: Exchange, stored: list[str]) -> None:
        """Delete what this rank stored in the round before: all have come to this one, so nobody reads it any more."""
        exchange.store.delete(self._stored)
        self._stored = stored

    def _name(self, index: int) -> str:
        return f"{self._prefix}/{self._round}/{index}"

    def _late(self, call: str, indices: Sequence[int], what: str) -> errors.PeerLostException:
        return self._lost(
            indices,
            f"{call}(): {what} within {self._timeout:g} s. Either it hangs, or it does not call {call}(); if it is "
            "only slow, set DET_DISTRIBUTED_TIMEOUT (seconds) higher.",
        )

    def _names(self, indices: Iterable[int]) -> str:
        chosen = sorted(indices)
        noun = "rank" if len(chosen) == 1 else "ranks"
        numbers = ", ".join(map(str, chosen))
        return f"{noun} {numbers}" if self._machine is None else f"local {noun} {numbers} of machine {self._machine}"

    def _lost(self, indices: Iterable[int], text: str) -> errors.PeerLostException:
        return errors.PeerLostException(text, sorted(indices) if self._machine is None else ())

    def _break(self, error: errors.DeterminedException) -> errors.DeterminedException:
        """End the exchange for all ranks, and return the error."""
        assert self._exchange is not None
        ranks = error.ranks if isinstance(error, errors.PeerLostException) else ()
        text = f"{self._names([self._index])} failed: {error}" if self._index in ranks else str(error)
        self._exchange.end(error, text, list(ranks))
        return error


def _encoded(call: str, item: Any) -> Record:
    """Return the record of an item, or why it has none: the round is made all the same."""
    kind = type(item)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        return Record(name, payload=pickle.dumps(item, protocol=5))
    except Exception as cause:
        return Record(error=f"{call}(item): a {name} cannot be pickled: {type(cause).__name__}: {cause}")


def _unpacked(value: bytes) -> Record:
    head, _, payload = value.partition(b"\n")
    kind, error, ranks = json.loads(head)
    return Record(kind, error, ranks, payload)


def _closed(call: str) -> errors.InternalException:
    return errors.InternalException(f"{call}() cannot go on after close(); make another DistributedContext.")
