"""Decide which processes a run consists of."""

from __future__ import annotations

import dataclasses
import functools
import socket
from collections.abc import Callable, Mapping
from typing import Any

from determined.experiment.executors._base import RunSpec
from determined.experiment.executors._environment import rank_environment
from determined.experiment.executors._fresh import train_class
from determined.experiment.executors._programs import Body, execute, is_warm


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """What is to be started."""

    bodies: list[Body]
    """What each process does."""
    finish: Callable[[], Any]
    """To be called when all processes have been started; what it returns is to be kept until they have ended."""


def start_of(spec: RunSpec, environment: Mapping[str, str]) -> Start:
    """Return the processes of a run: one for each rank of a class, one for a script."""
    if not spec.code.is_dir():
        raise FileNotFoundError(f"the code folder {spec.code} is not there")
    if not (spec.is_class and is_warm(spec)):
        return Start([functools.partial(execute, spec, environment)], lambda: None)
    if spec.ranks == 1:
        return Start([functools.partial(train_class, spec, environment)], lambda: None)
    return _ranks(spec, environment)


def _ranks(spec: RunSpec, environment: Mapping[str, str]) -> Start:
    # Bound before the ranks are there, so that no other job can have the port; served afterwards, by a thread.
    door = socket.create_server(("127.0.0.1", 0))
    port = door.getsockname()[1]
    bodies: list[Body] = [
        functools.partial(train_class, spec, rank_environment(environment, spec, rank, port))
        for rank in range(spec.ranks)
    ]
    return Start(bodies, lambda: _serve(door, port))


def _serve(door: socket.socket, port: int) -> Any:
    """Return the store at which the ranks meet."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as documented

    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach())
