"""One training on two machines with two ranks each, which share a folder: to its end, and when the cable is cut."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

import forking
from hosts import Hosts
from trials import records

pytestmark = pytest.mark.process

PROGRAM = """
import os, sys, time
import torch
torch.set_num_threads(1)
from determined.pytorch import Batch
from trials import LineTrial, fit

class Trial(LineTrial):
    def train_batch(self, batch, epoch_idx, batch_idx):
        time.sleep(float(sys.argv[2]))
        print("batch", batch_idx, flush=True)
        return super().train_batch(batch, epoch_idx, batch_idx)

fit(Trial, max_length=Batch(int(sys.argv[1])), reporting_period=Batch(2))
"""


class Job:
    """Four ranks, two on each host."""

    def __init__(self, hosts: Hosts, folder: pathlib.Path, *arguments: str) -> None:
        self.hosts = hosts
        self._outputs = [folder / f"{rank}.txt" for rank in range(4)]
        self.processes = [self._start(rank, arguments) for rank in range(4)]

    def _start(self, rank: int, arguments: tuple[str, ...]) -> subprocess.Popen[str]:
        host = rank // 2
        environment = {
            **os.environ,
            "PYTHONPATH": forking.PYTHONPATH,
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank % 2),
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": str(host),
            "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": "29511",
            "GLOO_SOCKET_IFNAME": self.hosts.cable[host],
            "DET_PEER_TIMEOUT": "4",
        }
        prefix = ["ip", "netns", "exec", self.hosts.names[host]]
        with self._outputs[rank].open("w") as output:
            return subprocess.Popen(
                [*prefix, sys.executable, "-c", PROGRAM, *arguments],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def output(self, rank: int) -> str:
        return self._outputs[rank].read_text()

    def await_output(self, rank: int, text: str) -> None:
        deadline = time.monotonic() + 120
        while text not in self.output(rank):
            assert time.monotonic() < deadline, self.output(rank)
            time.sleep(0.05)

    def statuses(self, seconds: float) -> list[int | None]:
        deadline = time.monotonic() + seconds
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        return [process.poll() for process in self.processes]

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self.processes[rank].kill()


@pytest.fixture
def start(hosts: Hosts, tmp_path: pathlib.Path) -> Iterator[Any]:
    jobs: list[Job] = []

    def started(*arguments: str) -> Job:
        jobs.append(Job(hosts, tmp_path, *arguments))
        return jobs[-1]

    yield started
    for job in jobs:
        job.kill(0, 1, 2, 3)
        job.statuses(10)


def test_two_machines_train_one_trial(start: Any) -> None:
    job = start("6", "0")
    assert job.statuses(120) == [0, 0, 0, 0], [job.output(rank) for rank in range(4)]
    (checkpoint,) = records().checkpoints()
    assert checkpoint.steps_completed == 6


@pytest.mark.thorough
def test_cut_cable_ends_all_ranks_on_both_machines(start: Any) -> None:
    job = start("100000", "0.01")
    job.await_output(3, "batch 5\n")
    job.hosts.cut()
    assert job.statuses(4 + 10) == [1, 1, 1, 1], [job.output(rank) for rank in range(4)]
    assert "frozen or cut off" in job.output(0) + job.output(3)


@pytest.mark.thorough
def test_lost_machine_ends_the_ranks_of_the_other(start: Any) -> None:
    job = start("100000", "0.01")
    job.await_output(3, "batch 5\n")
    job.kill(2, 3)
    statuses = job.statuses(10)
    assert statuses == [1, 1, -signal.SIGKILL, -signal.SIGKILL], [job.output(rank) for rank in range(4)]
    assert "because of rank" in job.output(0)
