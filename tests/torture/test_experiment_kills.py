"""A search whose processes are killed ends as one that was let alone. `make torture` is the long version."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.process, pytest.mark.campaign]


def test_a_killed_search_finds_what_a_quiet_one_finds() -> None:
    driver = pathlib.Path(__file__).with_name("experiment_kills.py")
    command = [sys.executable, str(driver), "--kills=3", "--seed=4", "--only=asha"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills in 1 searches, 0 differences" in done.stdout
