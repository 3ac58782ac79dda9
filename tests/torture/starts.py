"""Start and end jobs of several ranks, many times, and count those that do not end cleanly.

Each rank is a process that ends as programs do, with everything that Python and torch do at their end, where gloo has
been seen to abort. They are forked from this one, which has imported torch, so that a job takes a second.

    python tests/torture/starts.py [--jobs 100] [--ranks 2]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import signal
import socket
import sys
import tempfile
import time
from typing import Any

import sqlalchemy  # noqa: F401  # what a run would import otherwise, once for each of its processes
import torch._dynamo
from torch import nn
from torch.utils.data import TensorDataset

from determined import pytorch

LONGEST_JOB = 60.0


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Linear(4, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters()))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.model(batch[0]).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return loss

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.model(batch[0]).square().mean()}


def train() -> None:
    torch.set_num_threads(1)
    period = pytorch.Batch(2)
    with pytorch.init() as context:
        trainer = pytorch.Trainer(Trial(context), context)
        trainer.fit(max_length=pytorch.Batch(4), validation_period=period, reporting_period=period)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_rank(rank: int, ranks: int, port: int, folder: pathlib.Path) -> int:
    """Fork a process that trains as one rank; returns its id."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DET_HOME": str(folder / "home"),
        "DET_PROGRESS": "0",
    }
    with (folder / f"{rank}.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    train()
    sys.exit(0)


def run_job(ranks: int) -> list[str]:
    """Run one job and return what was wrong with it."""
    folder, port = pathlib.Path(tempfile.mkdtemp()), free_port()
    pids = [start_rank(rank, ranks, port, folder) for rank in range(ranks)]
    codes = [exit_code(pid) for pid in pids]
    faults = [
        f"rank {rank} ended with {code}: {(folder / f'{rank}.txt').read_text(errors='replace')}"
        for rank, code in enumerate(codes)
        if code != 0
    ]
    shutil.rmtree(folder)  # not in a with block, which the forked ranks would leave as well when they end
    return faults


def exit_code(pid: int) -> int:
    deadline = time.monotonic() + LONGEST_JOB
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -signal.SIGKILL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    began, failed = time.monotonic(), 0
    for _ in range(arguments.jobs):
        if faults := run_job(arguments.ranks):
            failed += 1
            print("\n".join(faults))
    seconds = time.monotonic() - began
    ended = arguments.jobs - failed
    print(f"{ended} of {arguments.jobs} jobs of {arguments.ranks} ranks ended cleanly, in {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
