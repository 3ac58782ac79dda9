"""Any member of a group of ranks but the first: it sends to that one, and gets its answers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeVar

from determined.core._address import Address
from determined.core._channel import Buffer, Connection, Frame, Kind, unpack
from determined.core._group import Group
from determined.core._handshake import Purpose, join
from determined.core._member import (
    CALLS,
    CLUES,
    GRACE_SECONDS,
    Broken,
    Member,
    Spoiled,
    decoded,
    encoded,
    told,
)

T = TypeVar("T")


class Spoke(Member):
    """Any other member of a group; it connects when it first takes part."""

    def __init__(self, group: Group, address: Address, key: bytes, lock: threading.Lock) -> None:
        super().__init__(group, lock)
        self._address = address
        self._key = key
        self._connection: Connection | None = None

    def gather(self, call: str, item: T) -> list[T] | None:
        """Send the item to the first member."""
        self._run(call, lambda deadline: self._give(call, item, deadline))
        return None

    def allgather(self, call: str, item: T) -> list[T]:
        """Return all items, ordered."""

        def act(deadline: float) -> list[T]:
            parts = unpack(self._give(call, item, deadline))
            where = [index for index in range(self._group.size) if index != self._group.index]
            items = [self._read(call, part, index) for part, index in zip(parts, where, strict=True)]
            items.insert(self._group.index, item)
            return items

        return self._run(call, act)

    def broadcast(self, call: str, item: T) -> T:
        """Return the first member's item."""

        def act(deadline: float) -> T:
            answer: T = self._read(call, self._round(call, Kind.UP, (), deadline), 0)
            return answer

        return self._run(call, act)

    def _give(self, call: str, item: Any, deadline: float) -> memoryview:
        mine = encoded(call, item)
        if not isinstance(mine, TypeError):
            return self._round(call, Kind.UP, mine, deadline)
        try:
            self._round(call, Kind.UP_ERROR, [str(mine).encode()], deadline)
        except Broken as broken:
            self._break(broken.error)
        except Spoiled:  # by what was just sent, or by another rank's item as well
            pass
        raise Spoiled(mine)

    def _read(self, call: str, payload: memoryview, index: int) -> Any:
        try:
            return decoded(call, payload, self._group.names([index]))
        except TypeError as error:
            # The others are through with this round; the next one tells them.
            self._break(self._group.lost([self._group.index], str(error)))
            raise Spoiled(error) from error

    def _round(self, call: str, kind: Kind, payload: Sequence[Buffer], deadline: float) -> memoryview:
        chief = self._group.names([0])
        connection = self._connection = self._connection or self._connect(call, deadline)
        self._check_open(call)  # close() may have come too early to interrupt the connection
        try:
            self._send(connection, kind, CALLS.index(call), payload, deadline)
            frame = connection.receive(deadline + GRACE_SECONDS)
        except TimeoutError as error:
            text = self._timed_out(call, f"{chief}, or a rank that it waits for, did not come")
            raise Broken(self._group.lost([0], text)) from error
        except OSError as error:
            raise Broken(self._group.lost([0], f"{call}(): {chief} is gone ({error}). {CLUES}")) from error
        return self._understood(call, frame)

    def _send(self, connection: Connection, kind: Kind, call: int, payload: Sequence[Buffer], deadline: float) -> None:
        try:
            connection.send(kind, call, payload, deadline)
        except TimeoutError:
            raise
        except OSError:
            # The first member may have said why before it hung up; then that is what the next frame holds.
            return

    def _understood(self, call: str, frame: Frame) -> memoryview:
        chief = self._group.names([0])
        if frame.kind == Kind.DOWN:
            return frame.payload
        if frame.kind == Kind.DOWN_ERROR:
            raise Spoiled(told(frame))
        if frame.kind == Kind.FAIL:
            raise Broken(told(frame))
        raise Broken(self._group.lost([0], f"{call}(): {chief} has closed its DistributedContext."))

    def _connect(self, call: str, deadline: float) -> Connection:
        claim = self._group.claim(Purpose.COLLECTIVES)
        try:
            return Connection(join(self._address, self._key, claim, deadline, lambda: self._is_closed))
        except TimeoutError as error:
            what = f"{self._group.names([0])} could not be reached at {self._address} ({error})"
            raise Broken(self._group.lost([0], self._timed_out(call, what))) from error

    def _connections(self) -> Sequence[Connection]:
        return [] if self._connection is None else [self._connection]
