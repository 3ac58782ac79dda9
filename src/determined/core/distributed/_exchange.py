"""The thread of a rank that makes all calls to the store, and the log of events that ranks share through it.

A call to a store blocks for as long as its server is frozen or cut off. Because one thread makes all of them, everybody
else can stop waiting. The log is a sequence of small messages that every rank can append to and all ranks read in
the same order, so that all draw the same conclusions from it.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import dataclasses
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from determined import errors
from determined.core.distributed._address import listen, resolve
from determined.core.distributed._layout import Layout
from determined.core.distributed._lifeline import (
    ACKNOWLEDGED,
    BEAT,
    BEAT_INTERVAL_S,
    CLOSED,
    ENDED,
    GOODBYE,
    HELLO,
    STORE_CLOSES,
    Lifeline,
    LifelineServer,
    open_lifeline,
)
from determined.core.distributed._store import Store, connect, serve

T = TypeVar("T")
Event = dict[str, Any]

POLL_INTERVAL_S = 0.1
MAX_WAIT_INTERVAL_S = 0.01
PARTING_TIMEOUT_S = 2.0
MAX_PARTING_S = 10.0

_abandoned: list[list[Lifeline]] = []


class Listener(Protocol):
    """Is told what happens to the ranks; both methods must return soon."""

    def on_event(self, sender: int, event: Event) -> None:
        """Handle an event, one's own included; all ranks get all events in the same order."""

    def on_left(self, rank: int, why: str) -> None:
        """Handle that a rank left: `why` is `CLOSED` if it did so in order."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where the ranks of a job meet, and the key by which they know each other."""

    host: str
    port: int
    lifeline_port: int
    key: bytes
    listener: socket.socket | None = None
    """On rank 0: listens at the port."""


class PeerLeft(Exception):
    """A rank left while others wait for it: (rank, why)."""


class Exchange:
    """The store, the log and the lifelines of one rank."""

    def __init__(self, layout: Layout, place: Place, timeout: float) -> None:
        self._layout = layout
        self._place = place
        self._timeout = timeout
        self._store: Store | None = None
        self._lines: dict[int, Lifeline] = {}
        self._server: LifelineServer | None = None
        self._queue: queue.Queue[Callable[[], None]] = queue.Queue()
        self._next_event = 0
        self._events: list[tuple[int, Event]] = []
        self._listener: Listener | None = None
        self._silence = 0.0
        self._left: dict[int, tuple[int, str]] = {}
        self._beat_due = 0.0
        self._busy_since: float | None = None
        self._is_store_closing = False
        self._is_orderly = True
        self.address = f"{place.host}:{place.port}"
        """Where the store is."""
        self.is_closed = False
        self.broken: errors.DeterminedException | None = None
        """Why no collective is possible any more."""
        if layout.rank == 0:
            self._serve()
        self._thread = threading.Thread(target=self._run, name="determined-exchange", daemon=True)
        self._thread.start()
        atexit.register(self._close_at_exit)

    @property
    def store(self) -> Store:
        """The store of the job, for the thread of the exchange. Raises PeerLeft if it is gone."""
        if self._store is None:
            raise PeerLeft(0, self._left[0][1] if 0 in self._left else CLOSED)
        return self._store

    @property
    def _silent(self) -> str:
        return f"nothing was heard of it for {self._silence:g} s: it is frozen or cut off"

    @property
    def _stalled_s(self) -> float:
        """How long the store has not answered."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def submit(self, action: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Run a function on the thread of the exchange."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                result = action()
            except BaseException as error:
                future.set_exception(self._lost(error))
            else:
                future.set_result(result)

        self._queue.put(run)
        return future

    def publish(self, event: Event) -> concurrent.futures.Future[None]:
        """Append an event to the log."""
        return self.submit(lambda: self._append(event))

    def end(self, error: errors.DeterminedException, text: str, ranks: Sequence[int]) -> None:
        """Let no collective follow, on any rank: here because of `error`, elsewhere because of what `text` says."""
        self.broken = error
        is_misuse = isinstance(error, errors.MisuseError)
        self.publish({"kind": "broken", "text": text, "ranks": ranks, "is_misuse": is_misuse})

    def listen(self, listener: Listener, silence: float) -> None:
        """Tell a listener of all events, and of ranks that left or were silent for so many seconds."""

        def start() -> None:
            self.join(time.monotonic() + self._timeout)
            self._listener, self._silence = listener, silence
            for sender, event in self._events:
                listener.on_event(sender, event)
            for rank, (_, why) in list(self._left.items()):
                listener.on_left(rank, why)

        self.submit(start)

    def abandon(self) -> None:
        """Let others see this process end, instead of a goodbye, when it closes."""
        self._is_orderly = False

    def close(self) -> None:
        """End the thread after what is waiting in its queue; a collective that waits for others fails."""
        self.is_closed = True
        self._queue.put(lambda: None)
        if self._thread is not threading.current_thread():
            # That of a worker may wait for the store of a rank 0 that is frozen.
            self._thread.join(MAX_PARTING_S if self._layout.rank == 0 else PARTING_TIMEOUT_S)
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        # Others may still read from the store of a process that ends without closing its context, and a thread that
        # comes back from torch while the interpreter ends aborts the process.
        self.abandon()
        self.close()

    # What follows runs on the thread of the exchange, except what is called with news of a lifeline.

    def join(self, deadline: float) -> None:
        """Find the store of rank 0, unless that is done. Raises ConnectionError at the deadline."""
        if self._lines or self._left or self._layout.rank == 0:
            return
        place, layout = self._place, self._layout
        store = connect(place.host, place.port, place.key, deadline, self._is_given_up)
        while not store.has(["job"]):
            if time.monotonic() > deadline or self._is_given_up():
                raise ConnectionError("its store is empty")
            time.sleep(MAX_WAIT_INTERVAL_S)
        job = json.loads(store.get(["job"])[0])
        if job["size"] != layout.size:
            raise errors.InternalException(
                f"The job at {self.address} has {job['size']} processes, but this is one of {layout.size}; give every "
                "process the same sizes, and every job another port_offset."
            )
        store.bind(job["nonce"])
        token = secrets.token_bytes(16)
        if store.claim(f"member/{layout.rank}", token) != token:
            raise errors.InternalException(
                f"Rank {layout.rank} of the job at {self.address} is there already; give every process a rank of its "
                "own, and every job another port_offset."
            )
        hello = HELLO.pack(layout.rank, layout.cross_rank, _signature(store, layout.rank, layout.cross_rank))
        self._store = store
        store.progress = self._on_progress
        self._lines = {0: open_lifeline(resolve(place.host)[1], job["lifelines"], hello, self._on_news)}

    def wait_for(self, names: Sequence[str], machine: int | None, deadline: float) -> list[str]:
        """Wait for values of other ranks, all of them or those of a machine; returns those missing at the deadline.

        Raises PeerLeft if one of these ranks has left, and what ended the exchange if it has.
        """
        began = time.monotonic()
        poll_due = began
        while (now := time.monotonic()) <= deadline:
            if now >= poll_due:
                self._poll()
                poll_due = now + POLL_INTERVAL_S
            if self.broken is not None:
                raise self.broken
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
        place, listener = self._place, self._place.listener
        assert listener is not None
        lifelines = listen(place.host, place.lifeline_port)
        store = self._store = serve(listener, place.host, place.key)
        nonce = secrets.token_hex(16)
        job = {"size": self._layout.size, "nonce": nonce, "lifelines": lifelines.getsockname()[1]}
        store.put("job", json.dumps(job).encode())
        store.bind(nonce)
        store.progress = self._on_progress

        def is_member(rank: int, machine: int, signature: bytes) -> bool:
            return 0 < rank < self._layout.size and signature == _signature(store, rank, machine)

        self._server = LifelineServer(lifelines, is_member, self._on_news)
        self._lines = self._server.lines

    def _run(self) -> None:
        while not (self.is_closed and self._queue.empty()):
            self._run_next(POLL_INTERVAL_S if self._listener is not None else BEAT_INTERVAL_S)
            try:
                if self._listener is not None or self._is_store_closing:
                    self._poll()
                # Within another machine, collectives may go on.
                if self._is_store_closing and self._layout.cross_rank == 0 and self._store is not None:
                    self._store = None
                    self._lines[0].send(ACKNOWLEDGED)
            except Exception as error:
                if not isinstance(self._lost(error), PeerLeft) and self.broken is None:
                    self.broken = errors.InternalException(f"The exchange between ranks failed: {error!r}")
            self._busy_since = None
        self._part()

    def _run_next(self, seconds: float) -> None:
        """Run the next function of the queue, or wait for it as long."""
        self._busy_since = None
        try:
            action = self._queue.get(timeout=seconds)
        except queue.Empty:
            self._on_progress()
        else:
            self._on_progress()
            action()

    def _on_progress(self) -> None:
        now = self._busy_since = time.monotonic()
        if now < self._beat_due:
            return
        self._beat_due = now + BEAT_INTERVAL_S
        for line in list(self._lines.values()):
            if self._layout.rank > 0:
                line.send(BEAT)
            elif self._silence and now - line.heard > self._silence:
                line.close(self._silent)

    def _is_given_up(self) -> bool:
        self._on_progress()
        return self.is_closed

    def _lost(self, error: BaseException) -> BaseException:
        """Return the error to raise for one that a call to the store raised."""
        is_torchs = isinstance(error, RuntimeError) and not isinstance(error, errors.DeterminedException)
        if not is_torchs or self._layout.rank == 0:
            return error
        self._note_left(0, 0, ENDED)
        return PeerLeft(0, ENDED)

    def _append(self, event: Event) -> None:
        content = json.dumps({"sender": self._layout.rank, "id": secrets.token_hex(8), **event}).encode()
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
        if event["kind"] == "left" and event["rank"] == self._layout.rank:
            self._note_left(0, 0, f"it has given this rank up: {event['why']}")
        elif event["kind"] == "left":
            self._note_left(event["rank"], event["machine"], event["why"])
        elif event["kind"] == "broken":
            if event["is_misuse"]:
                self.broken = self.broken or errors.MisuseError(event["text"])
            else:
                self.broken = self.broken or errors.PeerLostException(event["text"], event["ranks"])
        else:
            self._events.append((sender, event))
            if self._listener is not None:
                self._listener.on_event(sender, event)

    def _on_news(self, line: Lifeline) -> None:
        """Handle what a lifeline tells, on its thread."""
        if self._layout.rank > 0:
            if line.end is not None:
                self._note_left(0, 0, line.end)
            elif self._silence and self._stalled_s > self._silence:
                line.close(self._silent)
            elif STORE_CLOSES[0] in line.received:
                self._is_store_closing = True
                self.submit(lambda: None)
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
        if self._server is not None:
            deadline = time.monotonic() + MAX_PARTING_S
            for line in list(self._lines.values()):
                line.send(STORE_CLOSES)
            while any(self._waits(line) for line in list(self._lines.values())) and time.monotonic() < deadline:
                time.sleep(1e-3)
            self._server.close()
        for line in list(self._lines.values()):
            line.send(GOODBYE if self._is_orderly else ACKNOWLEDGED)
            if self._is_orderly:
                line.close()
        if not self._is_orderly:
            _abandoned.append(list(self._lines.values()))  # the end of the process closes them
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _waits(self, line: Lifeline) -> bool:
        """Return whether a rank may still read from the store."""
        return ACKNOWLEDGED[0] not in line.received and time.monotonic() - line.heard < PARTING_TIMEOUT_S


def _signature(store: Store, rank: int, machine: int) -> bytes:
    return store.sign("hello", f"{rank} {machine}".encode())
