"""What hooks, `train_batch` and `evaluate_batch` see: modes of the models, gradients, and where training is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trials
from determined import errors, pytorch
from determined.pytorch import Batch, Epoch

HOOKS = [name for name in vars(pytorch.PyTorchCallback) if name.startswith("on_") and name != "on_checkpoint_end"]
View = tuple[str, bool, bool, Any]
"""Where, models in training mode, gradients on, and (batch, epoch, is start, is end) or "none yet"."""


class Watcher(pytorch.PyTorchCallback):
    """Looks around in every hook."""

    def __init__(self, look: Callable[[str], None]) -> None:
        self.look = look


def looking(hook: str) -> Callable[..., None]:
    return lambda self, *_: self.look(hook)


for name in HOOKS:
    setattr(Watcher, name, looking(name))


class WatchedTrial(trials.LineTrial):
    """Two batches an epoch, one validation batch."""

    samples = 8

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.views: list[View] = []

    def look(self, where: str) -> None:
        context = self.context
        try:
            place: Any = (
                context.current_train_batch(),
                context.current_train_epoch(),
                context.is_epoch_start(),
                context.is_epoch_end(),
            )
        except errors.InternalException:
            place = "none yet"
        self.views.append((where, self.model.training, torch.is_grad_enabled(), place))

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"watcher": Watcher(self.look)}

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(trials.line_data(4), batch_size=4)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.look("train_batch")
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.look("evaluate_batch")
        return super().evaluate_batch(batch, batch_idx)


VALIDATION = ["validation_start", "validation_epoch_start", "evaluate_batch", "validation_epoch_end", "validation_end"]
CHECKPOINT = ["checkpoint_save_start", "checkpoint_write_end", "checkpoint_upload_end"]


def views(wheres: list[str], training: bool, gradients: bool, place: Any) -> list[View]:
    own = ("train_batch", "evaluate_batch")
    return [(where if where in own else f"on_{where}", training, gradients, place) for where in wheres]


def epoch(index: int) -> list[View]:
    """The views of an epoch at whose end everything is due."""
    first, last = (2 * index, index, True, False), (2 * index + 1, index, False, True)
    return [
        *views(["training_epoch_start", "train_batch"], True, True, first),
        *views(["train_batch", "training_epoch_end", "training_workload_end"], True, True, last),
        *views([*VALIDATION, *CHECKPOINT], False, False, last),
    ]


BEGINNING = views(["trial_startup", "training_start"], True, True, "none yet")


def test_every_hook_sees_the_batch_just_trained_and_validations_evaluate() -> None:
    trial = trials.fit(WatchedTrial, max_length=Epoch(2), validation_period=Epoch(1), checkpoint_period=Epoch(1))
    shutdown = views(["trial_shutdown"], False, True, (3, 1, False, True))
    assert trial.views == [*BEGINNING, *epoch(0), *epoch(1), *shutdown]


def test_a_checkpoint_without_a_validation_finds_models_training() -> None:
    trial = trials.fit(WatchedTrial, max_length=Batch(2), checkpoint_period=Batch(1))
    place = (0, 0, True, False)
    first = views(["training_epoch_start", "train_batch", "training_workload_end", *CHECKPOINT], True, True, place)
    assert trial.views[2 : 2 + len(first)] == first


def test_a_validation_before_training_is_told_of_the_first_batch() -> None:
    trial = trials.fit(WatchedTrial, max_length=Batch(1), step_zero_validation=True, checkpoint_policy="all")
    expected = [*BEGINNING, *views([*VALIDATION, *CHECKPOINT], False, False, (0, 0, True, False))]
    assert trial.views[: len(expected)] == expected


def test_a_resumed_run_sees_the_last_batch_before_its_own_first() -> None:
    trials.fit(WatchedTrial, max_length=Batch(2))
    resumed = trials.fit(WatchedTrial, max_length=Batch(3), latest_checkpoint=trials.latest_checkpoint())
    last = (1, 0, False, True)
    assert resumed.views[:4] == [
        *views(["trial_startup", "checkpoint_load_start"], True, True, "none yet"),
        *views(["training_start"], True, True, last),
        *views(["training_epoch_start"], True, True, (2, 1, True, False)),
    ]


def test_gradients_are_on_after_fit() -> None:
    trials.fit(WatchedTrial, max_length=Batch(1))
    assert torch.is_grad_enabled()


class Frozen(trials.LineTrial):
    """Keeps its batch norm in evaluation mode from the first batch on."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == 0:
            self.model[1].eval()
        self.modes = [part.training for part in self.model]
        return super().train_batch(batch, epoch_idx, batch_idx)


def test_modes_that_a_trial_chose_outlast_reports_and_checkpoints() -> None:
    trial = trials.fit(Frozen, max_length=Batch(3), reporting_period=Batch(1), checkpoint_period=Batch(2))
    assert trial.modes == [True, False, True]


class UnendingTrial(WatchedTrial):
    """Its validation does not come to its end."""

    failure: Exception | None = None

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        self.context.set_stop_requested(True)
        return super().evaluate_batch(batch, batch_idx)


def test_models_train_again_after_a_validation_that_was_stopped() -> None:
    trial = trials.fit(UnendingTrial, max_length=Batch(4), validation_period=Batch(1))
    place = (0, 0, True, False)
    assert trial.views[-4:] == views([*CHECKPOINT, "trial_shutdown"], True, True, place)
    assert trial.model.training


def test_models_train_again_after_a_validation_that_failed() -> None:
    class Failing(UnendingTrial):
        failure = RuntimeError("as asked")

    kept: list[WatchedTrial] = []
    with pytest.raises(RuntimeError, match="as asked"), trials.trainer(Failing) as (trainer, trial):  # noqa: PT012
        kept.append(trial)
        trainer.fit(max_length=Batch(4), validation_period=Batch(1))
    assert kept[0].model.training
    assert torch.is_grad_enabled()


class CountingTrial(WatchedTrial):
    """Adds to reducers in every hook, and keeps what they got."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.trained: list[list[str]] = []
        self.validated: list[list[str]] = []
        self.reducers = [
            context.wrap_reducer(self.counter(self.trained), "trained", for_validation=False),
            context.wrap_reducer(self.counter(self.validated), "validated", for_training=False),
        ]

    def counter(self, results: list[list[str]]) -> Callable[[list[str]], int]:
        def count(values: list[str]) -> int:
            results.append(values)
            return len(values)

        return count

    def look(self, where: str) -> None:
        for reducer in self.reducers:
            reducer.update(where.removeprefix("on_"))


def test_reducer_updates_in_hooks_count_for_the_result_computed_next() -> None:
    trial = trials.fit(CountingTrial, max_length=Epoch(2), validation_period=Epoch(1), checkpoint_period=Epoch(1))
    assert trial.trained == [["training_epoch_start", "train_batch", "train_batch", "training_epoch_end"]] * 2
    assert trial.validated == [VALIDATION[:-1]] * 2
