"""Where the ranks of a job meet: TCP addresses, Unix sockets in a folder of the user's own, and their keys."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import ipaddress
import os
import pathlib
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterator

# Connections that the kernel holds until the listener looks at them.
BACKLOG = 256
# sun_path holds 108 bytes on Linux and 104 on macOS, with the zero at its end.
LONGEST_PATH = 103
LONGEST_NAME = 40


@dataclasses.dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host and a port; port 0 means any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def listen(self) -> Listener:
        """Take the port now. Raises OSError with the remedy if it cannot be had."""
        try:
            family, host = _own_address(self.host)
            sock = socket.create_server((host, self.port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise OSError(error.errno, self._why_not(error)) from error
        return Listener(sock, TcpAddress(self.host, sock.getsockname()[1]))

    def connect(self, timeout: float) -> socket.socket:
        """Return a connected socket."""
        sock = socket.create_connection((self.host, self.port), timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _why_not(self, error: OSError) -> str:
        if error.errno == errno.EADDRINUSE:
            return (
                f"port {self.port} of {self.host} is in use, maybe by another job; give each job on this machine "
                "a port_offset of its own, or free the port"
            )
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            return (
                f"chief_ip={self.host!r} is not an address of this machine, which is the chief's ({error}); "
                "pass the address under which the other machines reach rank 0"
            )
        return f"cannot listen at {self}: {error}"


@dataclasses.dataclass(frozen=True, slots=True)
class UnixAddress:
    """A socket in the folder that only this user can enter."""

    path: str

    def __str__(self) -> str:
        return self.path

    def listen(self) -> Listener:
        """Take the name now; what a dead process has left is replaced. Raises OSError if a live one has it."""
        with _folder_lock():
            _sweep()
            if os.path.lexists(self.path):
                raise OSError(
                    errno.EADDRINUSE,
                    f"{self.path} belongs to another job that runs; give each job on this machine a port_offset of "
                    "its own",
                )
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.bind(self.path)
                sock.listen(BACKLOG)
            except OSError:
                sock.close()
                raise
        return Listener(sock, self)

    def connect(self, timeout: float) -> socket.socket:
        """Return a connected socket."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout)
            sock.connect(self.path)
        except OSError:
            sock.close()
            raise
        return sock


Address = TcpAddress | UnixAddress


@dataclasses.dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket and the address that reaches it."""

    socket: socket.socket
    address: Address

    def close(self) -> None:
        """Stop listening; a Unix socket's name becomes free."""
        if isinstance(self.address, UnixAddress) and self.socket.fileno() >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self.address.path)
        self.socket.close()


def unix_address(name: str) -> UnixAddress:
    """Return the address of a name in the user's runtime folder."""
    return UnixAddress(str(_runtime_folder() / f"{name}.sock"))


def machine_key() -> bytes:
    """Return the key that processes of this user on this machine share; it is made when first asked for."""
    with _folder_lock() as folder:
        file = folder / "key"
        if not file.exists():
            part = folder / "key.partial"
            part.unlink(missing_ok=True)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(secrets.token_bytes(32))
            part.rename(file)
        return file.read_bytes()


def is_loopback(host: str) -> bool:
    """Say whether a host name or address leads back to this machine by its loopback interface."""
    return ipaddress.ip_address(_resolve(host)[1].split("%")[0]).is_loopback


def is_own(host: str) -> bool:
    """Say whether a host name or address is this machine's."""
    try:
        family, address = _resolve(host)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def address_towards(host: str) -> str:
    """Return the address by which this machine reaches a host. Nothing is sent."""
    family, address = _resolve(host)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    return family, str(address[0])


def _own_address(host: str) -> tuple[socket.AddressFamily, str]:
    """Return where to listen so that `host` reaches it.

    Many machines know their own name by a loopback address, which no other machine can reach.
    """
    family, address = _resolve(host)
    is_named_loopback = address != host and host != "localhost" and is_loopback(address)
    return (family, "") if is_named_loopback else (family, address)


def _runtime_folder() -> pathlib.Path:
    folder = next(path for path in _folder_choices() if len(os.fsencode(path)) + LONGEST_NAME <= LONGEST_PATH)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must be a folder of this user that nobody else can enter (mode 700), for the sockets that "
            "ranks meet at; remove it, or set TMPDIR to a folder of yours."
        )
    return folder


def _folder_choices() -> list[pathlib.Path]:
    name = f"resolute-{os.geteuid()}"
    return [pathlib.Path(tempfile.gettempdir()) / name, pathlib.Path("/tmp") / name]


@contextlib.contextmanager
def _folder_lock() -> Iterator[pathlib.Path]:
    folder = _runtime_folder()
    with open(folder / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def _sweep() -> None:
    """Remove the sockets that processes left behind when they were killed."""
    for path in _runtime_folder().glob("*.sock"):
        if not _is_alive(str(path)):
            path.unlink(missing_ok=True)


def _is_alive(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:  # many wait to be let in
            return True
    return True
