"""A socket from each rank to rank 0, which ends with its process.

A store does not report that a client has died, so lifelines are how ranks notice at once that another one is gone, on
any machine. They carry single bytes. Both ends send a heartbeat each second; one that sends none is frozen or cut off.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable

Sign = Callable[[str, bytes], bytes]

BEAT, STORE_CLOSES, ACKNOWLEDGED, GOODBYE = b".", b"s", b"a", b"g"
BEAT_INTERVAL_S = 1.0
HELLO_TIMEOUT_S = 5.0
MAX_UNKNOWN = 128
CLOSED = "has closed its DistributedContext"
ENDED = "its process ended or its connection broke"

_HELLO = struct.Struct("!II32s")  # rank, machine, signature

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Lifeline:
    """One end of a lifeline. Its thread calls `on_news` for a byte, for a second without one, and at the end."""

    def __init__(self, sock: socket.socket, rank: int, machine: int, on_news: Callable[[Lifeline], None]) -> None:
        self.rank = rank
        """The rank at the other end."""
        self.machine = machine
        self.silent_s = 0.0
        """Seconds since the last byte; counted, so that a process that was suspended does not blame the others."""
        self.received: set[int] = set()
        self.end: str | None = None
        """Why the lifeline has ended, once it has."""
        self._socket = _guarded(sock)
        self._socket.settimeout(BEAT_INTERVAL_S)
        self._on_news = on_news
        threading.Thread(target=self._run, name="determined-lifeline", daemon=True).start()

    def send(self, byte: bytes) -> None:
        """Send a byte. If the other end is gone, reading shows it."""
        with contextlib.suppress(OSError):
            self._socket.send(byte, socket.MSG_DONTWAIT)

    def close(self, why: str = CLOSED) -> None:
        """Close this end; `why` says what happened to the other."""
        self.end = self.end or why
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        beat_due = time.monotonic() + BEAT_INTERVAL_S
        while self.end is None:
            if time.monotonic() >= beat_due:
                self.send(BEAT)
                beat_due = time.monotonic() + BEAT_INTERVAL_S
            self._read()
        self._on_news(self)
        self._socket.close()

    def _read(self) -> None:
        try:
            data = self._socket.recv(64)
        except TimeoutError:
            self.silent_s += BEAT_INTERVAL_S
            self._on_news(self)
            return
        except OSError:
            data = b""
        self.silent_s = 0.0
        self.received.update(data)
        if not data:
            self.end = self.end or (CLOSED if GOODBYE[0] in self.received else ENDED)
        elif data.strip(BEAT):
            self._on_news(self)


class LifelineServer:
    """Accepts the lifelines of the other ranks."""

    def __init__(self, listener: socket.socket, sign: Sign, on_news: Callable[[Lifeline], None]) -> None:
        self.lines: dict[int, Lifeline] = {}
        self._listener = _guarded(listener)
        self._sign = sign
        self._on_news = on_news
        self._unknown = threading.Semaphore(MAX_UNKNOWN)
        threading.Thread(target=self._accept, name="determined-lifelines", daemon=True).start()

    def close(self) -> None:
        """Accept no further lifelines."""
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
            hello = sock.recv(_HELLO.size, socket.MSG_WAITALL)
            rank, machine, _ = _HELLO.unpack(hello)
            if hmac.compare_digest(hello, _hello(rank, machine, self._sign)) and rank not in self.lines:
                line = self.lines[rank] = Lifeline(sock, rank, machine, self._on_news)
                line.send(BEAT)  # lets that rank go on: from now on this one waits for it before it closes its store
                return
        except (OSError, struct.error):
            pass
        finally:
            self._unknown.release()
        sock.close()


def open_lifeline(
    address: tuple[str, int], rank: int, machine: int, sign: Sign, on_news: Callable[[Lifeline], None]
) -> Lifeline:
    """Return this rank's lifeline to rank 0. Raises ConnectionError if it cannot be opened."""
    try:
        sock = socket.create_connection(address, HELLO_TIMEOUT_S)
        sock.sendall(_hello(rank, machine, sign))
        if sock.recv(1):
            return Lifeline(sock, 0, 0, on_news)
    except OSError as error:
        raise ConnectionError(f"port {address[1]}: {error}") from error
    raise ConnectionError("it refused the lifeline of this rank")


def _hello(rank: int, machine: int, sign: Sign) -> bytes:
    return _HELLO.pack(rank, machine, sign("hello", f"{rank} {machine}".encode()))


def _guarded(sock: socket.socket) -> socket.socket:
    """Return the socket after noting it for forked children, which close it and so do not keep a lifeline alive."""
    _sockets.add(sock)
    return sock


def _close_inherited() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_inherited)
