"""Where the ranks of a job meet, and by which key they know each other."""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
from collections.abc import Callable
from typing import Any

from determined import errors
from determined.core._address import (
    Address,
    Listener,
    TcpAddress,
    address_towards,
    is_own,
    machine_key,
    unix_address,
)
from determined.core._layout import Layout

logger = logging.getLogger("determined.core")

KEY_VARIABLE = "DET_DISTRIBUTED_KEY"
LOOPBACK = "127.0.0.1"
# An address that is no machine's (RFC 5737): the way there is the way to all other machines.
ELSEWHERE = "192.0.2.1"


@dataclasses.dataclass(frozen=True, slots=True)
class Meeting:
    """Where all ranks meet and where those of this machine do, by which key, and who of them listens here."""

    everyone: Address
    machine: Address
    key: bytes
    listener: Listener | None = None
    """The chief's, where it had to listen before it could say where."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Where to meet as the arguments of a context say it, the same on every rank."""

    chief_ip: str | None
    pub_port: int
    pull_port: int
    port_offset: int
    force_tcp: bool

    def meeting(self, layout: Layout) -> Meeting:
        """Return the places of this process. Raises ValueError if it lacks an address that it needs."""
        everyone, machine = self._port("pub_port", self.pub_port), self._port("pull_port", self.pull_port)
        if not layout.has_several_machines:
            if self.force_tcp:
                address: Address = TcpAddress(self.chief_ip or LOOPBACK, everyone)
                return Meeting(address, address, _given_key() or machine_key())
            address = unix_address(str(everyone))
            return Meeting(address, address, _given_key() or b"")
        if self.chief_ip is None:
            raise ValueError(
                f"DistributedContext(cross_size={layout.cross_size}, chief_ip=None): with several machines, pass the "
                "address of the machine of rank 0 as chief_ip."
            )
        nearby = TcpAddress(LOOPBACK, machine) if self.force_tcp else unix_address(f"{machine}-{layout.cross_rank}")
        address = TcpAddress(self.chief_ip, everyone)
        if not (key := _given_key()) and layout.rank == 0:
            logger.warning(
                "The ranks meet at %s without a key: whoever reaches that port can take part and run code on these "
                "machines. Set %s to the same secret string on all of them, or start the ranks with torchrun.",
                address,
                KEY_VARIABLE,
            )
        return Meeting(address, nearby, key)

    def _port(self, name: str, port: int) -> int:
        for label, value in ((name, port), ("port_offset", self.port_offset)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"DistributedContext({label}={value!r}): pass an int.")
        if not 0 < port + self.port_offset < 65536:
            raise ValueError(
                f"DistributedContext({name}={port}, port_offset={self.port_offset}): their sum must be a port, from 1 "
                "to 65535."
            )
        return port + self.port_offset


def agree(layout: Layout, chief_ip: str | None, broadcast: Callable[[Any], Any]) -> Meeting:
    """Return where to meet, as the chief chose it: a free port or a new socket, and a new key.

    `broadcast` gives every rank what rank 0 passes to it. What keeps the chief from listening is raised everywhere.
    """
    listener, token = None, secrets.token_hex(8)
    offer: dict[str, Any] = {}
    if layout.rank == 0:
        try:
            listener = _chief_address(layout, chief_ip, token).listen()
            offer = {"address": listener.address, "key": secrets.token_bytes(32), "token": token}
        except (OSError, ValueError) as error:
            offer = {"error": f"{type(error).__name__}: {error}"}
    offer = broadcast(offer)
    if "error" in offer:
        raise errors.InternalException(
            f"Rank 0 cannot listen to the other ranks: {offer['error']}. If it needs another address of its machine, "
            "pass that as chief_ip."
        )
    machine = unix_address(f"{offer['token']}-{layout.cross_rank}") if layout.has_several_machines else offer["address"]
    return Meeting(offer["address"], machine, offer["key"], listener)


def _chief_address(layout: Layout, chief_ip: str | None, token: str) -> Address:
    if not layout.has_several_machines:
        return unix_address(token)
    return TcpAddress(chief_ip or _own_host(os.environ.get("MASTER_ADDR")), 0)


def _own_host(master: str | None) -> str:
    """Return a name of this machine by which the others reach it; they have all reached the master."""
    if master and is_own(master):
        return master
    return address_towards(master or ELSEWHERE)


def _given_key() -> bytes:
    return os.environ.get(KEY_VARIABLE, "").encode()
