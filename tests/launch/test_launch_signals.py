"""Signals to the launcher, and what becomes of its ranks when it is gone."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import forking
from cases import every
from determined import pytorch
from trials import records, saved_at

pytestmark = pytest.mark.process

Start = Callable[..., forking.Process]

TRIAL = """
import os
from trials import LineTrial

class Trial(LineTrial):
    def train_batch(self, batch, epoch_idx, batch_idx):
        if batch_idx == 2:
            print("process", os.getpid(), "hparams", self.context.get_hparams())
        return super().train_batch(batch, epoch_idx, batch_idx)
"""
CONFIG = """
name: endless
searcher: {name: single, metric: validation_loss, max_length: {batches: 1000000}}
scheduling_unit: 1000000
checkpoint_policy: none
hyperparameters: {lr: 1e-3}
"""


def read_until(process: forking.Process, found: Callable[[list[str]], Any]) -> list[str]:
    """Return the lines that a launcher wrote until `found` says so."""
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if found(lines):
            return lines
    raise AssertionError("it ended early:\n" + "\n".join(lines))


def await_end_of(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"of {pids} some still run"
        time.sleep(0.01)


def pids_in(lines: list[str]) -> list[int]:
    return [int(match[1]) for line in lines if (match := re.search(r"\] process (\d+)", line))]


@pytest.mark.parametrize(("which", "to_group"), every(2, [(signal.SIGTERM, False), (signal.SIGINT, True)]))
def test_signal_lets_all_ranks_save_once_and_gives_the_status_of_shells(
    which: signal.Signals, to_group: bool, script: Callable[..., str], start: Start
) -> None:
    script(TRIAL, "model_def.py")
    script(CONFIG, "experiment.yaml")
    launcher = start("--nproc-per-node", "2", "--", "--trial", "model_def:Trial", "--config", "experiment.yaml")
    lines = read_until(launcher, lambda lines: len(pids_in(lines)) == 2)
    (os.killpg if to_group else os.kill)(launcher.pid, which)
    rest, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 128 + which, rest
    assert len(saved_at()) == 1
    assert [trial.state.value for trial in records().trials(1)] == ["CANCELED"]
    assert "hparams {'lr': 0.001}" in lines[-1]
    assert "Traceback" not in rest
    continued = re.search(r"DET_LATEST_CHECKPOINT=\S+ \S+ -m determined\.launch\.torch_distributed .*yaml", rest)
    assert continued, rest
    assert not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids_in(lines))


STUBBORN = """
import os, signal, time
for which in (signal.SIGTERM, signal.SIGINT):
    signal.signal(which, lambda signum, frame: print("asked by", signum))
print("process", os.getpid())
while True:
    time.sleep(600)
"""


def test_ranks_are_asked_to_end_when_the_launcher_is_killed(script: Callable[..., str], start: Start) -> None:
    launcher = start("--nproc-per-node", "2", "--shutdown-timeout", "1", "--", script(STUBBORN))
    pids = pids_in(read_until(launcher, lambda lines: len(pids_in(lines)) == 2))
    launcher.kill()
    rest, _ = launcher.communicate(timeout=60)
    assert sorted(rest.splitlines()) == ["[rank=0] asked by 15", "[rank=1] asked by 15"]
    await_end_of(pids)


def test_ranks_that_do_not_end_in_time_are_killed(script: Callable[..., str], start: Start) -> None:
    launcher = start("--nproc-per-node", "2", "--shutdown-timeout", "1", "--", script(STUBBORN))
    pids = pids_in(read_until(launcher, lambda lines: len(pids_in(lines)) == 2))
    launcher.terminate()
    rest, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert rest.count("asked by 15") == 2
    assert "did not end when asked to" in rest
    await_end_of(pids)


class Groups(torch.utils.data.Dataset[int]):
    """Gives the process group of the worker that loads."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return os.getpgid(0)


def test_signal_to_the_group_of_a_rank_does_not_reach_its_loader_workers() -> None:
    """torchrun sends signals so, and a worker that dies of one would end the training before it is saved."""
    loader = pytorch.DataLoader(Groups(), num_workers=1).get_data_loader()
    assert os.getpgid(0) not in [int(batch) for batch in loader]
