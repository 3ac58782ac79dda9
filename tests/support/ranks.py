"""Real processes that train one trial, as a launcher would start them."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

PATIENCE = 90.0
PRELOADED = ["torch._dynamo", "sqlalchemy", "determined.pytorch", "determined.tracking", "trials"]


@dataclasses.dataclass
class RunExit:
    """How one rank ended: its exit status, what its function returned, and what it wrote."""

    rank: int
    status: int | None
    result: Any
    output: str


class Ranks:
    """Processes of one job, each of which calls a function."""

    def __init__(self, folder: pathlib.Path, processes: list[Any]) -> None:
        self._folder = folder
        self.processes = processes

    def output(self, rank: int) -> str:
        """Return what a rank has written so far."""
        path = self._folder / f"{rank}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def await_output(self, rank: int, text: str) -> None:
        """Wait until a rank has written a text."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.output(rank):
            assert time.monotonic() < deadline, f"rank {rank} did not write {text!r}:\n{self.output(rank)}"
            time.sleep(0.01)

    def wait(self, timeout: float = PATIENCE) -> list[RunExit]:
        """Wait until all have ended; those that have not by then are killed and have no status."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [self._ended(rank, process) for rank, process in enumerate(self.processes)]

    def kill(self) -> None:
        """End what still runs."""
        for process in self.processes:
            process.kill()
            process.join()

    def _ended(self, rank: int, process: Any) -> RunExit:
        path = self._folder / f"{rank}.pickle"
        result = pickle.loads(path.read_bytes()) if path.exists() else None
        return RunExit(rank, process.exitcode, result, self.output(rank))


@contextlib.contextmanager
def started(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    environment: Mapping[str, str] | None = None,
    one_a_machine: bool = False,
) -> Any:
    """Give the ranks of a job that calls `function(*args)` in each of them; all of one machine, or one of each."""
    import torch.distributed as dist

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # Served from here, as torchrun does, so that no other job can have the port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(size):
            place = _on_machines(rank, size) if one_a_machine else _on_one_machine(rank, size)
            variables = {**os.environ, **place, **_variables(rank, size, store.port), **(environment or {})}
            target = (function, args, variables, pathlib.Path(folder), rank)
            processes.append(context.Process(target=_run, args=target, daemon=False))
            processes[-1].start()
        ranks = Ranks(pathlib.Path(folder), processes)
        try:
            yield ranks
        finally:
            ranks.kill()
    del store


def run(function: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Any]:
    """Call `function(*args)` in as many ranks; return what each returned. A rank that fails fails the test."""
    with started(function, size, *args, **options) as ranks:
        ended = ranks.wait()
    for one in ended:
        assert one.status == 0, f"rank {one.rank} ended with {one.status}:\n{one.output}"
    return [one.result for one in ended]


def _on_one_machine(rank: int, size: int) -> dict[str, str]:
    ranks = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    return {**ranks, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}


def _on_machines(rank: int, size: int) -> dict[str, str]:
    machines = {"GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": str(size)}
    return {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **machines}


def _variables(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "test",
    }


def _run(
    function: Callable[..., Any], args: tuple[Any, ...], variables: dict[str, str], folder: pathlib.Path, rank: int
) -> None:
    import torch

    torch.set_num_threads(1)
    # As in a program of its own: loader workers that a server starts would not notice the end of their rank.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.clear()
    os.environ.update(variables)
    with (folder / f"{rank}.txt").open("w", buffering=1) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = sys.__stderr__ = output  # type: ignore[misc]  # as a process of its own would have it
        try:
            result = function(*args)
        except Exception:
            traceback.print_exc()
            output.flush()
            os._exit(1)
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(result))
