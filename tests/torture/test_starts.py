"""A short run of the starts that `make torture` does a hundred times."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.process, pytest.mark.campaign]


def test_jobs_of_several_ranks_end_cleanly() -> None:
    program = pathlib.Path(__file__).with_name("starts.py")
    done = subprocess.run([sys.executable, str(program), "--jobs", "4"], capture_output=True, text=True, timeout=300)
    assert "4 of 4 jobs of 2 ranks ended cleanly" in done.stdout, done.stdout + done.stderr
