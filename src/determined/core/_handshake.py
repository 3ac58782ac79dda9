"""Both ends prove that they know the job's key, before anything else is read from a connection.

The listening end sends a challenge, the other answers it with a challenge of its own, and the first answers that
in turn: HMAC-SHA256 over both challenges and all that was claimed. Who cannot answer is dropped. A recorded
answer is worth nothing, because every connection has challenges of its own. All sizes are fixed.

What follows on the connection is neither encrypted nor signed: who can change packets on the way between two
machines is not kept out.
"""

from __future__ import annotations

import atexit
import enum
import hmac
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from determined import errors
from determined.core._address import Address, Listener
from determined.core._channel import Waker, guarded

MAGIC = b"RESLTCH\x01"
CHALLENGE = struct.Struct("!8s32s")
CLAIM = struct.Struct("!8sBIII32s")
PROOF_SIZE = 32
HELLO_SIZE = CLAIM.size + PROOF_SIZE
VERDICT = struct.Struct("!B32s")

# A rank needs milliseconds; only strangers take longer.
HANDSHAKE_SECONDS = 5.0
MOST_STRANGERS = 128
RETRY_SECONDS = 0.02
SLOWEST_RETRY_SECONDS = 0.25


class Purpose(enum.IntEnum):
    """What a connection is for."""

    COLLECTIVES = 1
    SIDE_LINE = 2


class Verdict(enum.IntEnum):
    """How the listening end answers. Only WRONG_KEY comes without proof."""

    WELCOME = 1
    WRONG_KEY = 2
    TAKEN = 3
    OTHER_JOB = 4


class Claim(NamedTuple):
    """Who the connecting end says it is: a member of a group of ranks; group 0 is that of all."""

    purpose: int
    group: int
    size: int
    member: int

    def packed(self, challenge: bytes) -> bytes:
        """Return the bytes of the claim, with the challenge for the other end."""
        return CLAIM.pack(MAGIC, *self, challenge)


class Reception:
    """Lets the other ranks of one group in, once each, and nobody else. A thread of its own does the work."""

    def __init__(self, listener: Listener, key: bytes, group: int, size: int) -> None:
        self._listener = listener
        self._key = key
        self._group = group
        self._size = size
        self._strangers: dict[int, _Stranger] = {}
        self._members: set[tuple[int, int]] = set()
        self._early: list[tuple[int, int, socket.socket]] = []
        self._takers: dict[int, Callable[[int, socket.socket], None]] = {}
        self._lock = threading.Lock()
        self._waker = Waker()
        self._is_closed = False
        guarded(listener.socket).setblocking(False)
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._run, name="determined-reception", daemon=True)
        self._thread.start()

    def route(self, purpose: Purpose, taker: Callable[[int, socket.socket], None]) -> None:
        """Hand every member that comes for this purpose to `taker`, as (index, socket); also those already here."""
        with self._lock:
            self._takers[purpose] = taker
            early = [entry for entry in self._early if entry[0] == purpose]
            self._early = [entry for entry in self._early if entry[0] != purpose]
        for _, index, sock in early:
            taker(index, sock)

    def close(self) -> None:
        """Let nobody in any more."""
        self._is_closed = True
        self._waker.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(HANDSHAKE_SECONDS)
        atexit.unregister(self.close)

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._turn()
        finally:
            for stranger in self._strangers.values():
                stranger.socket.close()
            for _, _, sock in self._early:
                sock.close()
            self._listener.close()
            self._waker.close()

    def _turn(self) -> None:
        poll = select.poll()
        for descriptor in (self._waker.fileno(), self._listener.socket.fileno(), *self._strangers):
            poll.register(descriptor, select.POLLIN)
        first = next(iter(self._strangers.values()), None)
        ready = {
            fd for fd, _ in poll.poll(None if first is None else max(0.0, first.deadline - time.monotonic()) * 1000)
        }
        for descriptor in ready & self._strangers.keys():
            self._hear(self._strangers[descriptor])
        if self._listener.socket.fileno() in ready:
            self._accept()
        self._drop_late()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.socket.accept()
        except OSError:  # gone again, or no descriptors left: the next turn may have more luck
            time.sleep(RETRY_SECONDS)
            return
        sock.setblocking(False)
        stranger = _Stranger(guarded(sock))
        if len(self._strangers) >= MOST_STRANGERS:
            # The one that has taken longest: a rank is through long before its turn would come.
            self._drop(next(iter(self._strangers.values())))
        self._strangers[sock.fileno()] = stranger
        if not stranger.send(CHALLENGE.pack(MAGIC, stranger.challenge)):
            self._drop(stranger)

    def _hear(self, stranger: _Stranger) -> None:
        if not stranger.hear():
            self._drop(stranger)
        elif len(stranger.heard) == HELLO_SIZE:
            verdict, claim, challenge = self._judge(stranger)
            proof = _proof(self._key, b"listener", stranger.challenge, bytes([verdict]) + claim.packed(challenge))
            sent = stranger.send(VERDICT.pack(verdict, bytes(PROOF_SIZE) if verdict == Verdict.WRONG_KEY else proof))
            if sent and verdict == Verdict.WELCOME:
                del self._strangers[stranger.socket.fileno()]
                self._hand_over(claim, stranger.socket)
            else:
                self._drop(stranger)

    def _judge(self, stranger: _Stranger) -> tuple[Verdict, Claim, bytes]:
        hello = bytes(stranger.heard)
        magic, *fields, challenge = CLAIM.unpack_from(hello)
        claim = Claim(*fields)
        proof = _proof(self._key, b"member", stranger.challenge, claim.packed(challenge))
        if magic != MAGIC or not hmac.compare_digest(proof, hello[CLAIM.size :]):
            return Verdict.WRONG_KEY, claim, challenge
        if (claim.group, claim.size) != (self._group, self._size) or not 0 < claim.member < self._size:
            return Verdict.OTHER_JOB, claim, challenge
        who = (claim.purpose, claim.member)
        if who in self._members:
            return Verdict.TAKEN, claim, challenge
        self._members.add(who)
        return Verdict.WELCOME, claim, challenge

    def _hand_over(self, claim: Claim, sock: socket.socket) -> None:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            taker = self._takers.get(claim.purpose)
            if taker is None:
                self._early.append((claim.purpose, claim.member, sock))
                return
        taker(claim.member, sock)

    def _drop_late(self) -> None:
        now = time.monotonic()
        for stranger in [each for each in self._strangers.values() if each.deadline <= now]:
            self._drop(stranger)

    def _drop(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.socket.fileno()]
        stranger.socket.close()


class _Stranger:
    """A connection that has not proved anything yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.challenge = secrets.token_bytes(32)
        self.heard = bytearray()
        self.deadline = time.monotonic() + HANDSHAKE_SECONDS

    def hear(self) -> bool:
        """Take in what has arrived, never more than a hello; False if the connection is of no use."""
        try:
            data = self.socket.recv(HELLO_SIZE - len(self.heard))
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.heard += data
        return bool(data) and MAGIC.startswith(bytes(self.heard[: len(MAGIC)]))

    def send(self, data: bytes) -> bool:
        """Send a few bytes; False if the connection does not take them."""
        try:
            return self.socket.send(data) == len(data)
        except OSError:
            return False


def join(address: Address, key: bytes, claim: Claim, deadline: float, is_given_up: Callable[[], bool]) -> socket.socket:
    """Return a socket to the listening end, which need not be there yet: tried until the deadline.

    Raises TimeoutError at the deadline and once `is_given_up` says so; what trying again cannot mend is raised at
    once.
    """
    pause, last = RETRY_SECONDS, "nobody listens there"
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or is_given_up():
            raise TimeoutError(last)
        try:
            return _knock(address, key, claim, min(left, HANDSHAKE_SECONDS))
        except OSError as error:
            last = str(error)
        time.sleep(min(pause, left))
        pause = min(2 * pause, SLOWEST_RETRY_SECONDS)


def _knock(address: Address, key: bytes, claim: Claim, timeout: float) -> socket.socket:
    sock = address.connect(timeout)
    try:
        magic, theirs = CHALLENGE.unpack(_read(sock, CHALLENGE.size))
        if magic != MAGIC:
            raise errors.InternalException(
                f"Something else than a rank of this version listens at {address}; give the job another port_offset, "
                "and the same version of Resolute on every machine."
            )
        ours = secrets.token_bytes(32)
        packed = claim.packed(ours)
        sock.sendall(packed + _proof(key, b"member", theirs, packed))
        verdict, proof = VERDICT.unpack(_read(sock, VERDICT.size))
        expected = _proof(key, b"listener", theirs, bytes([verdict]) + packed)
        _check(address, claim, verdict if hmac.compare_digest(proof, expected) else Verdict.WRONG_KEY)
    except BaseException:
        sock.close()
        raise
    return sock


def _check(address: Address, claim: Claim, verdict: int) -> None:
    if verdict == Verdict.WRONG_KEY:
        raise errors.InternalException(
            f"The key of this process is not that of the job at {address}; set DET_DISTRIBUTED_KEY to the same text "
            "on every machine of a job, or give the job another port_offset."
        )
    if verdict == Verdict.TAKEN:
        raise errors.InternalException(
            f"Rank {claim.member} of the job at {address} is there already; give every process a rank of its own, and "
            "every job another port_offset."
        )
    if verdict == Verdict.OTHER_JOB:
        raise errors.InternalException(
            f"The job at {address} is not one of {claim.size} processes in which this one has its place; give every "
            "process the same sizes, and every job another port_offset."
        )


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError("the other end closed the connection before it let this process in")
        data += more
    return data


def _proof(key: bytes, role: bytes, challenge: bytes, claimed: bytes) -> bytes:
    # The key is hashed with the program's name first, so that an empty one is a key like any other.
    return hmac.digest(b"resolute " + key, role + challenge + claimed, "sha256")
