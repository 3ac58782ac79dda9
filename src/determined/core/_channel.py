"""Frames on a connected socket: a header of fixed size, then one payload; every wait has a deadline.

Nothing here reads a pickle by itself: a connection is made only after the handshake (`_handshake.py`).
"""

from __future__ import annotations

import collections
import enum
import itertools
import os
import pickle
import select
import socket
import struct
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

Buffer = bytes | bytearray | memoryview

HEADER = struct.Struct("!BB6xQ")
LARGEST_PAYLOAD = 1 << 36
# What sendmsg takes at once on every platform.
BUFFERS_A_CALL = 512
# Buffers start at multiples of this, as arrays that are read in place want it.
ALIGNMENT = 16

_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Kind(enum.IntEnum):
    """What a frame is."""

    UP = 1  # a worker takes part in a collective, with its item
    UP_ERROR = 2  # the same, without an item: it could not be pickled
    DOWN = 3  # the chief's answer, which ends the collective
    DOWN_ERROR = 4  # the same for a collective that came to nothing
    FAIL = 5  # the channel ends here, and why
    BYE = 6  # an orderly end
    MESSAGE = 7  # of the side line, as are the rest
    BEAT = 8
    LOST = 9


class Frame(NamedTuple):
    """One frame as it was received."""

    kind: int
    call: int
    payload: memoryview


class Connection:
    """A socket that speaks in frames."""

    def __init__(self, sock: socket.socket, largest: int = LARGEST_PAYLOAD) -> None:
        sock.setblocking(False)
        self._socket = guarded(sock)
        self._largest = largest
        self._head: tuple[int, int] | None = None
        self._into = memoryview(bytearray(HEADER.size))
        self._filled = 0
        self._is_torn = False

    def fileno(self) -> int:
        """Return the descriptor, to wait for it."""
        return self._socket.fileno()

    def advance(self) -> Frame | None:
        """Take in what has arrived; returns a frame once one is whole. Raises OSError if the peer is gone."""
        while self._fill():
            if self._head is not None:
                return self._finish()
            kind, call, length = HEADER.unpack(self._into)
            if length > self._largest:
                raise ConnectionError(f"a frame of {length} bytes came; at most {self._largest} can")
            self._head = kind, call
            self._into, self._filled = memoryview(bytearray(length)), 0
        return None

    def receive(self, deadline: float) -> Frame:
        """Return the next frame. Raises TimeoutError at the deadline, OSError if the peer is gone."""
        while (frame := self.advance()) is None:
            self._wait(select.POLLIN, deadline)
        return frame

    def send(self, kind: Kind, call: int, payload: Sequence[Buffer], deadline: float) -> None:
        """Send one frame. Raises TimeoutError at the deadline, OSError if the peer is gone."""
        head = HEADER.pack(kind, call, sum(map(len, payload)))
        rest = collections.deque(memoryview(part) for part in (head, *payload) if len(part))
        if self._is_torn:
            # Whatever came next would be taken for the rest of a frame that was given up.
            raise ConnectionAbortedError("an earlier frame was not sent to its end")
        self._is_torn = True
        while rest:
            try:
                sent = self._socket.sendmsg(itertools.islice(rest, BUFFERS_A_CALL))
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            else:
                _drop(rest, sent)
        self._is_torn = False

    def send_some(self, data: Buffer) -> int:
        """Send what the socket takes right now; returns how many bytes that was."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

    def end_sending(self) -> None:
        """Let the peer see the end of what was sent; receiving goes on."""
        self._socket.shutdown(socket.SHUT_WR)

    def interrupt(self) -> None:
        """Wake a thread that waits for this connection: it finds the connection closed."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # gone already
            return

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _fill(self) -> bool:
        while self._filled < len(self._into):
            try:
                count = self._socket.recv_into(self._into[self._filled :])
            except BlockingIOError:
                return False
            if not count:
                raise ConnectionResetError("the connection was closed")
            self._filled += count
        return True

    def _finish(self) -> Frame:
        assert self._head is not None
        frame = Frame(*self._head, self._into)
        self._head, self._into, self._filled = None, memoryview(bytearray(HEADER.size)), 0
        return frame

    def _wait(self, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError("the deadline has passed")


class Waker:
    """Wakes a thread that waits in poll()."""

    def __init__(self) -> None:
        self._here, self._there = map(guarded, socket.socketpair())
        self._here.setblocking(False)
        self._there.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        return self._here.fileno()

    def wake(self) -> None:
        """Let the wait end."""
        try:
            self._there.send(b"\0")
        except OSError:  # full, so the thread wakes anyway; or closed, so there is none
            return

    def drain(self) -> None:
        """Forget all calls of `wake` so far."""
        try:
            self._here.recv(4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close both ends."""
        self._here.close()
        self._there.close()


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    """Return a small frame as bytes."""
    return HEADER.pack(kind, 0, len(payload)) + payload


def encode(item: Any) -> list[Buffer]:
    """Return the payload of an object: the name of its type, its pickle, and its large buffers as they are."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(item, protocol=5, buffer_callback=buffers.append)
    return pack([[type_name(item).encode()], [data], *([buffer.raw()] for buffer in buffers)])


def decode(payload: memoryview) -> Any:
    """Return the object of a payload; its arrays share the payload's memory."""
    _, data, *buffers = unpack(payload)
    return pickle.loads(data, buffers=buffers)


def encoded_type(payload: memoryview) -> str:
    """Return the name of the type of a payload's object."""
    return str(unpack(payload)[0], "utf-8", "replace")


def type_name(item: Any) -> str:
    """Return how messages name an object's type."""
    kind = type(item)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def pack(parts: Sequence[Sequence[Buffer]]) -> list[Buffer]:
    """Return buffers that hold the parts one after the other, each of them aligned, behind a table of their sizes."""
    sizes = [sum(map(len, part)) for part in parts]
    table = struct.pack(f"!{len(sizes) + 1}Q", len(sizes), *sizes)
    packed: list[Buffer] = [table, _padding(len(table))]
    for part, size in zip(parts, sizes, strict=True):
        packed += part
        packed.append(_padding(size))
    return packed


def unpack(payload: memoryview) -> list[memoryview]:
    """Return the parts that `pack` was given."""
    (count,) = struct.unpack_from("!Q", payload)
    sizes = struct.unpack_from(f"!{count}Q", payload, 8)
    start, parts = _aligned(8 * (count + 1)), []
    for size in sizes:
        parts.append(payload[start : start + size])
        start += _aligned(size)
    return parts


def guarded(sock: socket.socket) -> socket.socket:
    """Return the socket, which forked children will close.

    Otherwise a loader worker that outlives this process would keep its connections looking alive.
    """
    _open_sockets.add(sock)
    return sock


def _close_inherited() -> None:
    for sock in list(_open_sockets):
        sock.close()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _padding(size: int) -> bytes:
    return bytes(_aligned(size) - size)


def _drop(buffers: collections.deque[memoryview], count: int) -> None:
    while count:
        if len(buffers[0]) > count:
            buffers[0] = buffers[0][count:]
            return
        count -= len(buffers.popleft())


os.register_at_fork(after_in_child=_close_inherited)
