"""Which place a process has among those of a job."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The six numbers of a process."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Description:
    """What a process tells the others about where it is."""

    host: str
    launched: tuple[int, int, int, int] | None
    """LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK and GROUP_WORLD_SIZE of torchrun, if they describe this group."""


def describe(rank: int, size: int, environment: Mapping[str, str]) -> _Description:
    """Return what the other processes of a group need to know to find out who shares a machine."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    values = [environment.get(name, "") for name in names]
    launched = None
    if all(value.isdecimal() for value in values) and (int(values[0]), int(values[1])) == (rank, size):
        launched = (int(values[2]), int(values[3]), int(values[4]), int(values[5]))
    return _Description(socket.gethostname(), launched)


def layout_of(rank: int, descriptions: Sequence[_Description]) -> Layout:
    """Return the place of a rank: as its launcher says if all were launched so, else by the names of the hosts."""
    launched = [each.launched for each in descriptions]
    mine = launched[rank]
    if mine is None or None in launched:
        hosts = [each.host for each in descriptions]
        machines = list(dict.fromkeys(hosts))
        local_rank, local_size = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
        mine = (local_rank, local_size, machines.index(hosts[rank]), len(machines))
    local_rank, local_size, cross_rank, cross_size = mine
    return Layout(
        rank=rank,
        size=len(descriptions),
        local_rank=local_rank,
        local_size=local_size,
        cross_rank=cross_rank,
        cross_size=cross_size,
    )


def check_layout(layout: Layout) -> None:
    """Raise TypeError or ValueError, naming the argument, if the numbers of a process do not fit together."""
    _check_rank("rank", layout.rank, layout.size)
    _check_rank("local_rank", layout.local_rank, layout.local_size)
    _check_rank("cross_rank", layout.cross_rank, layout.cross_size)
    given = f"DistributedContext(size={layout.size}, local_size={layout.local_size}, cross_size={layout.cross_size})"
    if max(layout.local_size, layout.cross_size) > layout.size:
        raise ValueError(
            f"{given}: neither the processes of one machine nor the machines can be more than all processes."
        )
    if layout.cross_size == 1 and (layout.local_rank, layout.local_size) != (layout.rank, layout.size):
        raise ValueError(
            f"{given} with rank={layout.rank}, local_rank={layout.local_rank}: on one machine, local_size is size and "
            "local_rank is rank; with more machines, say how many by cross_size."
        )


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
