"""Signals to whole programs, for what only a process has: a status, an error output, a terminal."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

import forking
from trials import records, saved_at, state_in

pytestmark = pytest.mark.process

SIGNALS = [signal.SIGTERM, signal.SIGINT]

PROGRAM = """
import os, signal, sys, threading
from determined import pytorch
from trials import LineTrial, trainer

class Trial(LineTrial):
    def train_batch(self, batch, epoch_idx, batch_idx):
        if batch_idx == 2:
            {act}
        return super().train_batch(batch, epoch_idx, batch_idx)

{before}
with trainer(Trial) as (its_trainer, trial):
    {within}
    its_trainer.fit(max_length=pytorch.Batch(5), reporting_period=pytorch.Batch(1000))
    print("fit returned after", len(trial.seen))
    {after}
print("went on")
"""


@pytest.fixture
def run(tmp_path: pathlib.Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(act: str = "pass", before: str = "", within: str = "", after: str = "") -> Any:
        program = tmp_path / "program" / "train.py"
        program.parent.mkdir()
        program.write_text(PROGRAM.format(act=act, before=before, within=within, after=after))
        return forking.run(
            [str(program)],
            env={**os.environ, "PYTHONPATH": forking.PYTHONPATH},
            cwd=tmp_path,
            capture_output=True,
            timeout=120,
        )

    return run


def kill(which: signal.Signals) -> str:
    return f"os.kill(os.getpid(), {int(which)})"


@pytest.mark.parametrize("which", SIGNALS)
def test_process_that_a_signal_stops_saves_and_has_the_status_of_shells(which: signal.Signals, run: Any) -> None:
    done = run(kill(which))
    assert done.returncode == 128 + which, done.stderr
    assert "fit returned after 3" in done.stdout
    assert "went on" not in done.stdout
    assert saved_at() == [3]
    assert state_in(pathlib.Path(records().checkpoints()[0].path))["loop"]["progress"]["batches_trained"] == 3


def test_sigterm_before_fit_ends_the_process_as_any_other(run: Any) -> None:
    done = run(within=kill(signal.SIGTERM))
    assert done.returncode == -signal.SIGTERM, done.stderr


def test_sigint_after_fit_interrupts_the_program_as_any_other(run: Any) -> None:
    done = run(after=kill(signal.SIGINT))
    assert "KeyboardInterrupt" in done.stderr
    assert saved_at() == [5]


def test_sigusr1_prints_all_stacks_and_training_goes_on(run: Any) -> None:
    waiting = "threading.Thread(target=threading.Event().wait, name='idle', daemon=True).start()"
    done = run(kill(signal.SIGUSR1), before=waiting)
    assert done.returncode == 0, done.stderr
    assert "in train_batch" in done.stderr
    assert done.stderr.count("hread 0x") >= 2
    assert "went on" in done.stdout


def test_notebook_keeps_its_kernel_its_handler_and_its_output(run: Any) -> None:
    """As a kernel does it: an error output without a file, a handler of its own, cells run by `exec`."""
    done = run(
        before="import io\n"
        "def kernel(signum, frame): print('kernel interrupted')\n"
        "signal.signal(signal.SIGINT, kernel)\n"
        "sys.stderr = sys.__stderr__ = io.StringIO()\n"
        "cell = '''\n"
        "with trainer(Trial) as (its_trainer, trial):\n"
        "    its_trainer.fit(max_length=pytorch.Batch(5))\n"
        "'''\n"
        "def stop(self, batch, epoch_idx, batch_idx):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return LineTrial.train_batch(self, batch, epoch_idx, batch_idx)\n"
        "plain, Trial.train_batch = Trial.train_batch, stop\n"
        "try:\n"
        "    exec(cell, globals())\n"
        "except SystemExit as end:\n"
        "    print('cell ended with', end.code)\n"
        "Trial.train_batch = plain\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "went on"
    assert "cell ended with 130\nkernel interrupted" in done.stdout
    assert [saved_at(1), saved_at(2)] == [[1], [5]]
