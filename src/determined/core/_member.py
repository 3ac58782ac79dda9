"""What the first member of a group and the others share: rounds, and how they fail.

Every collective is one round: each member sends one frame up, the first member sends one frame down to each. So a
rank that is gone, late, or in another call is found in the round where it happens, by everybody.
"""

from __future__ import annotations

import abc
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from determined import errors
from determined.core._channel import Buffer, Connection, Frame, Kind, decode, encode, encoded_type, type_name
from determined.core._group import Group

T = TypeVar("T")

CALLS = ("gather", "gather_local", "allgather", "allgather_local", "broadcast", "broadcast_local")
# The first member notices a missing one at its timeout and tells the others; they wait this much longer for it.
GRACE_SECONDS = 1.0
LAST_WORDS_SECONDS = 0.5
CLUES = (
    "Its own output says why it ended; without any, look whether the system killed it (out of memory: dmesg) or its "
    "machine or network failed."
)


class Broken(Exception):
    """The channel cannot go on: `error` is for everybody."""

    def __init__(self, error: errors.DeterminedException) -> None:
        super().__init__(str(error))
        self.error = error


class Spoiled(Exception):
    """A round came to nothing but ended in order, so that the next one can follow: `error` is for this rank."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Member(abc.ABC):
    """What the first member and the others share: one round at a time, and none after the channel broke."""

    def __init__(self, group: Group, lock: threading.Lock) -> None:
        self._group = group
        self._lock = lock
        self._broken: errors.DeterminedException | None = None
        self._is_closed = False

    def _run(self, call: str, action: Callable[[float], T]) -> T:
        with self._lock:
            self._check_usable(call)
            try:
                return action(time.monotonic() + self._group.timeout)
            except Broken as broken:
                self._break(broken.error)
                self._check_open(call)
                raise broken.error from broken.__cause__
            except Spoiled as spoiled:
                raise spoiled.error from spoiled.error.__cause__
            except BaseException as error:
                # Half a frame may be out: nothing that follows could be understood.
                self._break(self._group.lost([self._group.index], f"{call}() was interrupted here by {error!r}."))
                raise

    def _check_open(self, call: str) -> None:
        if self._is_closed:
            raise errors.InternalException(f"{call}() cannot go on after close(); make another DistributedContext.")

    def _check_usable(self, call: str) -> None:
        self._check_open(call)
        if self._broken is not None:
            again = f"{call}(): the ranks cannot exchange objects any more since: {self._broken}"
            raise _like(self._broken, again)

    def _break(self, error: errors.DeterminedException) -> None:
        self._broken = error
        self._tell_of_end(error)

    def _tell_of_end(self, error: errors.DeterminedException) -> None:
        """Tell everybody that can still be told why this is the end."""
        facts = {
            "text": str(error),
            "ranks": getattr(error, "ranks", ()),
            "is_misuse": isinstance(error, errors.MisuseError),
        }
        _end(self._connections(), Kind.FAIL, [json.dumps(facts).encode()])

    @abc.abstractmethod
    def _connections(self) -> Sequence[Connection]:
        """Return the connections to the others that are here."""

    def close(self) -> None:
        """Say goodbye and close; a round in another thread ends with an error."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._lock.acquire(blocking=False):
            for connection in self._connections():
                connection.interrupt()
            self._lock.acquire()
        try:
            _end(self._connections(), Kind.BYE, ())
        finally:
            self._lock.release()

    def _timed_out(self, call: str, what: str) -> str:
        return (
            f"{call}(): {what} within {self._group.timeout:g} s. Either it hangs, or it does not call {call}(); if it "
            "is only slow, set DET_DISTRIBUTED_TIMEOUT (seconds) higher."
        )


def encoded(call: str, item: Any) -> list[Buffer] | TypeError:
    """Return the payload of an item, or why there is none: the round must be made all the same."""
    try:
        return encode(item)
    except Exception as cause:
        error = TypeError(f"{call}(item): a {type_name(item)} cannot be pickled: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error


def decoded(call: str, payload: memoryview, sender: str) -> Any:
    """Return the item of another member. Raises TypeError if it cannot be unpickled, whatever the cause."""
    try:
        return decode(payload)
    except Exception as cause:
        raise TypeError(
            f"{call}(): the item of {sender}, a {encoded_type(payload)}, cannot be unpickled here: "
            f"{type(cause).__name__}: {cause}"
        ) from cause


def _like(error: errors.DeterminedException, text: str) -> errors.DeterminedException:
    if isinstance(error, errors.PeerLostException):
        return errors.PeerLostException(text, error.ranks)
    return type(error)(text)


def told(frame: Frame) -> errors.DeterminedException:
    """Return the error that another member has met and told of."""
    facts = json.loads(bytes(frame.payload))
    if facts["is_misuse"]:
        return errors.MisuseError(facts["text"])
    return errors.PeerLostException(facts["text"], facts["ranks"])


def _end(connections: Iterable[Connection], kind: Kind, payload: Sequence[Buffer]) -> None:
    for connection in connections:
        # Where it cannot be said, because the connection is full or gone, its end says enough.
        with contextlib.suppress(OSError):
            connection.send(kind, 0, payload, time.monotonic() + LAST_WORDS_SECONDS)
        connection.close()
