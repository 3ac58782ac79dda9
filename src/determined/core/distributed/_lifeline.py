"""A socket from each rank to rank 0, which ends with its process.

A store does not tell that one of its clients has died, so this is how ranks notice at once that another is gone, on any
machine. A lifeline carries single bytes only. Every rank sends rank 0 a heartbeat each second, by which that notices a
rank that is frozen or cut off; the other ranks notice the same of rank 0 because its store does not answer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable

BEAT, STORE_CLOSES, ACKNOWLEDGED, GOODBYE = b".", b"s", b"a", b"g"
BEAT_INTERVAL_S = 1.0
HELLO = struct.Struct("!II32s")  # rank, machine, signature
HELLO_TIMEOUT_S = 5.0
MAX_UNKNOWN = 128
CLOSED = "has closed its DistributedContext"
ENDED = "its process ended or its connection broke"

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Lifeline:
    """One end of a lifeline. A thread reads it, and calls `on_news`: for a byte, for a second without, at the end."""

    def __init__(self, sock: socket.socket, rank: int, machine: int, on_news: Callable[[Lifeline], None]) -> None:
        self.rank = rank
        """The rank at the other end."""
        self.machine = machine
        self.heard = time.monotonic()
        self.received: set[int] = set()
        self.end: str | None = None
        """Why it has ended, once it has."""
        self._socket = _guarded(sock)
        self._socket.settimeout(BEAT_INTERVAL_S)
        self._on_news = on_news
        threading.Thread(target=self._read, name="determined-lifeline", daemon=True).start()

    def send(self, byte: bytes) -> None:
        """Send a byte; that the other end is gone shows by reading."""
        with contextlib.suppress(OSError):
            self._socket.send(byte, socket.MSG_DONTWAIT)

    def close(self, why: str = CLOSED) -> None:
        """Close this end, because of what `why` says about the other."""
        self.end = self.end or why
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        while self.end is None:
            try:
                data = self._socket.recv(64)
            except TimeoutError:
                self._on_news(self)
                continue
            except OSError:
                data = b""
            self.heard = time.monotonic()
            self.received.update(data)
            if not data:
                self.end = self.end or (CLOSED if GOODBYE[0] in self.received else ENDED)
            if data.strip(BEAT):
                self._on_news(self)
        self._on_news(self)
        self._socket.close()


class LifelineServer:
    """Lets the other ranks open their lifelines to this one."""

    def __init__(
        self,
        listener: socket.socket,
        is_valid: Callable[[int, int, bytes], bool],
        on_news: Callable[[Lifeline], None],
    ) -> None:
        self.lines: dict[int, Lifeline] = {}
        self._listener = _guarded(listener)
        self._is_valid = is_valid
        self._on_news = on_news
        self._unknown = threading.Semaphore(MAX_UNKNOWN)
        threading.Thread(target=self._accept, name="determined-lifelines", daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            self._unknown.acquire()  # each has a few seconds
            threading.Thread(target=self._admit, args=(_guarded(sock),), daemon=True).start()

    def _admit(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(HELLO_TIMEOUT_S)
            rank, machine, signature = HELLO.unpack(sock.recv(HELLO.size, socket.MSG_WAITALL))
            if self._is_valid(rank, machine, signature) and rank not in self.lines:
                line = self.lines[rank] = Lifeline(sock, rank, machine, self._on_news)
                line.send(BEAT)  # lets it go on: from now on this rank waits for it before it closes its store
                return
        except (OSError, struct.error):
            pass
        finally:
            self._unknown.release()
        sock.close()


def open_lifeline(host: str, port: int, hello: bytes, on_news: Callable[[Lifeline], None]) -> Lifeline:
    """Return this rank's lifeline to rank 0."""
    sock = socket.create_connection((host, port), HELLO_TIMEOUT_S)
    sock.sendall(hello)
    if not sock.recv(1):
        raise ConnectionError("it refused the lifeline of this rank")
    return Lifeline(sock, 0, 0, on_news)


def _guarded(sock: socket.socket) -> socket.socket:
    """Return the socket, which forked children close: one that outlives this process would keep its lifeline alive."""
    _sockets.add(sock)
    return sock


def _close_inherited() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_inherited)
