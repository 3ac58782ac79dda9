"""Who this process is among those that train one trial, and how they exchange objects."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from typing import Any, TypeVar

from determined import errors
from determined.core._address import Address
from determined.core._group import Alone, Group, Star
from determined.core._handshake import Reception
from determined.core._hub import Hub
from determined.core._layout import Layout, check_layout, describe, layout_of
from determined.core._meeting import Meeting, Ports, agree
from determined.core._sideline import ChiefLine, SideLine, WorkerLine
from determined.core._spoke import Spoke

T = TypeVar("T")

TIMEOUT_VARIABLE = "DET_DISTRIBUTED_TIMEOUT"
DEFAULT_TIMEOUT = 1800.0


class DistributedContext:
    """Rank and size of this process, and collectives for any picklable object.

    `rank` counts all processes, `local_rank` those of this machine, `cross_rank` the machines. The processes
    exchange objects by connections of their own, beside any `torch.distributed` process group and without one.
    Making a context waits for nobody: the processes find each other at the first collective.

    On one machine they meet at a Unix socket that only this user can reach, or at a TCP port with `force_tcp`;
    on several at the port `pub_port + port_offset` of `chief_ip`, with the key that `DET_DISTRIBUTED_KEY` holds on
    all of them; without one, whoever reaches that port can take part. With one process every collective returns at
    once and needs no network, so address and ports have no effect.

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
        _meeting: Meeting | None = None,
    ) -> None:
        self._layout = Layout(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            cross_rank=cross_rank,
            cross_size=cross_size,
        )
        check_layout(self._layout)
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.cross_rank = cross_rank
        self.cross_size = cross_size
        self._process = os.getpid()
        self.timeout = timeout_seconds(timeout)
        """Seconds to wait for other ranks."""
        self._lock = threading.Lock()
        self._receptions: list[Reception] = []
        self._side_line: ChiefLine | WorkerLine | None = None
        self._everyone: Star = Alone()
        self._machine: Star = Alone()
        if size > 1:
            ports = Ports(
                chief_ip=chief_ip,
                pub_port=pub_port,
                pull_port=pull_port,
                port_offset=port_offset,
                force_tcp=force_tcp,
            )
            self._meeting = _meeting or ports.meeting(self._layout)
            self._open(self._meeting)

    @classmethod
    def from_torch_distributed(cls, chief_ip: str | None = None) -> DistributedContext:
        """Take ranks and sizes from an initialized `torch.distributed` process group. All ranks must call this.

        The chief shares where to meet, and a new key, through the group, so there is nothing to configure; on several
        machines it listens at `chief_ip`, by default at `MASTER_ADDR` or the address that leads there. With nccl,
        call `torch.cuda.set_device` first.
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

        descriptions: list[Any] = [None] * size
        dist.all_gather_object(descriptions, describe(rank, size, os.environ))
        return cls._agreed(layout_of(rank, descriptions), chief_ip, broadcast)

    @classmethod
    def from_horovod(cls, hvd: Any, chief_ip: str | None = None) -> DistributedContext:
        """Take ranks and sizes from an initialized Horovod module, such as `horovod.torch`. All ranks must call this.

        Where the module has `broadcast_object`, the chief shares where to meet through it, and a new key.
        """
        layout = Layout(
            rank=hvd.rank(),
            size=hvd.size(),
            local_rank=hvd.local_rank(),
            local_size=hvd.local_size(),
            cross_rank=hvd.cross_rank(),
            cross_size=hvd.cross_size(),
        )
        if layout.size > 1 and hasattr(hvd, "broadcast_object"):
            return cls._agreed(layout, chief_ip, lambda item: hvd.broadcast_object(item, root_rank=0))
        return cls(**dataclasses.asdict(layout), chief_ip=chief_ip)

    @classmethod
    def from_deepspeed(cls, chief_ip: str | None = None) -> DistributedContext:
        """Take ranks and sizes from the process group that `deepspeed.init_distributed()` made."""
        return cls.from_torch_distributed(chief_ip)

    @classmethod
    def single(cls) -> DistributedContext:
        """Return the context of a process that trains alone."""
        return cls(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)

    @classmethod
    def _agreed(cls, layout: Layout, chief_ip: str | None, broadcast: Any) -> DistributedContext:
        return cls(**dataclasses.asdict(layout), _meeting=agree(layout, chief_ip, broadcast))

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

    def side_line(self) -> SideLine | None:
        """Return the line for small messages beside the collectives, always the same; None with one process.

        Who starts it closes it: `close()` of this context leaves a line that was started as it is, so that the
        others see a process that failed come to its end, not take leave.
        """
        if self.size > 1 and self._side_line is None:
            group = self._group_of_all()
            self._side_line = (
                ChiefLine(group, self._receptions[0])
                if self.is_chief
                else WorkerLine(group, self._meeting.everyone, self._meeting.key)
            )
        return self._side_line

    def close(self) -> None:
        """Say goodbye to the other ranks and let go of the connections to them; again is fine."""
        if os.getpid() != self._process:
            return
        if self._side_line is not None and not self._side_line.is_started:
            self._side_line.close()
        for reception in self._receptions:
            reception.close()
        self._everyone.close()
        self._machine.close()

    def _open(self, meeting: Meeting) -> None:
        everyone = self._group_of_all()
        try:
            self._everyone = self._machine = self._star(everyone, meeting.everyone, meeting)
            if self._layout.has_several_machines:
                self._machine = self._star_of_machine(meeting)
        except BaseException:
            self.close()
            raise

    def _star_of_machine(self, meeting: Meeting) -> Star:
        if self.local_size == 1:
            return Alone()
        group = Group(size=self.local_size, index=self.local_rank, timeout=self.timeout, machine=self.cross_rank)
        return self._star(group, meeting.machine, dataclasses.replace(meeting, listener=None))

    def _star(self, group: Group, address: Address, meeting: Meeting) -> Star:
        if group.index > 0:
            return Spoke(group, address, meeting.key, self._lock)
        reception = Reception(meeting.listener or address.listen(), meeting.key, group.number, group.size)
        self._receptions.append(reception)
        return Hub(group, reception, self._lock)

    def _group_of_all(self) -> Group:
        return Group(size=self.size, index=self.rank, timeout=self.timeout)

    def _here(self, star: Star) -> Star:
        if os.getpid() != self._process:
            raise errors.InternalException(
                f"This DistributedContext belongs to process {self._process}; a process forked from it, such as a "
                "loader worker, cannot take part. Exchange objects in the training process."
            )
        return star


def timeout_seconds(timeout: float | None = None) -> float:
    """Return how long to wait for other ranks: what is given, else what `DET_DISTRIBUTED_TIMEOUT` says, else 1800."""
    text = os.environ.get(TIMEOUT_VARIABLE) if timeout is None else None
    given = f"DistributedContext(timeout={timeout!r})" if text is None else f"{TIMEOUT_VARIABLE}={text!r}"
    try:
        seconds = float(text or (DEFAULT_TIMEOUT if timeout is None else timeout))
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise ValueError(f"{given} is no time to wait for other ranks; give a positive number, such as 1800.")
    return seconds
