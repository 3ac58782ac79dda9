"""`det tensorboard start` serves what trials wrote."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import urllib.request

import pytest
from command_lab import Lab, eventually

pytestmark = pytest.mark.timeout(240)


def events(folder: pathlib.Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        writer.add_scalar("loss", 0.5, 1)


def test_tensorboard_is_started_and_ends_with_ctrl_c(lab: Lab) -> None:
    for id in (lab.create("--paused"), lab.create("--paused")):
        events(lab.home / "tensorboard" / f"experiment-{id}" / "trial-1")
    command = [sys.executable, "-m", "determined.cli", "tensorboard", "start", "1", "2", "--port", "0"]
    environment = {**os.environ, "DET_HOME": str(lab.home)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[3].rstrip(".")
            assert runs(url) == {"experiment-1/trial-1", "experiment-2/trial-1"}
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()


def runs(url: str) -> set[str]:
    """Return the runs that TensorBoard shows; it finds them after a while."""

    def found() -> set[str]:
        with urllib.request.urlopen(f"{url}data/runs", timeout=30) as answer:
            return set(json.load(answer))

    eventually(lambda: len(found()) == 2)
    return found()


def test_without_files_there_is_nothing_to_start(lab: Lab) -> None:
    id = lab.create("--paused")
    result = lab.det("tensorboard", "start", id)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert f"experiment-{id}" in result.stderr
