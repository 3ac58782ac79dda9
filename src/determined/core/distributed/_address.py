"""TCP addresses: where rank 0 listens, and how the other ranks reach it."""

from __future__ import annotations

import errno
import ipaddress
import socket

LOOPBACK = "127.0.0.1"
BACKLOG = 256
# An address that belongs to no machine (RFC 5737): the route to it is the route to all other machines.
_ELSEWHERE = "192.0.2.1"


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens where `host` reaches it; port 0 takes any free one.

    Raises OSError with the remedy if the port cannot be had.
    """
    try:
        family, address = resolve(host)
        # Many machines know their own name by a loopback address, which no other machine can reach.
        is_named_loopback = address not in (host, "::1") and host != "localhost" and _is_loopback(address)
        return socket.create_server(("" if is_named_loopback else address, port), family=family, backlog=BACKLOG)
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
