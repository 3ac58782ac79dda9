"""The first member of a group of ranks: it collects what the others send, and answers."""

from __future__ import annotations

import collections
import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from determined import errors
from determined.core._channel import Buffer, Connection, Frame, Kind, pack
from determined.core._group import Group
from determined.core._handshake import Purpose, Reception
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

# How often to look for members that have not been here before.
ARRIVAL_SECONDS = 0.01


class Hub(Member):
    """The first member of a group."""

    def __init__(self, group: Group, reception: Reception, lock: threading.Lock) -> None:
        super().__init__(group, lock)
        self._others = range(1, group.size)
        self._peers: dict[int, Connection] = {}
        self._arrived: collections.deque[tuple[int, socket.socket]] = collections.deque()
        reception.route(Purpose.COLLECTIVES, self._arrive)

    def gather(self, call: str, item: T) -> list[T] | None:
        """Return all items, ordered."""

        def act(deadline: float) -> list[T]:
            frames = self._collect(call, deadline)
            items = self._read(call, frames, deadline)
            self._answer(call, dict.fromkeys(self._others, ()), deadline)
            return [item, *items]

        return self._run(call, act)

    def allgather(self, call: str, item: T) -> list[T]:
        """Return all items, ordered, and send them to all."""

        def act(deadline: float) -> list[T]:
            mine = encoded(call, item)
            frames = self._collect(call, deadline)
            payloads: list[list[Buffer]] = [self._own(call, mine, deadline)]
            payloads += ([frames[index].payload] for index in self._others)
            items = self._read(call, frames, deadline)
            answers = {index: pack(payloads[:index] + payloads[index + 1 :]) for index in self._others}
            self._answer(call, answers, deadline)
            return [item, *items]

        return self._run(call, act)

    def broadcast(self, call: str, item: T) -> T:
        """Return the item and send it to all."""

        def act(deadline: float) -> T:
            mine = encoded(call, item)
            self._collect(call, deadline)
            self._answer(call, dict.fromkeys(self._others, self._own(call, mine, deadline)), deadline)
            return item

        return self._run(call, act)

    def _own(self, call: str, mine: list[Buffer] | TypeError, deadline: float) -> list[Buffer]:
        if isinstance(mine, TypeError):
            self._spoil(call, 0, mine, deadline)
        return mine

    def _read(self, call: str, frames: dict[int, Frame], deadline: float) -> list[Any]:
        """Return the objects of the others, ordered."""
        for index, frame in frames.items():
            if frame.kind == Kind.UP_ERROR:
                self._spoil(call, index, str(frame.payload, "utf-8", "replace"), deadline)
        try:
            return [decoded(call, frames[index].payload, self._group.names([index])) for index in self._others]
        except TypeError as error:
            self._spoil(call, 0, error, deadline)

    def _spoil(self, call: str, index: int, cause: TypeError | str, deadline: float) -> NoReturn:
        """End a round that came to nothing by what one member has met."""
        lost = self._group.lost([index], f"{self._group.names([index]).capitalize()} failed: {cause}")
        payload = json.dumps({"text": str(lost), "ranks": lost.ranks, "is_misuse": False}).encode()
        self._answer(call, {each: [payload] for each in self._others}, deadline, Kind.DOWN_ERROR)
        raise Spoiled(cause if isinstance(cause, TypeError) else lost)

    def _collect(self, call: str, deadline: float) -> dict[int, Frame]:
        """Return one frame of each other member, all of them for this call."""
        frames: dict[int, Frame] = {}
        while len(frames) < len(self._others):
            self._check_open(call)
            self._admit()
            for index in self._readable(call, frames, deadline):
                frame = self._hear(call, index)
                if frame is not None and index in frames:
                    raise Broken(self._group.lost([index], f"{call}(): {self._group.names([index])} spoke twice."))
                if frame is not None:
                    frames[index] = frame
        return frames

    def _arrive(self, index: int, sock: socket.socket) -> None:
        self._arrived.append((index, sock))
        if self._broken is not None:  # it came too late to be told with the others
            self._tell_of_end(self._broken)

    def _admit(self) -> None:
        with contextlib.suppress(IndexError):  # all are in, maybe by another thread
            while True:
                index, sock = self._arrived.popleft()
                self._peers[index] = Connection(sock)

    def _readable(self, call: str, frames: dict[int, Frame], deadline: float) -> list[int]:
        """Wait for any of the members, also those that have spoken: they may be gone since."""
        left = deadline - time.monotonic()
        if left <= 0:
            missing = set(self._others) - frames.keys()
            text = self._timed_out(call, f"{self._group.names(missing)} did not come")
            raise Broken(self._group.lost(missing, text))
        poll, indices = select.poll(), {}
        for index, connection in self._peers.items():
            indices[connection.fileno()] = index
            poll.register(connection, select.POLLIN)
        if len(self._peers) < len(self._others):
            left = min(left, ARRIVAL_SECONDS)
        return [indices[descriptor] for descriptor, _ in poll.poll(left * 1000)]

    def _hear(self, call: str, index: int) -> Frame | None:
        who = self._group.names([index])
        try:
            frame = self._peers[index].advance()
        except OSError as error:
            raise Broken(self._group.lost([index], f"{call}(): {who} is gone ({error}). {CLUES}")) from error
        if frame is None:
            return None
        if frame.kind == Kind.FAIL:
            raise Broken(self._group.lost([index], f"{call}(): {who} failed: {told(frame)}"))
        if frame.kind == Kind.BYE:
            raise Broken(self._group.lost([index], f"{call}(): {who} has closed its DistributedContext."))
        if CALLS[frame.call] != call:
            raise Broken(
                errors.MisuseError(
                    f"{who} called {CALLS[frame.call]}() while {self._group.names([0])} called {call}(); "
                    "every rank must make the same calls in the same order."
                )
            )
        return frame

    def _answer(
        self, call: str, answers: Mapping[int, Sequence[Buffer]], deadline: float, kind: Kind = Kind.DOWN
    ) -> None:
        # The last member may have come just in time.
        deadline = max(deadline, time.monotonic() + GRACE_SECONDS)
        for index, payload in answers.items():
            try:
                self._peers[index].send(kind, CALLS.index(call), payload, deadline)
            except TimeoutError as error:
                text = self._timed_out(call, f"{self._group.names([index])} did not take its answer")
                raise Broken(self._group.lost([index], text)) from error
            except OSError as error:
                self._hear(call, index)  # its last words, if it had any, say more
                text = f"{call}(): {self._group.names([index])} is gone ({error}). {CLUES}"
                raise Broken(self._group.lost([index], text)) from error

    def _connections(self) -> Sequence[Connection]:
        self._admit()
        return list(self._peers.values())
