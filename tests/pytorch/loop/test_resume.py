"""A resumed run goes on exactly where the checkpoint was made: same indices, numbers and results, bit for bit."""

from __future__ import annotations

import itertools
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import forking
from cases import every
from determined import pytorch
from determined.pytorch import Batch, Epoch, LRScheduler
from exactness import LENGTH, ExactTrial, check_exact, check_same_end, run

pytestmark = [
    # Python 3.12 and later say so of every loader worker that torch forks beside another thread.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
    # So does torch on machines with few cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


@pytest.mark.parametrize(
    ("workers", "shuffle", "aggregation"), every(3, itertools.product([0, 2], [True, False], [1, 3]))
)
def test_resumed_run_equals_whole_run(workers: int, shuffle: bool, aggregation: int) -> None:
    class Trial(ExactTrial):
        num_workers = workers

    Trial.shuffle = shuffle
    # The first batch, the middle of an epoch (and of an aggregation), the end of an epoch, the start of the next.
    check_exact(Trial, [1, 4, 6, 7], {"aggregation_frequency": aggregation}, validation_period=Batch(5))


# Parts whose state must come along


@pytest.mark.parametrize(("mode", "aggregation"), every(3, itertools.product(LRScheduler.StepMode, [1, 3])))
def test_learning_rates_go_on(mode: LRScheduler.StepMode, aggregation: int) -> None:
    class Trial(ExactTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
            self.schedule = context.wrap_lr_scheduler(schedule, mode, frequency=2)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            metrics = super().train_batch(batch, epoch_idx, batch_idx)
            optimizer_stepped = (batch_idx + 1) % aggregation == 0
            if mode is LRScheduler.StepMode.MANUAL_STEP and optimizer_stepped:
                self.schedule.step()
            return metrics

    check_exact(Trial, [4, 6], {"aggregation_frequency": aggregation})


def make_schedules(optimizer: torch.optim.Optimizer) -> dict[str, Callable[[], Any]]:
    """Return makers of schedulers whose state is more than a few numbers."""
    lr = torch.optim.lr_scheduler
    return {
        "lambda": lambda: lr.LambdaLR(optimizer, lambda step: 0.9**step),
        "one cycle": lambda: lr.OneCycleLR(optimizer, max_lr=0.1, total_steps=LENGTH + 1),
        "cyclic": lambda: lr.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
        "sequential": lambda: lr.SequentialLR(
            optimizer, [lr.LinearLR(optimizer, 0.1, total_iters=3), lr.ExponentialLR(optimizer, 0.9)], [3]
        ),
        "chained": lambda: lr.ChainedScheduler(
            [lr.ConstantLR(optimizer, 0.1, total_iters=3), lr.ExponentialLR(optimizer, 0.9)]
        ),
        "restarts": lambda: lr.CosineAnnealingWarmRestarts(optimizer, 4),
    }


@pytest.mark.parametrize("name", list(make_schedules(torch.optim.SGD([torch.zeros(1)], lr=0.1))))
def test_every_kind_of_schedule_goes_on(name: str) -> None:
    class Trial(ExactTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            schedule = make_schedules(self.optimizer)[name]()
            context.wrap_lr_scheduler(schedule, LRScheduler.StepMode.STEP_EVERY_BATCH)

    check_exact(Trial, [5])


def test_plateau_schedule_stepped_by_a_callback_goes_on() -> None:
    class Trial(ExactTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0, factor=0.5)
            context.wrap_lr_scheduler(self.plateau, LRScheduler.StepMode.MANUAL_STEP)

        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            context, plateau = self.context, self.plateau

            class Step(pytorch.PyTorchCallback):
                def on_validation_end(self, metrics: dict[str, Any]) -> None:
                    plateau.step(context.current_train_batch())  # grows, so it never improves

            return {**super().build_callbacks(), "step": Step()}

    whole = check_exact(Trial, [5], validation_period=Batch(2))
    rates = [metrics["lr"] for group, _, metrics in whole.metrics if group == "training"]
    assert rates[-1] < rates[0]


def test_two_models_with_optimizers_of_different_kinds_go_on() -> None:
    class Trial(ExactTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.other = context.wrap_model(nn.Linear(4, 4))
            parameters = self.other.parameters()
            self.second = context.wrap_optimizer(torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True))

        def loss(self, batch: Any) -> torch.Tensor:
            x, y = batch
            return super().loss((self.other(x), y))

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            metrics = super().train_batch(batch, epoch_idx, batch_idx)
            if batch_idx % 2:
                self.context.step_optimizer(self.second)
            return metrics

    # Gradients of the second optimizer wait for the next batch at each of these.
    check_exact(Trial, [1, 5])


def test_frozen_parameters_stay_without_gradients() -> None:
    class Trial(ExactTrial):
        def make_model(self) -> nn.Module:
            model = super().make_model()
            next(model.parameters()).requires_grad_(False)
            return model

    check_exact(Trial, [5], {"aggregation_frequency": 3})


def test_state_of_callbacks_goes_on() -> None:
    whole = run(ExactTrial, checkpoint_period=Batch([5]))
    seen: list[dict[str, Any]] = []

    class Trial(ExactTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            load = self.memory.load_state_dict
            self.memory.load_state_dict = lambda state: (seen.append(dict(state)), load(state))[1]

    run(Trial, latest_checkpoint=whole.checkpoints[5])
    assert seen[0]["batches"] == 5
    assert isinstance(seen[0]["losses"], np.ndarray)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (1, [("end", 0), ("start", 1), ("end", 1), ("start", 2)]),
        (6, [("start", 1), ("end", 1), ("start", 2)]),
        (7, [("end", 1), ("start", 2)]),
    ],
)
def test_epoch_hooks_are_not_run_again(stop: int, expected: list[Any]) -> None:
    whole = run(ExactTrial, checkpoint_period=Batch([stop]))
    assert run(ExactTrial, latest_checkpoint=whole.checkpoints[stop]).events == expected


def test_best_validation_is_remembered() -> None:
    class Worsening(ExactTrial):
        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            done = self.context.current_train_batch() + 1
            return {"validation_loss": abs(done - 4.5)}  # 2.5, 0.5, 1.5, 3.5, ...

    fit: dict[str, Any] = {"checkpoint_policy": "best", "validation_period": Batch(2)}
    first = run(Worsening, max_length=Batch(5), **fit)
    assert sorted(first.checkpoints) == [2, 4, 5]
    resumed = run(Worsening, latest_checkpoint=first.checkpoints[4], **fit)
    assert sorted(resumed.checkpoints) == [LENGTH]  # none was better; the last batch is always saved


# Ways to stop, and to go on


LAST_IS_DUE: dict[str, Any] = {
    "max_length": pytorch.Epoch(3),
    "validation_period": pytorch.Epoch(2),
    "checkpoint_period": pytorch.Epoch(1),
}
"""A checkpoint is due after the last batch, and a validation is not: it comes because training ends."""


def test_starting_a_finished_run_again_writes_nothing() -> None:
    whole = run(ExactTrial, **LAST_IS_DUE)
    again = run(ExactTrial, latest_checkpoint=whole.checkpoints[18], **LAST_IS_DUE)
    assert (again.metrics, again.checkpoints) == ([], {})


def test_a_run_that_was_stopped_before_its_last_validation_records_it_once() -> None:
    class Stopping(ExactTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            self.context.set_stop_requested(batch_idx == 17)
            return super().train_batch(batch, epoch_idx, batch_idx)

    whole = run(ExactTrial, **LAST_IS_DUE)
    stopped = run(Stopping, **LAST_IS_DUE)
    resumed = run(ExactTrial, latest_checkpoint=stopped.checkpoints[18], **LAST_IS_DUE)
    assert stopped.metrics + resumed.metrics == whole.metrics
    again = run(ExactTrial, latest_checkpoint=resumed.checkpoints[18], **LAST_IS_DUE)
    assert (again.metrics, again.checkpoints) == ([], {})


def test_run_that_ended_early_goes_on_to_the_end_of_a_whole_run() -> None:
    whole = run(ExactTrial)
    first = run(ExactTrial, max_length=Batch(5))
    resumed = run(ExactTrial, latest_checkpoint=first.checkpoints[5])
    assert first.log + resumed.log == whole.log
    assert resumed.state[:3] == whole.state[:3]


def test_run_that_was_asked_to_stop_goes_on_to_the_end_of_a_whole_run() -> None:
    class Stopping(ExactTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            self.context.set_stop_requested(batch_idx == 8)
            return super().train_batch(batch, epoch_idx, batch_idx)

    whole = run(ExactTrial)
    stopped = run(Stopping)
    resumed = run(ExactTrial, latest_checkpoint=stopped.checkpoints[9])
    assert stopped.log + resumed.log == whole.log
    assert resumed.state[:3] == whole.state[:3]


def test_chain_of_resumes_equals_whole_run() -> None:
    fit: dict[str, Any] = {"checkpoint_period": Batch(4), "validation_period": Epoch(1)}
    whole = run(ExactTrial, **fit)
    second = run(ExactTrial, latest_checkpoint=whole.checkpoints[4], **fit)
    third = run(ExactTrial, latest_checkpoint=second.checkpoints[8], **fit)
    fourth = run(ExactTrial, latest_checkpoint=third.checkpoints[12], **fit)
    check_same_end(third, whole, 8)
    check_same_end(fourth, whole, 12)


def test_periods_count_from_the_start_of_training() -> None:
    first = run(ExactTrial, max_length=Batch(5))
    resumed = run(
        ExactTrial,
        latest_checkpoint=first.checkpoints[5],
        validation_period=Batch(3),
        checkpoint_period=Epoch(1),
        reporting_period=Batch(4),
    )
    validated = [steps for group, steps, _ in resumed.metrics if group == "validation"]
    assert validated == [6, 9, 12, 13]
    assert sorted(resumed.checkpoints) == [6, 12, 13]


def test_finished_run_trains_nothing_and_keeps_its_weights() -> None:
    whole = run(ExactTrial)
    again = run(ExactTrial, latest_checkpoint=whole.checkpoints[LENGTH])
    assert again.log == []
    assert again.metrics == []
    assert again.checkpoints == {}
    assert again.state == whole.state


def test_finished_run_goes_on_with_a_greater_length() -> None:
    whole = run(ExactTrial, max_length=Batch(LENGTH + 3), checkpoint_period=Batch([LENGTH]))
    first = run(ExactTrial)
    longer = run(ExactTrial, max_length=Batch(LENGTH + 3), latest_checkpoint=first.checkpoints[LENGTH])
    assert longer.log == whole.log[LENGTH:]


@pytest.mark.parametrize("form", ["id", "str path", "Path", "relative path"])
def test_checkpoint_may_be_an_id_or_a_path(form: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(ExactTrial, max_length=Batch(5))
    folder = tmp_path / "det-home" / "checkpoints" / first.checkpoints[5]
    monkeypatch.chdir(folder.parent)
    given = {"id": folder.name, "str path": str(folder), "Path": folder, "relative path": f"./{folder.name}"}[form]
    resumed = run(ExactTrial, max_length=Batch(6), latest_checkpoint=given)
    assert [entry[:2] for entry in resumed.log] == [(0, 5)]
    assert resumed.record.source_checkpoint == folder.name
    assert resumed.record.source_steps_completed == 5


def test_checkpoint_may_lie_in_the_current_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(ExactTrial, max_length=Batch(5))
    folder = tmp_path / "det-home" / "checkpoints" / first.checkpoints[5]
    monkeypatch.chdir(folder)
    assert run(ExactTrial, latest_checkpoint=".").record.source_checkpoint == folder.name


PROGRAM = """
import sys
from exactness import ExactTrial, run
from determined.pytorch import Batch
import torch

if __name__ == "__main__":
    torch.set_num_threads(1)
    outcome = run(ExactTrial, checkpoint_period=Batch([5]), latest_checkpoint=sys.argv[1])
    print(repr([outcome.log, outcome.state, outcome.metrics]))
"""


def test_new_process_goes_on_exactly(tmp_path: pathlib.Path) -> None:
    whole = run(ExactTrial, checkpoint_period=Batch([5]))
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command, environment = [sys.executable, str(script)], {**os.environ, "PYTHONPATH": forking.PYTHONPATH}
    done = subprocess.run(
        [*command, whole.checkpoints[5]], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == repr([whole.log[5:], whole.state, whole.after(5)])
