"""A training that is killed again and again ends as one that was let alone. `make torture` is the long version."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

pytestmark = [pytest.mark.process, pytest.mark.campaign]


def test_training_killed_many_times_ends_with_the_same_bits() -> None:
    driver = pathlib.Path(__file__).with_name("torture.py")
    # In memory where possible: what a killed process has written is there also without a disk.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    command = [sys.executable, str(driver), "--kills=10", "--short", "--seed=7"]
    with tempfile.TemporaryDirectory(dir=memory) as folder:  # also of what killed processes leave
        environment = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 differences, 0 failed runs, 0 unreadable latest checkpoints" in done.stdout
