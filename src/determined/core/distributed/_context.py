"""Who this process is among those that train one trial, and how they exchange objects."""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from determined import errors
from determined.core.distributed._collectives import Collectives
from determined.core.distributed._exchange import Exchange, Member
from determined.core.distributed._store import KEY_VARIABLE, LOOPBACK, given_key, home_key, listen, own_host

logger = logging.getLogger("determined.core")

T = TypeVar("T")

TIMEOUT_VARIABLE = "DET_DISTRIBUTED_TIMEOUT"
DEFAULT_TIMEOUT_S = 1800.0


class Layout(NamedTuple):
    """Where a process is among those of a job."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


class DistributedContext:
    """Rank and size of this process, and collectives for any picklable object.

    `rank` counts all processes, `local_rank` those of this machine, `cross_rank` the machines. The processes
    exchange objects through a `torch.distributed.TCPStore` of their own, which rank 0 serves, beside any process group
    and without one. Making a context waits for nobody: the processes find each other at the first collective.

    The store listens on the port `pub_port + port_offset`: of the loopback interface if all processes are on one
    machine, else of `chief_ip`. On several machines rank 0 also listens on `pull_port + port_offset`, by which the
    processes notice that one of them has ended. Values are signed, on one machine with a key in the home folder, on
    several with the one that `DET_DISTRIBUTED_KEY` holds on all of them; without it, whoever reaches the ports can
    take part. `force_tcp` makes processes on one machine use `chief_ip` as well. With one process every collective
    returns at once and needs no network, so address and ports have no effect.

    Every wait ends after `timeout` seconds (default: `DET_DISTRIBUTED_TIMEOUT`, else 1800) with
    `errors.PeerLostException`, which also comes at once when another process is gone.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        local_rank: int,
        local_size: int,
        cross_rank: int,
        cross_size: int,
        chief_ip: str | None = None,
        pub_port: int = 12360,
        pull_port: int = 12376,
        port_offset: int = 0,
        force_tcp: bool = False,
        timeout: float | None = None,
        _member: Member | None = None,
    ) -> None:
        layout = Layout(rank, size, local_rank, local_size, cross_rank, cross_size)
        _check_layout(layout)
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.cross_rank = cross_rank
        self.cross_size = cross_size
        self._process = os.getpid()
        self.timeout = timeout_seconds(timeout)
        """Seconds to wait for other ranks."""
        self.exchange: Exchange | None = None
        """The connection to the other ranks; None with one process."""
        if size > 1:
            ports = (
                _checked_port("pub_port", pub_port, port_offset),
                _checked_port("pull_port", pull_port, port_offset),
            )
            self.exchange = Exchange(_member or _member_of(layout, chief_ip, ports, force_tcp), self.timeout)
        lock = threading.Lock()
        self._everyone = self._machine = Collectives(self.exchange, lock, self.timeout, size=size, index=rank)
        if cross_size > 1:
            exchange = self.exchange if local_size > 1 else None
            self._machine = Collectives(
                exchange, lock, self.timeout, size=local_size, index=local_rank, machine=cross_rank
            )

    @classmethod
    def from_torch_distributed(cls, chief_ip: str | None = None) -> DistributedContext:
        """Take ranks and sizes from an initialized `torch.distributed` process group. All ranks must call this.

        Rank 0 chooses a port, and shares it and a new key through the group, so there is nothing to configure; on
        several machines it listens at `chief_ip`, by default at `MASTER_ADDR` or the address that leads there. With
        nccl, call `torch.cuda.set_device` first.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "from_torch_distributed() found no process group; call torch.distributed.init_process_group() first."
            )
        rank, size = dist.get_rank(), dist.get_world_size()
        if size == 1:
            return cls.single()

        def broadcast(item: Any) -> Any:
            box = [item]
            dist.broadcast_object_list(box, src=0)
            return box[0]

        processes: list[Any] = [None] * size
        dist.all_gather_object(processes, (socket.gethostname(), _launched(rank, size)))
        layout = _layout_of(rank, processes)
        return cls(**layout._asdict(), _member=_agreed_member(layout, chief_ip, broadcast))

    @classmethod
    def from_horovod(cls, hvd: Any, chief_ip: str | None = None) -> DistributedContext:
        """Take ranks and sizes from an initialized Horovod module, such as `horovod.torch`. All ranks must call this.

        Where the module has `broadcast_object`, rank 0 shares a port and a new key through it.
        """
        layout = Layout(*(getattr(hvd, name)() for name in Layout._fields))
        if layout.size > 1 and hasattr(hvd, "broadcast_object"):
            member = _agreed_member(layout, chief_ip, lambda item: hvd.broadcast_object(item, root_rank=0))
            return cls(**layout._asdict(), _member=member)
        return cls(**layout._asdict(), chief_ip=chief_ip)

    @classmethod
    def from_deepspeed(cls, chief_ip: str | None = None) -> DistributedContext:
        """Take ranks and sizes from the process group that `deepspeed.init_distributed()` made."""
        return cls.from_torch_distributed(chief_ip)

    @classmethod
    def single(cls) -> DistributedContext:
        """Return the context of a process that trains alone."""
        return cls(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0, which records, saves and shows."""
        return self.rank == 0

    def get_rank(self) -> int:
        """Return the rank of this process among all."""
        return self.rank

    def get_local_rank(self) -> int:
        """Return the rank of this process on its machine."""
        return self.local_rank

    def get_size(self) -> int:
        """Return the number of processes."""
        return self.size

    def get_num_agents(self) -> int:
        """Return the number of machines."""
        return self.cross_size

    def gather(self, stuff: T) -> list[T] | None:
        """Return every rank's item, ordered by rank, on the chief; None elsewhere. All ranks must call this.

        Here and below: the item of the rank itself is in the list as it is, not a copy.
        """
        return self._here(self._everyone).gather("gather", stuff)

    def gather_local(self, stuff: T) -> list[T] | None:
        """Return the items of this machine's ranks on its first rank; None elsewhere."""
        return self._here(self._machine).gather("gather_local", stuff)

    def allgather(self, stuff: T) -> list[T]:
        """Return every rank's item, ordered by rank. All ranks must call this."""
        return self._here(self._everyone).allgather("allgather", stuff)

    def allgather_local(self, stuff: T) -> list[T]:
        """Return the items of this machine's ranks, ordered by rank."""
        return self._here(self._machine).allgather("allgather_local", stuff)

    def broadcast(self, stuff: T) -> T:
        """Return the chief's item. All ranks must call this."""
        return self._here(self._everyone).broadcast("broadcast", stuff)

    def broadcast_local(self, stuff: T) -> T:
        """Return the item of this machine's first rank."""
        return self._here(self._machine).broadcast("broadcast_local", stuff)

    def close(self) -> None:
        """Tell the other ranks that this one leaves, and close the connections. Closing twice is fine."""
        if self.exchange is not None and os.getpid() == self._process:
            self.exchange.close()

    def _here(self, collectives: Collectives) -> Collectives:
        if os.getpid() != self._process:
            raise errors.InternalException(
                f"This DistributedContext belongs to process {self._process}; a process forked from it, such as a "
                "loader worker, cannot take part. Exchange objects in the training process."
            )
        return collectives


def timeout_seconds(timeout: float | None = None) -> float:
    """Return how long to wait for other ranks: `timeout`, else `DET_DISTRIBUTED_TIMEOUT`, else 1800 seconds."""
    if timeout is None:
        return seconds_of(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S)
    return _checked_seconds(f"DistributedContext(timeout={timeout!r})", timeout, DEFAULT_TIMEOUT_S)


def seconds_of(variable: str, default: float, above: float = 0.0) -> float:
    """Return the seconds that an environment variable sets, which must be more than `above`."""
    text = os.environ.get(variable)
    return _checked_seconds(f"{variable}={text!r}", text or default, default, above)


def _checked_seconds(given: str, value: Any, example: float, above: float = 0.0) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not above < seconds < threading.TIMEOUT_MAX:
        raise ValueError(f"{given}: pass a number of seconds above {above:g}, such as {example:g}.")
    return seconds


def _launched(rank: int, size: int) -> tuple[int, ...] | None:
    """Return the local and the cross numbers that torchrun set, or None if they do not describe this process group."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    values = [os.environ.get(name, "") for name in names]
    if not all(value.isdecimal() for value in values) or [int(value) for value in values[:2]] != [rank, size]:
        return None
    return tuple(int(value) for value in values[2:])


def _layout_of(rank: int, processes: Sequence[tuple[str, tuple[int, ...] | None]]) -> Layout:
    """Return the layout as the launcher set it if it did so for all (host, numbers), else by the names of the hosts."""
    hosts = [host for host, _ in processes]
    numbers = processes[rank][1]
    if numbers is None or any(launched is None for _, launched in processes):
        host, machines = hosts[rank], list(dict.fromkeys(hosts))
        numbers = (hosts[:rank].count(host), hosts.count(host), machines.index(host), len(machines))
    return Layout(rank, len(processes), *numbers)


def _member_of(layout: Layout, chief_ip: str | None, ports: tuple[int, int], force_tcp: bool) -> Member:
    """Return where to meet by the arguments of a context; rank 0 listens there from now on."""
    port, lifeline_port = ports
    if layout.cross_size == 1:
        chief_ip = chief_ip if force_tcp and chief_ip else LOOPBACK
        key, lifeline_port = given_key() or home_key(), 0
    elif chief_ip is None:
        raise ValueError(
            f"DistributedContext(cross_size={layout.cross_size}, chief_ip=None): with several machines, pass the "
            "address of the machine of rank 0 as chief_ip."
        )
    elif not (key := given_key()) and layout.rank == 0:
        logger.warning(
            "The ranks meet at %s:%d without a key: whoever reaches that port can take part and run code on these "
            "machines. Set %s to the same secret string on all of them, or start the ranks with torchrun.",
            chief_ip,
            port,
            KEY_VARIABLE,
        )
    listener = listen(chief_ip, port) if layout.rank == 0 else None
    return Member(layout.rank, layout.size, layout.cross_rank, chief_ip, port, lifeline_port, key, listener)


def _agreed_member(layout: Layout, chief_ip: str | None, broadcast: Callable[[Any], Any]) -> Member:
    """Return where to meet as rank 0 chose it: a free port, and a new key.

    `broadcast` gives every rank what rank 0 passes to it. What keeps rank 0 from listening is raised on all ranks.
    """
    listener, offer = None, {}
    if layout.rank == 0:
        try:
            host = LOOPBACK if layout.cross_size == 1 else chief_ip or own_host(os.environ.get("MASTER_ADDR"))
            listener = listen(host, 0)
            offer = {"host": host, "port": listener.getsockname()[1], "key": secrets.token_bytes(32)}
        except (OSError, ValueError) as error:
            offer = {"error": f"{type(error).__name__}: {error}"}
    offer = broadcast(offer)
    if "error" in offer:
        raise errors.InternalException(
            f"Rank 0 cannot listen to the other ranks: {offer['error']}. If it needs another address of its machine, "
            "pass that as chief_ip."
        )
    host, port, key = offer["host"], offer["port"], given_key() or offer["key"]
    return Member(layout.rank, layout.size, layout.cross_rank, host, port, 0, key, listener)


def _check_layout(layout: Layout) -> None:
    """Raise TypeError or ValueError, naming the argument, if the numbers of a process do not fit together."""
    for kind in ("", "local_", "cross_"):
        rank, size = getattr(layout, f"{kind}rank"), getattr(layout, f"{kind}size")
        _check_int(f"{kind}rank", rank)
        _check_int(f"{kind}size", size)
        if size < 1 or not 0 <= rank < size:
            raise ValueError(
                f"DistributedContext({kind}rank={rank!r}, {kind}size={size!r}): "
                f"ranks count from 0 to {kind}size - 1, and {kind}size is at least 1."
            )
    given = f"DistributedContext(size={layout.size}, local_size={layout.local_size}, cross_size={layout.cross_size})"
    if max(layout.local_size, layout.cross_size) > layout.size:
        raise ValueError(
            f"{given}: neither the processes of one machine nor the machines can be more than all processes."
        )
    if layout.cross_size == 1 and (layout.local_rank, layout.local_size) != (layout.rank, layout.size):
        raise ValueError(
            f"{given} with rank={layout.rank}, local_rank={layout.local_rank}: on one machine, local_size is size and "
            "local_rank is rank; with more machines, pass their number as cross_size."
        )


def _check_int(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"DistributedContext({name}={value!r}): pass an int.")


def _checked_port(name: str, port: int, offset: int) -> int:
    _check_int(name, port)
    _check_int("port_offset", offset)
    if not 0 < port + offset < 65536:
        raise ValueError(
            f"DistributedContext({name}={port}, port_offset={offset}): their sum must be a port, from 1 to 65535."
        )
    return port + offset
