"""Torch's key-value store as ranks use it, and the key and the address by which they meet at it.

Whoever reaches the port of a store can read and write it. So every value is signed with the key of the job (HMAC-SHA256
over its name and content), and nothing that is not signed is unpickled. Values are not encrypted. Large ones are stored
in pieces.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hmac
import ipaddress
import os
import pathlib
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from determined import errors
from determined._home import home

KEY_VARIABLE = "DET_DISTRIBUTED_KEY"
LOOPBACK = "127.0.0.1"
MAX_PIECE = 4 << 20  # torch's server accepts 8 MiB in one message

_HEADER = struct.Struct("!32sI")  # signature, number of pieces
_RETRY_S = 0.02
_MAX_RETRY_S = 0.25
_CONNECT_TIMEOUT_S = 5.0
_OPERATION_TIMEOUT = datetime.timedelta(minutes=5)
_BACKLOG = 256
# An address that belongs to no machine (RFC 5737): the route to it is the route to all other machines.
_ELSEWHERE = "192.0.2.1"

_served: set[int] = set()


class Store:
    """A connection to the store of a job. For one thread: a call blocks for as long as the server does not answer."""

    def __init__(self, client: Any, address: str, key: bytes, descriptor: int | None = None) -> None:
        self._client = client
        self._descriptor = descriptor
        self._address = address
        self._key = b"resolute " + key  # so that an empty key is a key like any other

    def sign(self, name: str, content: bytes) -> bytes:
        """Return the signature of a value."""
        return hmac.digest(self._key, name.encode() + b"\0" + content, "sha256")

    def bind(self, nonce: str) -> None:
        """Sign for one job from now on, so that values of another job with the same key are not taken for its own."""
        self._key += nonce.encode()

    def put(self, name: str, value: bytes) -> list[str]:
        """Store a value, and return the keys that hold it. Others see all of it or nothing."""
        pieces = [value[start : start + MAX_PIECE] for start in range(0, len(value), MAX_PIECE)] or [b""]
        keys = [name, *(f"{name}.{number}" for number in range(1, len(pieces)))]
        pieces[0] = _HEADER.pack(self.sign(name, value), len(pieces)) + pieces[0]
        for key, piece in zip(reversed(keys), reversed(pieces), strict=True):
            self._client.set(key, piece)
        return keys

    def claim(self, name: str, value: bytes) -> bytes:
        """Store a small value unless there is one; return the value that is there now."""
        signed = _HEADER.pack(self.sign(name, value), 1) + value
        return self._checked(name, self._client.compare_set(name, "", signed))

    def has(self, names: Sequence[str]) -> bool:
        """Return whether all these values are there."""
        return bool(self._client.check(list(names)))

    def get(self, names: Sequence[str]) -> list[bytes]:
        """Return values that are there. Raises InternalException for one that was not signed with the job's key."""
        found = self._client.multi_get(list(names)) if names else []
        return [self._checked(name, value) for name, value in zip(names, found, strict=True)]

    def delete(self, keys: Sequence[str]) -> None:
        """Delete keys that `put` returned."""
        for key in keys:
            self._client.delete_key(key)

    def close(self) -> None:
        """Close the connection; a store that this process serves ends."""
        if self._descriptor is not None:
            _served.discard(self._descriptor)
        self._client = None

    def _checked(self, name: str, stored: bytes) -> bytes:
        signature, count = _HEADER.unpack_from(stored.ljust(_HEADER.size))
        pieces = [stored[_HEADER.size :]]
        for number in range(1, count if len(stored) > MAX_PIECE else 1):
            pieces.append(self._client.get(f"{name}.{number}"))
        value = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if not hmac.compare_digest(signature, self.sign(name, value)):
            raise errors.InternalException(
                f"The value {name!r} in the store at {self._address} is not signed with the key of this process; set "
                f"{KEY_VARIABLE} to the same string on every machine of a job, or give the job another port_offset."
            )
        return value


def serve(listener: socket.socket, host: str, key: bytes) -> Store:
    """Return the store that this process serves on a listening socket."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as documented

    port, descriptor = listener.getsockname()[1], listener.detach()
    _served.add(descriptor)
    client = TCPStore(
        resolve(host)[1],
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_OPERATION_TIMEOUT,
        master_listen_fd=descriptor,
    )
    return Store(client, f"{host}:{port}", key, descriptor)


def connect(host: str, port: int, key: bytes, deadline: float, is_given_up: Callable[[], bool]) -> Store:
    """Return a connection to a store that need not be there yet. Raises ConnectionError at the deadline."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as documented

    # Torch prints a warning for every connection that is refused.
    pause, last = _RETRY_S, "nobody listens there"
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or is_given_up():
            raise ConnectionError(last)
        try:
            address = resolve(host)[1]
            socket.create_connection((address, port), min(left, _CONNECT_TIMEOUT_S)).close()
            break
        except OSError as error:
            last = str(error)
        time.sleep(min(pause, left))
        pause = min(2 * pause, _MAX_RETRY_S)
    try:
        client = TCPStore(
            address,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=_CONNECT_TIMEOUT_S),
        )
    except RuntimeError as error:
        raise errors.InternalException(
            f"What listens at {host}:{port} is not a store of torch ({error}); give the job another port_offset, and "
            "the same version of torch on every machine."
        ) from error
    client.set_timeout(_OPERATION_TIMEOUT)
    return Store(client, f"{host}:{port}", key)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens where `host` reaches it; port 0 takes any free one.

    Raises OSError with the remedy if the port cannot be had.
    """
    try:
        family, address = resolve(host)
        # Many machines know their own name by a loopback address, which no other machine can reach.
        is_named_loopback = address not in (host, "::1") and host != "localhost" and _is_loopback(address)
        return socket.create_server(("" if is_named_loopback else address, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(error.errno, _remedy(host, port, error)) from error


def own_host(master: str | None) -> str:
    """Return a name of this machine by which the others reach it; all of them have reached `master`."""
    if master and _is_own(master):
        return master
    family, address = resolve(master or _ELSEWHERE)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        return str(probe.getsockname()[0])


def resolve(host: str) -> tuple[socket.AddressFamily, str]:
    """Return the family and the numeric address of a host."""
    family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    return family, str(address[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def _is_own(host: str) -> bool:
    try:
        family, address = resolve(host)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _remedy(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is in use, maybe by another job; give each job on this machine a port_offset of "
            "its own, or free the port"
        )
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return (
            f"chief_ip={host!r} is not an address of this machine, which is the chief's ({error}); pass the address "
            "under which the other machines reach rank 0"
        )
    return f"cannot listen at {host}:{port}: {error}"


def given_key() -> bytes:
    """Return the key of `DET_DISTRIBUTED_KEY`; empty if it is not set."""
    return os.environ.get(KEY_VARIABLE, "").encode()


def home_key() -> bytes:
    """Return the key in the home folder, which only this user can read; it is made when first asked for."""
    file = home().distributed_key
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        _create_key(file)
    found = file.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{file} holds the key of this user's jobs, and must belong to this user and have mode 600; delete it to "
            "have a new one made."
        )
    return file.read_bytes()


def _create_key(file: pathlib.Path) -> None:
    part = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(secrets.token_bytes(32))
    with contextlib.suppress(FileExistsError):  # another rank was first
        os.link(part, file)
    part.unlink()


def _release_ports() -> None:
    # A forked child, such as a loader worker, may outlive this process and would keep its port in use. The descriptor
    # stays valid, because torch's object in the child closes it.
    if _served:
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor in _served:
            os.dup2(null, descriptor)
        os.close(null)


os.register_at_fork(after_in_child=_release_ports)
