"""Small messages between the chief and the other ranks, beside the collectives, and word of ranks that are lost.

Every worker has one connection to the chief for it, and every rank one thread. The thread sends a heartbeat each
second, so a rank counts as lost when its process ends (at once) or when it stays silent (frozen, or behind a cut
link). Code that holds Python's global lock for longer than the silence that is allowed looks frozen as well.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import json
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from determined import errors
from determined.core._address import Address
from determined.core._channel import Connection, Frame, Kind, Waker, frame
from determined.core._group import Group
from determined.core._handshake import Purpose, Reception, join

logger = logging.getLogger("determined.core")

T = TypeVar("T")

Message = dict[str, Any]
OnMessage = Callable[[int, Message], None]
OnLost = Callable[[int, str], None]

LARGEST_MESSAGE = 1_000_000
BEAT_SECONDS = 1.0
PARTING_SECONDS = 2.0
_FLUSHING = 0.002


class SideLine(Protocol):
    """Control messages of one rank; see `DistributedContext.side_line`."""

    def start(self, on_message: OnMessage, on_lost: OnLost, *, silence: float = 30.0) -> None:
        """Begin to listen; both handlers run on the side line's own thread and should return soon.

        `on_message(rank, message)` gets what `send` (on the chief) and `publish` (everywhere, from rank 0) deliver.
        `on_lost(rank, why)` runs once for a rank that ended without `close()`, or was silent for `silence` seconds.
        """

    def send(self, message: Message) -> None:
        """Deliver a message to the chief's handler. From any thread; does not wait. Lost if the chief is gone."""

    def publish(self, message: Message) -> None:
        """Deliver a message to the handlers of all ranks, in the same order everywhere. Only the chief can."""

    def flush(self, seconds: float) -> None:
        """Wait until all messages are on their way, for so long at most. Not from a handler."""

    def close(self) -> None:
        """Send what is waiting, say goodbye and end the thread."""


class _Peer:
    """One connection, what is still to be sent on it, and when it was last heard of."""

    def __init__(self, sock: socket.socket, backlog: Iterable[bytes] = ()) -> None:
        self.connection = Connection(sock, LARGEST_MESSAGE)
        self.outgoing = bytearray(b"".join(backlog))
        self.heard = time.monotonic()

    @property
    def events(self) -> int:
        return select.POLLIN | select.POLLOUT if self.outgoing else select.POLLIN

    def flush(self) -> None:
        """Send what the connection takes. That it is broken shows when it is read, after its last words."""
        with contextlib.suppress(OSError):
            while self.outgoing and (sent := self.connection.send_some(self.outgoing)):
                del self.outgoing[:sent]

    def take(self) -> Frame | None:
        """Return the next frame if it is here."""
        received = self.connection.advance()
        if received is not None:
            self.heard = time.monotonic()
        return received

    def has_parted(self) -> bool:
        """Go on with an orderly end; True once the other end has taken all, or is gone."""
        try:
            had_more = bool(self.outgoing)
            self.flush()
            if had_more and not self.outgoing:
                self.connection.end_sending()
            while self.connection.advance() is not None:
                pass
        except OSError:
            return True
        return False

    def say_and_close(self, data: bytes) -> None:
        """Send a last frame if the connection still takes one, and close it."""
        self.outgoing += data
        self.flush()
        self.connection.close()


class _End(abc.ABC):
    """What the chief's end and a worker's end share: the thread, its queue, its peers and its clock."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._peers: dict[int, _Peer] = {}
        self._queue: collections.deque[tuple[Kind, bytes]] = collections.deque()
        self._waker = Waker()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._beat_due = 0.0
        self._silence = 0.0
        self._on_message: OnMessage = lambda rank, message: None
        self._on_lost: OnLost = lambda rank, why: None

    def start(self, on_message: OnMessage, on_lost: OnLost, *, silence: float = 30.0) -> None:
        """Begin to listen; see `SideLine.start`."""
        if self._thread is not None:
            raise errors.InternalException("SideLine.start() was called twice; one call serves the whole run.")
        if not silence > 2 * BEAT_SECONDS:
            raise ValueError(
                f"SideLine.start(silence={silence!r}): heartbeats come every {BEAT_SECONDS:g} s; allow more than "
                f"{2 * BEAT_SECONDS:g} s."
            )
        self._on_message, self._on_lost, self._silence = on_message, on_lost, silence
        self._thread = threading.Thread(target=self._run, name="determined-side-line", daemon=True)
        self._thread.start()

    @property
    def is_started(self) -> bool:
        """Whether somebody listens."""
        return self._thread is not None

    def send(self, message: Message) -> None:
        """Deliver a message to the chief's handler."""
        self._put(Kind.UP, message)

    def flush(self, seconds: float) -> None:
        """Wait until all messages are on their way, for so long at most."""
        deadline = time.monotonic() + seconds
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < deadline:
            if not self._queue and not any(peer.outgoing for peer in list(self._peers.values())):
                return
            time.sleep(_FLUSHING)

    def close(self) -> None:
        """Send what is waiting, say goodbye and end the thread."""
        self._is_closing = True
        self._waker.wake()
        if self._thread is None:
            self._waker.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(2 * PARTING_SECONDS)

    def _put(self, kind: Kind, message: Message) -> None:
        if self._is_closing:
            raise errors.InternalException("SideLine: no message can be sent after close().")
        self._queue.append((kind, _checked(message)))
        self._waker.wake()

    def _run(self) -> None:
        try:
            if self._open():
                while not self._is_over():
                    self._turn()
            self._deliver_all()
            self._part(time.monotonic() + PARTING_SECONDS)
        finally:
            for peer in self._peers.values():
                peer.connection.close()
            self._waker.close()

    def _turn(self) -> None:
        for index in self._wait():
            self._serve(index)
        self._deliver_all()
        now = time.monotonic()
        if now >= self._beat_due:
            self._beat_due = now + BEAT_SECONDS
            self._judge(now)
            self._send_all(frame(Kind.BEAT))

    def _wait(self) -> list[int]:
        poll = select.poll()
        poll.register(self._waker, select.POLLIN)
        indices = {peer.connection.fileno(): index for index, peer in self._peers.items()}
        for peer in self._peers.values():
            poll.register(peer.connection, peer.events)
        ready = poll.poll(max(0.0, self._beat_due - time.monotonic()) * 1000)
        self._waker.drain()
        return [indices[descriptor] for descriptor, _ in ready if descriptor in indices]

    def _serve(self, index: int) -> None:
        peer = self._peers[index]
        try:
            while index in self._peers and (received := peer.take()) is not None:
                self._receive(index, received)
        except OSError as error:
            self._deliver_all()  # first what follows from its last words
            self._lose(index, f"its process ended or its connection broke ({error})")
        if index in self._peers:
            peer.flush()

    def _receive(self, index: int, received: Frame) -> None:
        if received.kind == Kind.BYE:
            self._peers.pop(index).connection.close()
        elif received.kind == Kind.MESSAGE:
            _handle(self._on_message, index, json.loads(bytes(received.payload)))
        elif received.kind == Kind.LOST:
            self._hear_of_loss(**json.loads(bytes(received.payload)))

    def _deliver_all(self) -> None:
        while self._queue:
            self._deliver(*self._queue[0])
            self._queue.popleft()  # only now, since `flush` waits for it

    def _send_all(self, data: bytes) -> None:
        for peer in self._peers.values():
            peer.outgoing += data
            peer.flush()

    def _judge(self, now: float) -> None:
        for index, peer in list(self._peers.items()):
            if now - peer.heard > self._silence:
                self._lose(index, f"nothing was heard of it for {self._silence:g} s: it is frozen or cut off")

    def _part(self, deadline: float) -> None:
        """Say goodbye and wait until the others have taken all: closing at once could throw it away."""
        for peer in self._peers.values():
            peer.outgoing += frame(Kind.BYE)
        staying = list(self._peers.values())
        while staying and time.monotonic() < deadline:
            poll = select.poll()
            for peer in staying:
                poll.register(peer.connection, peer.events)
            poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            staying = [peer for peer in staying if not peer.has_parted()]

    @abc.abstractmethod
    def _open(self) -> bool:
        """Get ready to listen; False if that cannot be."""

    @abc.abstractmethod
    def _is_over(self) -> bool:
        """Say whether there is nothing left to do."""

    @abc.abstractmethod
    def _deliver(self, kind: Kind, data: bytes) -> None:
        """Take a message from the queue to whom it is for."""

    @abc.abstractmethod
    def _lose(self, index: int, why: str) -> None:
        """Give up a rank, and say so."""

    @abc.abstractmethod
    def _hear_of_loss(self, rank: int, why: str) -> None:
        """Take note of a rank that the other end has given up."""


class ChiefLine(_End):
    """The chief's end: every worker is connected to it."""

    def __init__(self, group: Group, reception: Reception) -> None:
        super().__init__(group)
        self._arrived: collections.deque[tuple[int, socket.socket]] = collections.deque()
        self._missing = set(range(1, group.size))
        self._backlog: list[bytes] = []
        self._join_deadline = 0.0
        reception.route(Purpose.SIDE_LINE, self._arrive)

    def publish(self, message: Message) -> None:
        """Deliver a message to the handlers of all ranks, in the same order everywhere."""
        self._put(Kind.DOWN, message)

    def close(self) -> None:
        """Send what is waiting, say goodbye and end the thread."""
        super().close()
        self._send_off()

    def _arrive(self, index: int, sock: socket.socket) -> None:
        self._arrived.append((index, sock))
        self._waker.wake()
        if self._is_closing:
            self._send_off()

    def _send_off(self) -> None:
        """Say goodbye to workers that came when the line was closing."""
        for _, sock in _taken(self._arrived):
            _Peer(sock).say_and_close(frame(Kind.BYE))

    def _open(self) -> bool:
        self._join_deadline = time.monotonic() + self._group.timeout
        return True

    def _is_over(self) -> bool:
        self._admit()
        return self._is_closing

    def _admit(self) -> None:
        for index, sock in _taken(self._arrived):
            self._missing.discard(index)
            self._peers[index] = _Peer(sock, self._backlog)
        if not self._missing:
            self._backlog.clear()

    def _deliver(self, kind: Kind, data: bytes) -> None:
        if kind == Kind.DOWN:
            self._tell(frame(Kind.MESSAGE, data))
        _handle(self._on_message, 0, json.loads(data))

    def _tell(self, data: bytes) -> None:
        """Send a frame to all workers; those that are not here yet get it when they come."""
        if self._missing:
            self._backlog.append(data)
        self._send_all(data)

    def _judge(self, now: float) -> None:
        super()._judge(now)
        if now > self._join_deadline:
            for index in sorted(self._missing):
                self._lose(index, f"it did not come within {self._group.timeout:g} s (DET_DISTRIBUTED_TIMEOUT)")

    def _lose(self, index: int, why: str) -> None:
        self._missing.discard(index)
        facts = frame(Kind.LOST, json.dumps({"rank": index, "why": why}).encode())
        peer = self._peers.pop(index, None)
        if peer is not None:
            peer.say_and_close(facts)
        self._tell(facts)
        _handle(self._on_lost, index, why)

    def _hear_of_loss(self, rank: int, why: str) -> None:
        """Workers report no losses."""


class WorkerLine(_End):
    """A worker's end: the chief is all it is connected to."""

    def __init__(self, group: Group, address: Address, key: bytes) -> None:
        super().__init__(group)
        self._address = address
        self._key = key

    def publish(self, message: Message) -> None:
        """Only the chief can publish."""
        raise errors.MisuseError(
            f"SideLine.publish() was called on rank {self._group.index}; only rank 0 can. Use send(), and let the "
            "chief's handler publish."
        )

    def _open(self) -> bool:
        claim = self._group.claim(Purpose.SIDE_LINE)
        deadline = time.monotonic() + self._group.timeout
        try:
            self._peers[0] = _Peer(join(self._address, self._key, claim, deadline, lambda: self._is_closing))
        except (OSError, errors.InternalException) as error:
            if not self._is_closing:
                _handle(self._on_lost, 0, f"it could not be reached at {self._address}: {error}")
            return False
        return True

    def _is_over(self) -> bool:
        return self._is_closing or not self._peers

    def _deliver(self, kind: Kind, data: bytes) -> None:
        self._send_all(frame(Kind.MESSAGE, data))

    def _lose(self, index: int, why: str) -> None:
        self._peers.pop(index).connection.close()
        _handle(self._on_lost, index, why)

    def _hear_of_loss(self, rank: int, why: str) -> None:
        if rank == self._group.index:
            self._lose(0, f"it has given this rank up: {why}")
        else:
            _handle(self._on_lost, rank, why)


def _taken(queue: collections.deque[T]) -> Iterator[T]:
    """Take out what is in a queue that other threads use too."""
    with contextlib.suppress(IndexError):
        while True:
            yield queue.popleft()


def _checked(message: Message) -> bytes:
    if not isinstance(message, dict):
        raise TypeError(f"SideLine: {message!r} is no message; pass a dict of what JSON can hold.")
    try:
        data = json.dumps(message).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(f"SideLine: the message {message!r} cannot be written as JSON: {error}.") from error
    if len(data) > LARGEST_MESSAGE:
        raise ValueError(
            f"SideLine: a message of {len(data)} bytes is too long, at most {LARGEST_MESSAGE} can be sent; exchange "
            "large objects by a collective."
        )
    return data


def _handle(handler: Callable[[int, Any], None], rank: int, content: Any) -> None:
    try:
        handler(rank, content)
    except Exception:
        # The thread must go on: it carries the heartbeats.
        logger.exception("A handler of the side line failed on %r of rank %d", content, rank)
