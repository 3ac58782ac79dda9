"""The rendezvous of ranks that are all on this machine: torch's store, which listens on the loopback interface only."""

from __future__ import annotations

import socket
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # as documented
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "determined-loopback"
_HOST = "127.0.0.1"
ENDPOINT = f"{_HOST}:0"
"""For torchrun, which wants one: a port is chosen for each start."""


class LoopbackRendezvous(RendezvousHandler):
    """Serves a new store for each start of the ranks, which one agent starts.

    The stores of torchrun's own backends listen on all interfaces. A store has no password: other users of this
    machine can reach this one too.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store of the next start of the ranks, and where it listens."""
        door = socket.create_server((_HOST, 0))
        port = door.getsockname()[1]
        self._store = TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach())
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo(_HOST, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """There is nobody else to tell."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register() -> None:
    """Let torchrun know this backend."""
    rendezvous_handler_registry.register(BACKEND, _create)


def _create(parameters: RendezvousParameters) -> Any:
    return LoopbackRendezvous(parameters.run_id)
