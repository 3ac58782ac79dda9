"""The thread of a rank that makes all calls to the store, and the log of events that ranks share through it.

A call to a store blocks for as long as its server is frozen or cut off. Because one thread makes all calls, the others
can stop waiting. The log is a sequence of small messages that every rank can append to. All ranks read it in the same
order, so they draw the same conclusions from it.
"""

from __future__ import annotations

import atexit
import json
import math
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

from determined import errors
from determined.core.distributed._lifeline import (
    ACKNOWLEDGED,
    CLOSED,
    ENDED,
    GOODBYE,
    STORE_CLOSES,
    Lifeline,
    LifelineServer,
    open_lifeline,
)
from determined.core.distributed._store import Store, connect, listen, resolve, serve

T = TypeVar("T")
Event = dict[str, Any]

POLL_INTERVAL_S = 0.1
MAX_WAIT_INTERVAL_S = 0.01
PARTING_TIMEOUT_S = 2.0
MAX_PARTING_S = 10.0


class Listener(Protocol):
    """Receives what happens to the ranks; both methods must return soon."""

    def on_event(self, sender: int, event: Event) -> None:
        """Handle an event, one's own included; all ranks get all events in the same order."""

    def on_left(self, rank: int, why: str) -> None:
        """Handle that a rank left: `why` is `CLOSED` if it closed its context."""


class Member(NamedTuple):
    """Which process of a job this is, and where and by which key its processes meet."""

    rank: int
    size: int
    machine: int
    host: str
    port: int
    lifeline_port: int
    key: bytes
    listener: socket.socket | None
    """On rank 0: listens at the port."""


class PeerLeft(Exception):
    """A rank left while others wait for it: (rank, why)."""


class Exchange:
    """The store, the log and the lifelines of one rank."""

    def __init__(self, member: Member, timeout: float) -> None:
        self._member = member
        self._timeout = timeout
        self._store: Store | None = None
        self._lines: dict[int, Lifeline] = {}
        self._server: LifelineServer | None = None
        self._queue: queue.Queue[Callable[[], None]] = queue.Queue()
        self._next_event = 0
        self._events: list[tuple[int, Event]] = []
        self._listener: Listener | None = None
        self._silence = math.inf
        self._left: dict[int, tuple[int, str]] = {}  # machine and reason, by rank
        self._is_store_closing = False
        self._is_orderly = True
        self.address = f"{member.host}:{member.port}"
        """Where the store is."""
        self.is_closed = False
        self.broken: errors.DeterminedException | None = None
        """Why no collective is possible any more."""
        if member.rank == 0:
            self._serve()
        self._thread = threading.Thread(target=self._run, name="determined-exchange", daemon=True)
        self._thread.start()
        atexit.register(self._close_at_exit)

    def submit(self, action: Callable[[], T]) -> Future[T]:
        """Run a function on the thread of the exchange."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = action()
            except BaseException as error:
                future.set_exception(self._lost(error))
            else:
                future.set_result(result)

        self._queue.put(run)
        return future

    def publish(self, event: Event) -> Future[None]:
        """Append an event to the log."""
        return self.submit(lambda: self._append(event))

    def end(self, error: errors.DeterminedException, text: str, ranks: Sequence[int]) -> None:
        """Make all further collectives fail: on this rank because of `error`, on the others with `text`."""
        self.broken = error
        is_misuse = isinstance(error, errors.MisuseError)
        self.publish({"kind": "broken", "text": text, "ranks": ranks, "is_misuse": is_misuse})

    def listen(self, listener: Listener, silence: float) -> None:
        """Report all events to a listener, and ranks that left or were silent for this many seconds."""

        def start() -> None:
            self.join(time.monotonic() + self._timeout)
            self._listener, self._silence = listener, silence
            for sender, event in self._events:
                listener.on_event(sender, event)
            for rank, (_, why) in list(self._left.items()):
                listener.on_left(rank, why)

        self.submit(start)

    def abandon(self) -> None:
        """Show the other ranks the end of this process, instead of a goodbye, when it closes."""
        self._is_orderly = False

    def close(self) -> None:
        """End the thread after what is waiting in its queue; a collective that waits for others fails."""
        self.is_closed = True
        self._queue.put(lambda: None)
        if self._thread is not threading.current_thread():
            # The thread of a worker may wait for the store of a rank 0 that is frozen.
            self._thread.join(MAX_PARTING_S if self._member.rank == 0 else PARTING_TIMEOUT_S)
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        # Others may still read from the store of a process that ends without closing its context, and a thread that
        # comes back from torch while the interpreter ends aborts the process.
        self.abandon()
        self.close()

    # What follows runs on the thread of the exchange, except `_serve` and `_on_news`.

    @property
    def store(self) -> Store:
        """The store of the job. Raises what ended the exchange, and PeerLeft if rank 0 closes its store."""
        if self.broken is not None:
            raise self.broken
        if self._store is None:
            rank, (_, why) = next(iter(self._left.items()), (0, (0, CLOSED)))
            raise PeerLeft(rank, why)
        return self._store

    def join(self, deadline: float) -> None:
        """Connect to rank 0, unless that is done. Raises ConnectionError at the deadline."""
        if self._lines or self._left or self._member.rank == 0:
            return
        host, rank, machine = self._member.host, self._member.rank, self._member.machine
        store = connect(host, self._member.port, self._member.key, deadline, lambda: self.is_closed)
        while not store.has(["job"]):
            if time.monotonic() > deadline or self.is_closed:
                raise ConnectionError("its store is empty")
            time.sleep(MAX_WAIT_INTERVAL_S)
        job = json.loads(store.get(["job"])[0])
        if job["size"] != self._member.size:
            raise errors.InternalException(
                f"The job at {self.address} has {job['size']} processes, but this is one of {self._member.size}; give "
                "every process the same sizes, and every job another port_offset."
            )
        store.bind(job["nonce"])
        token = secrets.token_bytes(16)
        if store.claim(f"member/{rank}", token) != token:
            raise errors.InternalException(
                f"Rank {rank} of the job at {self.address} is there already; give every process a rank of its own, and "
                "every job another port_offset."
            )
        address = (resolve(host)[1], job["lifelines"])
        self._store = store
        self._lines = {0: open_lifeline(address, rank, machine, store.sign, self._on_news)}

    def wait_for(self, names: Sequence[str], machine: int | None, deadline: float) -> list[str]:
        """Wait for values of all ranks, or of those of a machine; returns the names that are missing at the deadline.

        Raises PeerLeft if one of these ranks has left, and what ended the exchange if it has.
        """
        began = poll_due = time.monotonic()
        while (now := time.monotonic()) <= deadline:
            if now >= poll_due:
                self._poll()
                poll_due = now + POLL_INTERVAL_S
            # Before the values are looked for, because what ranks stored before they left counts.
            left = {**self._left, **({0: (0, CLOSED)} if self._is_store_closing else {})}
            if self.store.has(names):
                return []
            if self.is_closed:
                raise errors.InternalException("closed")
            for rank, (of, why) in left.items():
                if machine in (None, of):
                    raise PeerLeft(rank, why)
            self._run_next(min(MAX_WAIT_INTERVAL_S, (now - began) / 8))
        return [name for name in names if not self.store.has([name])]

    def _serve(self) -> None:
        member = self._member
        assert member.listener is not None
        lifelines = listen(member.host, member.lifeline_port)
        store = self._store = serve(member.listener, member.host, member.key)
        nonce = secrets.token_hex(16)
        job = {"size": member.size, "nonce": nonce, "lifelines": lifelines.getsockname()[1]}
        store.put("job", json.dumps(job).encode())
        store.bind(nonce)
        self._server = LifelineServer(lifelines, store.sign, self._on_news)
        self._lines = self._server.lines

    def _run(self) -> None:
        while not (self.is_closed and self._queue.empty()):
            self._run_next(POLL_INTERVAL_S if self._listener is not None else None)
            try:
                if self._listener is not None or self._is_store_closing:
                    self._poll()
                # Within another machine, collectives may go on.
                if self._is_store_closing and self._member.machine == 0 and self._store is not None:
                    self._store = None
                    self._lines[0].send(ACKNOWLEDGED)
            except Exception as error:
                if not isinstance(self._lost(error), PeerLeft) and self.broken is None:
                    self.broken = errors.InternalException(f"The exchange between ranks failed: {error!r}")
        self._part()

    def _run_next(self, seconds: float | None) -> None:
        """Run the next function of the queue; if there is none within these seconds, return."""
        try:
            action = self._queue.get(timeout=seconds)
        except queue.Empty:
            return
        action()

    def _lost(self, error: BaseException) -> BaseException:
        """Return the error to raise for one that a call to the store raised."""
        is_torchs = isinstance(error, RuntimeError) and not isinstance(error, errors.DeterminedException)
        if not is_torchs or self._member.rank == 0:
            return error
        self._note_left(0, 0, ENDED)
        return PeerLeft(0, ENDED)

    def _append(self, event: Event) -> None:
        content = json.dumps({"sender": self._member.rank, "id": secrets.token_hex(8), **event}).encode()
        number = self._next_event
        while self._store is not None and self._store.claim(f"log/{number}", content) != content:
            number += 1

    def _poll(self) -> None:
        """Read the events that are new."""
        while self._store is not None and self._store.has([name := f"log/{self._next_event}"]):
            self._next_event += 1
            event = json.loads(self._store.get([name])[0])
            self._handle(event.pop("sender"), event)

    def _handle(self, sender: int, event: Event) -> None:
        if event["kind"] == "left" and event["rank"] == self._member.rank:
            self._note_left(0, 0, f"it has given this rank up: {event['why']}")
        elif event["kind"] == "left":
            self._note_left(event["rank"], event["machine"], event["why"])
        elif event["kind"] != "broken":
            self._events.append((sender, event))
            if self._listener is not None:
                self._listener.on_event(sender, event)
        elif event["is_misuse"]:
            self.broken = self.broken or errors.MisuseError(event["text"])
        else:
            self.broken = self.broken or errors.PeerLostException(event["text"], event["ranks"])

    def _on_news(self, line: Lifeline) -> None:
        """Handle what a lifeline reports, on its thread."""
        if line.end is None and line.silent_s >= self._silence:
            line.close(f"nothing was heard of it for {self._silence:g} s: it is frozen or cut off")
        elif line.end is None and STORE_CLOSES[0] in line.received:
            self._is_store_closing = True
            self.submit(lambda: None)
        elif line.end is not None and self._member.rank > 0:
            self._note_left(0, 0, line.end)
        elif line.end is not None:
            self._lines.pop(line.rank, None)
            self.publish({"kind": "left", "rank": line.rank, "machine": line.machine, "why": line.end})

    def _note_left(self, rank: int, machine: int, why: str) -> None:
        if rank == 0:
            self._store = None
        if rank not in self._left:
            self._left[rank] = (machine, why)
            if self._listener is not None:
                self._listener.on_left(rank, why)

    def _part(self) -> None:
        """Take leave of the others. Rank 0 first waits until they have read what they need from its store."""
        lines = list(self._lines.values())
        if self._server is not None:
            deadline = time.monotonic() + MAX_PARTING_S
            for line in lines:
                line.send(STORE_CLOSES)
            while any(_may_read(line) for line in lines) and time.monotonic() < deadline:
                time.sleep(1e-3)
            self._server.close()
            lines = list(self._lines.values())
        for line in lines:
            line.send(GOODBYE if self._is_orderly else ACKNOWLEDGED)
            if self._is_orderly:  # else the end of the process closes it
                line.close()
        store, self._store = self._store, None
        if store is not None:
            store.close()


def _may_read(line: Lifeline) -> bool:
    """Return whether a rank may still read from the store."""
    return line.end is None and ACKNOWLEDGED[0] not in line.received and line.silent_s < PARTING_TIMEOUT_S
