"""The batch script of the guide, on a real Slurm."""

from __future__ import annotations

import os
import pathlib
import re
import sys
import time
from typing import Any

import pytest

from determined import tracking
from slurm import Slurm

pytestmark = [pytest.mark.cluster, pytest.mark.process, pytest.mark.thorough, pytest.mark.timeout(280)]

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "launching.md"
PLAIN = pathlib.Path(__file__).parents[1] / "programs" / "plain" / "train.py"
TRAIN = """
import time
from determined import pytorch
from model_def import Trial

class Slow(Trial):
    def train_batch(self, batch, epoch_idx, batch_idx):
        time.sleep(0.2)
        return super().train_batch(batch, epoch_idx, batch_idx)

with pytorch.init(hparams={"lr": 0.1, "global_batch_size": 4}) as context:
    trainer = pytorch.Trainer(Slow(context), context)
    trainer.fit(max_length=pytorch.Batch(40), validation_period=pytorch.Batch(2), latest_checkpoint="latest")
"""


def script() -> str:
    """Return the batch script of the guide, for nodes without GPUs."""
    (found,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", GUIDE.read_text(), re.DOTALL)
    assert "--gpus-per-node=4" in found
    return str(found).replace("--gpus-per-node=4", "--cpus-per-task=1")


def trials(home: pathlib.Path) -> list[tracking.TrialRecord]:
    reader = tracking.TrackingReader(home / "tracking.db")
    return [trial for one in reader.experiments() for trial in reader.trials(one.id)]


def eventually(condition: Any, seconds: float = 90.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.torture
def test_a_warned_job_saves_and_goes_on_when_it_is_requeued(
    tmp_path: pathlib.Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = pathlib.Path(os.environ["DET_HOME"])
    monkeypatch.setenv("PATH", os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]))
    (tmp_path / "model_def.py").write_text(PLAIN.read_text())
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "job.sh").write_text(script())
    job = slurm.run("sbatch", "--parsable", "--output=job.txt", "job.sh", cwd=tmp_path)
    eventually(lambda: (home / "tracking.db").exists() and [one for one in trials(home) if one.steps_completed >= 4])
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    eventually(lambda: slurm.jobs().get(job) == "PENDING")
    eventually(lambda: job not in slurm.jobs())
    found = sorted(trials(home), key=lambda trial: trial.id)
    assert len(found) == 2, (tmp_path / "job.txt").read_text()
    first, second = found
    assert first.steps_completed < second.steps_completed == 40
    assert second.source_checkpoint is not None
    assert (second.source_steps_completed or 0) >= 4
