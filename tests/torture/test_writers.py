"""A short run of the writing that `make torture` does for five minutes."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

import postgres_server

pytestmark = [pytest.mark.process, pytest.mark.campaign]


def test_all_that_many_writers_are_told_is_stored_is_stored() -> None:
    program = pathlib.Path(__file__).with_name("writers.py")
    command = [sys.executable, str(program), "--seconds", "3", "--rate", "2000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "by 8 writers: 0 failed, 0 trials with other reports" in done.stdout, done.stdout + done.stderr


def test_what_fifty_writers_are_told_is_stored_is_stored_once_though_their_server_restarts() -> None:
    postgres_server.program("initdb")
    program = pathlib.Path(__file__).with_name("writers.py")
    command = [sys.executable, str(program), "--seconds", "8", "--rate", "1000", "--writers", "50", "--server"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "by 50 writers: 0 failed, 0 trials with other reports" in done.stdout, done.stdout + done.stderr
