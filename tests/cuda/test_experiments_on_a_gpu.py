"""Experiments on a GPU: trials forked from a warm process each get a CUDA context of their own."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "experiment"))

from determined.experiment import control
from determined.experiment.executors import read_logs
from determined.tracking import RunState
from driven import Experiments, config, eventually, experiments

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

ON_A_GPU = """
from program import Quick


class OnAGpu(Quick):
    def __init__(self, context):
        super().__init__(context)
        print("device", self.model.weight.device, "of", __import__("torch").cuda.device_count(), flush=True)
"""


@pytest.fixture
def lab(tmp_path: pathlib.Path) -> Iterator[Experiments]:
    with experiments(tmp_path) as made:
        (made.code / "gpu.py").write_text(ON_A_GPU)
        yield made


def test_class_trials_train_on_the_gpu_of_their_slot(lab: Experiments) -> None:
    searcher = {"name": "random", "metric": "validation_loss", "max_trials": 3, "max_length": {"batches": 6}}
    id = lab.run(config(entrypoint="gpu:OnAGpu", searcher=searcher))
    trials = lab.records.trials(id)
    assert [trial.state for trial in trials] == [RunState.COMPLETED] * 3
    for trial in trials:
        assert "device cuda:0 of 1" in [line.text for line in read_logs(lab.home.trial(id, trial.id))]


def test_a_paused_trial_goes_on_on_the_gpu(lab: Experiments) -> None:
    searcher = {"name": "single", "metric": "validation_loss", "max_length": {"batches": 60}}
    settings = config(entrypoint="gpu:OnAGpu", searcher=searcher, hyperparameters={"seconds": 0.05})
    id = lab.create(settings)
    eventually(lambda: any(trial.steps_completed > 10 for trial in lab.records.trials(id)))
    control.pause(id, lab.home)
    eventually(lambda: lab.state(id) is RunState.PAUSED)
    control.activate(id, lab.home)
    assert control.wait(id, 120, lab.home) is RunState.COMPLETED
