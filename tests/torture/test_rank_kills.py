"""A short run of the kills of ranks that `make torture` does many times."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.process, pytest.mark.campaign]


def test_killed_ranks_end_with_the_same_bits() -> None:
    program = pathlib.Path(__file__).with_name("rank_kills.py")
    done = subprocess.run([sys.executable, str(program), "--kills", "3"], capture_output=True, text=True, timeout=300)
    assert "3 kills of one of 2 ranks, seed 1: 0 runs ended differently" in done.stdout, done.stdout + done.stderr
