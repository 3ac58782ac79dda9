"""Who this process is among those that train one trial, and how they exchange objects."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


class DistributedContext:
    """Rank and size of this process, and collectives for any picklable object.

    `rank` counts all processes, `local_rank` those of this machine, `cross_rank` the machines. With one
    process every collective returns at once and needs no network, so address and ports have no effect.
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
    ) -> None:
        _check_rank("rank", rank, size)
        _check_rank("local_rank", local_rank, local_size)
        _check_rank("cross_rank", cross_rank, cross_size)
        if max(local_size, cross_size) > size:
            raise ValueError(
                f"DistributedContext(size={size}, local_size={local_size}, cross_size={cross_size}): neither the "
                "processes of one machine nor the machines can be more than all processes."
            )
        if size > 1:
            raise ValueError(
                f"DistributedContext(size={size}) asks for several processes; this version trains in one. "
                "Start the program with `python`, not with a launcher of several processes."
            )
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.cross_rank = cross_rank
        self.cross_size = cross_size

    @classmethod
    def from_torch_distributed(cls, chief_ip: str | None = None) -> DistributedContext:
        """Take rank and size from an initialized `torch.distributed` process group."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "from_torch_distributed() found no process group; call torch.distributed.init_process_group() first."
            )
        rank, size = dist.get_rank(), dist.get_world_size()
        return cls._of_one_machine(rank, size, chief_ip)

    @classmethod
    def from_horovod(cls, hvd: Any, chief_ip: str | None = None) -> DistributedContext:
        """Take rank and size from an initialized Horovod module, such as `horovod.torch`."""
        return cls(
            rank=hvd.rank(),
            size=hvd.size(),
            local_rank=hvd.local_rank(),
            local_size=hvd.local_size(),
            cross_rank=hvd.cross_rank(),
            cross_size=hvd.cross_size(),
            chief_ip=chief_ip,
        )

    @classmethod
    def from_deepspeed(cls, chief_ip: str | None = None) -> DistributedContext:
        """Take rank and size from the process group that `deepspeed.init_distributed()` made."""
        return cls.from_torch_distributed(chief_ip)

    @classmethod
    def single(cls) -> DistributedContext:
        """Return the context of a process that trains alone."""
        return cls._of_one_machine(0, 1, None)

    @classmethod
    def _of_one_machine(cls, rank: int, size: int, chief_ip: str | None) -> DistributedContext:
        return cls(
            rank=rank,
            size=size,
            local_rank=rank,
            local_size=size,
            cross_rank=0,
            cross_size=1,
            chief_ip=chief_ip,
        )

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

    def gather(self, item: T) -> list[T] | None:
        """Return every rank's item, ordered by rank, on the chief; None elsewhere. All ranks must call this."""
        return [item]

    def gather_local(self, item: T) -> list[T] | None:
        """Return the items of this machine's ranks on its first rank; None elsewhere."""
        return [item]

    def allgather(self, item: T) -> list[T]:
        """Return every rank's item, ordered by rank. All ranks must call this."""
        return [item]

    def allgather_local(self, item: T) -> list[T]:
        """Return the items of this machine's ranks, ordered by rank."""
        return [item]

    def broadcast(self, item: T) -> T:
        """Return the chief's item. All ranks must call this."""
        return item

    def broadcast_local(self, item: T) -> T:
        """Return the item of this machine's first rank."""
        return item

    def close(self) -> None:
        """Let go of the connections to the other ranks."""


def _check_rank(name: str, rank: int, size: int) -> None:
    size_name = name.replace("rank", "size")
    for label, value in ((name, rank), (size_name, size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"DistributedContext({label}={value!r}): pass an int.")
    if size < 1 or not 0 <= rank < size:
        raise ValueError(
            f"DistributedContext({name}={rank!r}, {size_name}={size!r}): "
            f"ranks count from 0 to {size_name} - 1, and {size_name} is at least 1."
        )
