"""The processes of a run, and one of them as its shim sees it."""

from __future__ import annotations

import functools
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping

from determined._home import RUN_FOLDER_VARIABLE
from determined.experiment.executors._base import RunSpec
from determined.experiment.executors.local._forked import fork
from determined.experiment.executors.local._log import LogFile, LogOutput
from determined.experiment.executors.local._patterns import Patterns
from determined.experiment.executors.local._program import can_fork, execute, train_class
from determined.launch import MODULE
from determined.processes import RankExit

Body = Callable[[], None]


class Rank:
    """A process that trains, and its output."""

    def __init__(self, number: int, spec: RunSpec, patterns: Patterns, body: Body) -> None:
        self.number = number
        self._file = LogFile(spec.files.log(number))
        self.pid, stdout, stderr = fork(body)
        self.outputs = [
            LogOutput(stdout, "stdout", self._file, patterns.check),
            LogOutput(stderr, "stderr", self._file, patterns.check),
        ]

    @property
    def last_lines(self) -> list[str]:
        return list(self.outputs[1].last_lines)

    def add_line(self, text: str) -> None:
        """Add a line to its log that is not its own."""
        self._file.write("stderr", [text])

    def exit(self, code: int, by_supervisor: bool, overdue: str) -> RankExit:
        errors = self.outputs[1]
        return RankExit(self.number, code, time.monotonic(), by_supervisor, errors.traceback_at, errors.blamed, overdue)

    def drain(self) -> None:
        for output in self.outputs:
            output.drain()

    def close(self) -> None:
        for output in self.outputs:
            os.close(output.pipe)
        self._file.close()


def rank_bodies(spec: RunSpec, environment: Mapping[str, str]) -> tuple[list[Body], socket.socket | None]:
    """Return what each process of a run does, and the socket for `serve_store` where there are several ranks.

    There is one process for each rank of a class, and one for a script.
    """
    if not (spec.is_class and can_fork(spec)):
        return [functools.partial(execute, spec, environment)], None
    if spec.ranks == 1:
        return [functools.partial(train_class, spec, environment)], None
    # Bound before the ranks start, so that no other job can have the port; served afterwards, by a thread.
    door = socket.create_server(("127.0.0.1", 0))
    port = door.getsockname()[1]
    environments = [_rank_environment(environment, spec, rank, port) for rank in range(spec.ranks)]
    return [functools.partial(train_class, spec, one) for one in environments], door


def serve_store(door: socket.socket) -> object:
    """Return the store at which ranks meet; it is served as long as somebody holds it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as documented

    port = door.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach())


def _rank_environment(environment: Mapping[str, str], spec: RunSpec, rank: int, port: int) -> dict[str, str]:
    """Return the variables of one of several ranks of a class, as our launcher sets them."""
    size = spec.ranks
    command = [sys.executable, "-m", MODULE, "--nproc-per-node", str(size), "--", "--trial", str(spec.entrypoint)]
    return {
        **environment,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": environment[RUN_FOLDER_VARIABLE],
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # The ranks meet at a store that is there already.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "DET_LAUNCH_COMMAND": shlex.join(command),
    }
