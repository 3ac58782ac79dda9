"""What was said to be saved is there after a power cut. `make torture` cuts it a hundred times."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.process, pytest.mark.campaign]


def test_nothing_that_was_saved_is_lost_by_a_power_cut() -> None:
    driver = pathlib.Path(__file__).with_name("power.py")
    done = subprocess.run([sys.executable, str(driver), "--cuts=5", "--seed=18"], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 checkpoints lost, 0 records lost, 0 metrics lost, 0 databases lost, 0 damaged databases" in done.stdout
    for what in ("checkpoints", "recorded checkpoints", "metrics"):  # else nothing was tried
        assert f" {what}" in done.stdout.splitlines()[0]
