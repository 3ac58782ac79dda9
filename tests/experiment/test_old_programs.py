"""Programs and configs as they were written for Determined clusters, run by the real runner without a change."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from cases import every
from determined.experiment import config as configs
from determined.experimental import client
from determined.tracking import RunState
from told import Workshop

# What old programs do is said to be deprecated, and works.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")

PROGRAM = """
import time
from typing import Any, Dict, Sequence, Union, cast

import torch
from torch import nn

from determined.pytorch import DataLoader, LRScheduler, PyTorchCallback, PyTorchTrial, PyTorchTrialContext

TorchData = Union[Dict[str, torch.Tensor], Sequence[torch.Tensor], torch.Tensor]


class Counting(PyTorchCallback):
    def __init__(self) -> None:
        self.validations = 0

    def on_validation_end(self, metrics: Dict[str, Any]) -> None:
        self.validations += 1

    def on_checkpoint_end(self, checkpoint_dir: str) -> None:
        pass

    def on_training_epoch_start(self) -> None:
        pass

    def state_dict(self) -> Dict[str, Any]:
        return {"validations": self.validations}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self.validations = state_dict["validations"]


class OldTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.samples = int(self.context.get_data_config()["samples"])
        self.model = self.context.wrap_model(nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1)))
        self.optimizer = self.context.wrap_optimizer(
            torch.optim.Adadelta(self.model.parameters(), lr=self.context.get_hparam("learning_rate"))
        )
        self.lr_sch = self.context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.StepLR(self.optimizer, 2), step_mode=LRScheduler.StepMode.STEP_EVERY_EPOCH
        )

    def data(self) -> torch.utils.data.Dataset:
        x = torch.arange(float(self.samples)).reshape(-1, 1) / self.samples
        return torch.utils.data.TensorDataset(x, 2 * x)

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(self.data(), batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.data(), batch_size=self.context.get_per_slot_batch_size())

    def build_callbacks(self) -> Dict[str, PyTorchCallback]:
        return {"counting": Counting()}

    def train_batch(self, batch: TorchData, epoch_idx: int, batch_idx: int) -> Dict[str, torch.Tensor]:
        time.sleep(self.context.get_data_config().get("seconds", 0.0))
        data, labels = cast(Sequence[torch.Tensor], batch)
        loss = nn.functional.mse_loss(self.model(data), labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: TorchData) -> Dict[str, Any]:
        data, labels = cast(Sequence[torch.Tensor], batch)
        loss = nn.functional.mse_loss(self.model(data), labels).item()
        return {"validation_loss": loss, "accuracy": 1 / (1 + loss)}
"""

# Eight samples in batches of two: an epoch has four batches.
COMMON = """
name: old
description: from a cluster
labels: [mnist]
entrypoint: model_def:OldTrial
data: {samples: 8}
bind_mounts:
  - {host_path: /data, container_path: /data}
environment:
  image: {cpu: "determinedai/environments:py-3.8-cpu", gpu: "determinedai/environments:cuda-11.3"}
  environment_variables: {gpu: [NCCL_DEBUG=INFO], cpu: [OMP_NUM_THREADS=1]}
resources: {slots_per_trial: 1, resource_pool: default, shm_size: 1000000}
optimizations: {aggregation_frequency: 1, average_aggregated_gradients: true, average_training_metrics: true}
records_per_epoch: 8
scheduling_unit: 1
"""

SINGLE = "searcher: {name: single, metric: validation_loss, smaller_is_better: true, max_length: %s}\n"
CONSTANT = "hyperparameters: {global_batch_size: 2, learning_rate: 1.0}\n"
DRAWN = """
hyperparameters:
  global_batch_size: {type: const, val: 2}
  learning_rate: {type: log, base: 10, minval: -3.0, maxval: 0.0}
"""

LENGTHS = {
    "a length in batches": ("{batches: 6}", 6),
    "a length in epochs": ("{epochs: 2}", 8),
    "a length in records": ("{records: 10}", 5),
    "a bare length": ("3", 3),
}

PERIODS = {
    "in batches": ("min_validation_period: {batches: 2}\nmin_checkpoint_period: {batches: 3}\n", [2, 4, 6], [3, 6]),
    "in records": ("min_validation_period: {records: 6}\nmin_checkpoint_period: {records: 4}\n", [3, 6], [2, 4, 6]),
    "in epochs": ("min_validation_period: {epochs: 1}\nmin_checkpoint_period: {epochs: 1}\n", [4, 6], [4, 6]),
    "bare": ("min_validation_period: 5\nmin_checkpoint_period: 5\n", [5, 6], [5, 6]),
    "not given": ("", [6], [6]),
    "at the beginning too": ("perform_initial_validation: true\n", [0, 6], [6]),
}

SEARCHERS = {
    "random": ("random, max_trials: 2, max_length: {batches: 2}", 2, 2),
    "random by records": ("random, max_trials: 2, max_concurrent_trials: 1, max_length: {records: 4}", 2, 2),
    "adaptive_asha": ("adaptive_asha, max_trials: 3, max_length: {batches: 4}, divisor: 2, mode: aggressive", 3, 4),
    "adaptive_asha by epochs": ("adaptive_asha, max_trials: 2, max_length: {epochs: 1}, max_rungs: 2", 2, 4),
    "async_halving": ("async_halving, num_rungs: 2, max_trials: 2, max_length: 4, stop_once: true", 2, 4),
    "tpe": ("tpe, max_trials: 2, n_startup_trials: 1, max_length: {batches: 2}", 2, 2),
    "gp": ("gp, max_trials: 2, n_startup_trials: 2, max_length: {batches: 2}", 2, 2),
}


@pytest.fixture
def workshop(tmp_path: pathlib.Path) -> Workshop:
    made = Workshop(tmp_path)
    (made.code / "model_def.py").write_text(PROGRAM)
    return made


def run(workshop: Workshop, text: str) -> list[Any]:
    """Run an experiment to its end, and return its trials."""
    id = workshop.create(configs.parse(COMMON + text).to_dict())
    assert workshop.drive(id) is RunState.COMPLETED
    return workshop.records.trials(id)


@pytest.mark.parametrize("case", LENGTHS)
def test_a_trial_trains_for_its_old_length(workshop: Workshop, case: str) -> None:
    length, batches = LENGTHS[case]
    (trial,) = run(workshop, CONSTANT + SINGLE % length)
    assert (trial.state, trial.steps_completed) == (RunState.COMPLETED, batches)


@pytest.mark.parametrize("case", PERIODS)
def test_a_trial_validates_and_saves_by_its_old_periods(workshop: Workshop, case: str) -> None:
    text, validated, saved = PERIODS[case]
    run(workshop, CONSTANT + SINGLE % "{batches: 6}" + text + "checkpoint_policy: none\n")
    reports = workshop.records.metrics(1, "validation")
    assert [report.steps_completed for report in reports] == validated
    assert sorted({one.steps_completed for one in workshop.records.checkpoints(1)}) == saved


@pytest.mark.parametrize("case", every(3, SEARCHERS))
def test_an_old_search_runs_to_its_end(workshop: Workshop, case: str) -> None:
    if case in ("tpe", "gp"):
        pytest.importorskip("optuna", reason="needs the extra `search`")
    words, count, batches = SEARCHERS[case]
    searcher = f"searcher: {{name: {words}, metric: accuracy, smaller_is_better: false}}\n"
    trials = run(workshop, DRAWN + searcher + "min_validation_period: {batches: 1}\n")
    assert [trial.state for trial in trials] == [RunState.COMPLETED] * count
    # Within one process a trial hears of a stop when it has ended.
    assert [trial.steps_completed for trial in trials] == [batches] * count
    assert len({trial.hparams["learning_rate"] for trial in trials}) == count


def test_an_old_grid_has_all_combinations(workshop: Workshop) -> None:
    text = """
hyperparameters:
  global_batch_size: {type: categorical, vals: [2, 4]}
  learning_rate: {type: double, minval: 0.5, maxval: 1.0, count: 2}
searcher: {name: grid, metric: validation_loss, max_length: {epochs: 1}}
"""
    trials = run(workshop, text)
    found = sorted((t.hparams["global_batch_size"], t.hparams["learning_rate"], t.steps_completed) for t in trials)
    assert found == [(2, 0.5, 4), (2, 1.0, 4), (4, 0.5, 2), (4, 1.0, 2)]


def test_keys_without_effect_and_old_forms_are_told_once() -> None:
    searcher = "searcher: {name: adaptive_asha, metric: accuracy, max_trials: 3, max_length: {records: 8}}\n"
    notes = "\n".join(configs.parse(COMMON + DRAWN + searcher).notes)
    for key in ("bind_mounts", "environment.image", "resources.resource_pool", "records_per_epoch"):
        assert notes.count(key) == 1
    assert "was read as time_metric: batches, max_time: 4" in notes


@pytest.mark.thorough
def test_an_old_search_stops_trials_that_do_not_keep_up(workshop: Workshop) -> None:
    searcher = (
        "searcher: {name: adaptive_asha, metric: accuracy, smaller_is_better: false, max_trials: 4, divisor: 4,"
        " max_length: {batches: 40}, max_rungs: 2, max_concurrent_trials: 1, mode: aggressive}\n"
        "min_validation_period: {batches: 10}\n"
        "reproducibility: {experiment_seed: 1}\n"
    )
    text = (COMMON + DRAWN + searcher).replace("{samples: 8}", "{samples: 8, seconds: 0.05}")
    with pytest.warns(UserWarning, match="max_time: 40"):
        experiment = client.create_experiment(text, workshop.code)
    try:
        assert experiment.wait(timeout=120) is client.ExperimentState.COMPLETED
    finally:
        if experiment.reload().state is client.ExperimentState.ACTIVE:
            experiment.kill()
    steps = [trial.steps_completed for trial in experiment.list_trials()]
    assert len(steps) == 4
    assert min(steps) < 40 == max(steps)
