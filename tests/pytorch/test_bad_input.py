"""Mistakes in calls: each with its exception type, a message of value, rule and remedy, before training."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from determined import errors, pytorch
from determined.pytorch import Batch, Epoch, PyTorchTrialContext
from mistakes import LineTrial, Mistake, Mistakes, Unsized, check, in_context, linear, train, variant, with_setup

Mode = pytorch.LRScheduler.StepMode
mistake = Mistakes()


# Lengths and periods


@mistake(TypeError, "max_length=100", "not a training length", "pytorch.Batch(500)", "pytorch.Epoch(3)")
def length_as_bare_number() -> None:
    train(max_length=100)


@mistake(TypeError, "max_length='3 epochs'", "not a training length", "pytorch.Epoch(3)")
def length_as_text() -> None:
    train(max_length="3 epochs")


@mistake(ValueError, "needs max_length", "fit(max_length=pytorch.Epoch(3))")
def no_length() -> None:
    train(max_length=None)


@mistake(TypeError, "Batch([5, 30])", "schedule", "one number", "Batch(500)")
def length_as_schedule() -> None:
    train(max_length=Batch([5, 30]))


@mistake(ValueError, "Epoch(0)", "trains nothing", "at least 1")
def length_of_nothing() -> None:
    train(max_length=Epoch(0))


@mistake(ValueError, "Batch(-5)", "trains nothing", "at least 1")
def negative_length() -> None:
    train(max_length=Batch(-5))


@mistake(TypeError, "TrainUnit(5)", "not a training length", "pytorch.Batch(500)")
def length_of_no_kind() -> None:
    train(max_length=pytorch.TrainUnit(5))


@mistake(TypeError, "validation_period=10", "not a period", "pytorch.Batch(100)")
def validation_period_as_bare_number() -> None:
    train(validation_period=10)


@mistake(TypeError, "checkpoint_period='1 epoch'", "not a period", "pytorch.Epoch(1)")
def checkpoint_period_as_text() -> None:
    train(checkpoint_period="1 epoch")


@mistake(TypeError, "reporting_period=None", "not a period", "pytorch.Batch(100)")
def no_reporting_period() -> None:
    train(reporting_period=None)


@mistake(TypeError, "Batch(nan)", "integer", "Batch(100)", "Batch([5, 30])")
def period_of_nan() -> None:
    train(validation_period=Batch(math.nan))  # type: ignore[arg-type]


@mistake(TypeError, "Epoch(True)", "integer", "Epoch(100)")
def period_of_bool() -> None:
    train(validation_period=Epoch(True))


@mistake(TypeError, "Batch([1, 2.5])", "holds 2.5", "integers")
def schedule_of_fractions() -> None:
    train(validation_period=Batch([1, 2.5]))  # type: ignore[list-item]


def unsized(self: Any) -> pytorch.DataLoader:
    return pytorch.DataLoader(Unsized(), batch_size=4)


@mistake(ValueError, "Epoch(3)", "no length", "use pytorch.Batch", "__len__")
def epochs_of_data_without_length() -> None:
    train(variant(build_training_data_loader=unsized), max_length=Epoch(3))


@mistake(ValueError, "Epoch(1)", "no length", "use pytorch.Batch")
def epoch_period_of_data_without_length() -> None:
    train(variant(build_training_data_loader=unsized), validation_period=Epoch(1))


# Other arguments of fit


@mistake(ValueError, "'latest'", "policies are", "'best', 'all', 'none'")
def unknown_policy() -> None:
    train(checkpoint_policy="latest")


@mistake(errors.InvalidCheckpointException, "'no-such-id'", "no checkpoint", "det checkpoint list")
def unknown_checkpoint_id() -> None:
    train(latest_checkpoint="no-such-id")


@mistake(FileNotFoundError, "nothing at", "/nowhere/at-all", "folder of a checkpoint", "det checkpoint list")
def checkpoint_path_of_nothing() -> None:
    train(latest_checkpoint="/nowhere/at-all")


@mistake(errors.InvalidCheckpointException, "a file, not a folder", "pass the folder of a checkpoint")
def checkpoint_path_of_a_file() -> None:
    train(latest_checkpoint=__file__)


@mistake(errors.InvalidCheckpointException, "not a complete checkpoint", "manifest.json")
def checkpoint_path_of_some_folder() -> None:
    train(latest_checkpoint=pathlib.Path(__file__).parent)


@mistake(errors.InvalidCheckpointException, "'my checkpoint'", "not a checkpoint id", "det checkpoint list")
def checkpoint_id_that_can_be_none() -> None:
    train(latest_checkpoint="my checkpoint")


@mistake(TypeError, "latest_checkpoint=5", "id of a checkpoint or the path")
def checkpoint_as_number() -> None:
    train(latest_checkpoint=5)


@mistake(ValueError, "latest_checkpoint=''", "id of a checkpoint", "None to start afresh")
def empty_checkpoint() -> None:
    train(latest_checkpoint="")


@mistake(TypeError, "test_mode='yes'", "pass True or False")
def asked_for_test_mode_in_words() -> None:
    train(test_mode="yes")


@mistake(TypeError, "step_zero_validation=1", "pass True or False")
def step_zero_validation_as_number() -> None:
    train(step_zero_validation=1)


@mistake(TypeError, "best_metric=['loss']", "name of a validation metric")
def best_metric_as_list() -> None:
    train(best_metric=["loss"])


# init


@mistake(ValueError, "aggregation_frequency=0", "at least 1", "1 steps on every batch")
def no_aggregation() -> None:
    train(init={"aggregation_frequency": 0})


@mistake(ValueError, "aggregation_frequency=True", "int of at least 1")
def aggregation_as_bool() -> None:
    train(init={"aggregation_frequency": True})


@mistake(ValueError, "aggregation_frequency='2'", "int of at least 1")
def aggregation_as_text() -> None:
    train(init={"aggregation_frequency": "2"})


@mistake(TypeError, "hparams=['lr']", "pass a dict", "leave it out")
def hparams_as_list() -> None:
    train(init={"hparams": ["lr"]})


@mistake(TypeError, "exp_conf='experiment.yaml'", "pass a dict", "leave it out")
def config_as_file_name() -> None:
    train(init={"exp_conf": "experiment.yaml"})


@mistake(ValueError, "experiment_seed", "-1", "int from 0 to 2**32 - 1")
def negative_seed() -> None:
    train(init={"exp_conf": {"reproducibility": {"experiment_seed": -1}}})


@mistake(ValueError, "experiment_seed", "'lucky'", "int from 0 to 2**32 - 1")
def seed_as_text() -> None:
    train(init={"exp_conf": {"reproducibility": {"experiment_seed": "lucky"}}})


@mistake(TypeError, "distributed=4", "core.DistributedContext", "leave it out")
def distributed_as_number() -> None:
    train(init={"distributed": 4})


@mistake(errors.StorageException, "'floppy'", "shared_fs", "leave checkpoint_storage out")
def unknown_storage() -> None:
    train(init={"exp_conf": {"checkpoint_storage": {"type": "floppy"}}})


# The trial


def bare(self: Any, context: PyTorchTrialContext) -> None:
    self.context = context


@mistake(errors.InvalidExperimentException, "Variant wraps no model", "context.wrap_model()")
def no_wrapped_model() -> None:
    train(variant(__init__=bare))


def model_only(self: Any, context: PyTorchTrialContext) -> None:
    context.wrap_model(nn.Linear(1, 1))


@mistake(errors.InvalidExperimentException, "Variant wraps no optimizer", "context.wrap_optimizer()")
def no_wrapped_optimizer() -> None:
    train(variant(__init__=model_only))


def whole(self: Any, data_loader: Any) -> Any:
    return {"validation_loss": 1.0}


@mistake(errors.InvalidExperimentException, "Variant overrides both", "override exactly one")
def both_evaluate_methods() -> None:
    train(variant(evaluate_full_dataset=whole))


@mistake(errors.InvalidExperimentException, "Variant overrides neither", "override exactly one")
def neither_evaluate_method() -> None:
    train(variant(evaluate_batch=pytorch.PyTorchTrial.evaluate_batch))


@mistake(TypeError, "trial=", "LineTrial", "instance of a subclass of pytorch.PyTorchTrial")
def trial_class_for_trial() -> None:
    in_context(lambda context: pytorch.Trainer(LineTrial, context))  # type: ignore[arg-type]


@mistake(TypeError, "context=None", "with pytorch.init() as context:")
def trainer_without_context() -> None:
    in_context(lambda context: pytorch.Trainer(LineTrial(context), None))  # type: ignore[arg-type]


# Wrapping


@mistake(TypeError, "wrap_model('resnet')", "torch.nn.Module")
def model_as_text() -> None:
    in_context(lambda context: context.wrap_model("resnet"))  # type: ignore[arg-type]


@mistake(TypeError, "wrap_optimizer('adam')", "torch.optim.Optimizer")
def optimizer_as_text() -> None:
    in_context(lambda context: context.wrap_optimizer("adam"))  # type: ignore[arg-type]


@mistake(ValueError, "backward_passes_per_step=0", "use 1 or more")
def no_backward_pass_per_step() -> None:
    in_context(lambda context: context.wrap_optimizer(linear()[1], backward_passes_per_step=0))


@mistake(errors.InvalidExperimentException, "StepLR", "not wrapped", "context.wrap_optimizer()")
def scheduler_of_unwrapped_optimizer() -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(linear()[1], 1)
    in_context(lambda context: context.wrap_lr_scheduler(scheduler, Mode.STEP_EVERY_BATCH))


def wrap_scheduler(make: Callable[[Any], Any], mode: Any, frequency: Any = 1) -> None:
    def act(trial: Any, context: PyTorchTrialContext) -> None:
        context.wrap_lr_scheduler(make(trial.optimizer), mode, frequency)

    train(with_setup(act))


def step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


@mistake(errors.InvalidExperimentException, "STEP_EVERY_EPOCH", "MANUAL_STEP", "def on_validation_end", "metric")
def plateau_scheduler_stepped_by_the_loop() -> None:
    wrap_scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau, Mode.STEP_EVERY_EPOCH)


@mistake(TypeError, "step_mode=2", "LRScheduler.StepMode", "LRScheduler.StepMode.STEP_EVERY_EPOCH")
def step_mode_as_number() -> None:
    wrap_scheduler(step_lr, 2)


@mistake(ValueError, "frequency=-1", "at least 1", "1 steps every time")
def negative_frequency() -> None:
    wrap_scheduler(step_lr, Mode.STEP_EVERY_BATCH, -1)


@mistake(ValueError, "frequency=0.5", "int of at least 1")
def frequency_of_a_half() -> None:
    wrap_scheduler(step_lr, Mode.STEP_EVERY_BATCH, 0.5)


@mistake(TypeError, "has no step()", "torch.optim.lr_scheduler")
def scheduler_that_is_none() -> None:
    wrap_scheduler(lambda optimizer: 0.1, Mode.STEP_EVERY_BATCH)


@mistake(errors.InvalidExperimentException, "wrap_scaler()", "before any model")
def scaler_after_model() -> None:
    train(with_setup(lambda trial, context: context.wrap_scaler(torch.amp.GradScaler("cpu"))))


def two_scalers(context: PyTorchTrialContext) -> None:
    context.wrap_scaler(torch.amp.GradScaler("cpu"))
    context.wrap_scaler(torch.amp.GradScaler("cpu"))


@mistake(errors.InvalidExperimentException, "wrap_scaler", "one kind of mixed precision", "Remove one")
def two_wrapped_scalers() -> None:
    in_context(two_scalers)


def scaler_and_amp(context: PyTorchTrialContext) -> None:
    context.wrap_scaler(torch.amp.GradScaler("cpu"))
    context.experimental.use_amp()


@mistake(errors.InvalidExperimentException, "use_amp", "wrap_scaler", "one kind of mixed precision", "Remove one")
def two_kinds_of_precision() -> None:
    in_context(scaler_and_amp)


@mistake(errors.InvalidExperimentException, "torch.float64", "torch.float16 or torch.bfloat16")
def amp_in_double_precision() -> None:
    in_context(lambda context: context.experimental.use_amp(torch.float64))


@mistake(errors.InvalidExperimentException, "'O9'", "O1")
def unknown_apex_level() -> None:
    train(with_setup(lambda trial, context: context.configure_apex_amp(trial.model, trial.optimizer, opt_level="O9")))


@mistake(errors.InvalidExperimentException, "Linear", "not wrapped", "wrap_model()")
def apex_of_an_unwrapped_model() -> None:
    train(with_setup(lambda trial, context: context.configure_apex_amp(nn.Linear(1, 1), trial.optimizer)))


def keep_gradients(self: Any, batch: Any, epoch_idx: int, batch_idx: int) -> None:
    self.context.backward(self.loss(batch))
    self.context.step_optimizer(self.optimizer, auto_zero_grads=False)


@mistake(errors.InvalidExperimentException, "auto_zero_grads=False", "aggregation_frequency=2", "Leave it at True")
def kept_gradients_with_aggregation() -> None:
    train(variant(train_batch=keep_gradients), init={"aggregation_frequency": 2})


def step_another(self: Any, batch: Any, epoch_idx: int, batch_idx: int) -> None:
    self.context.step_optimizer(linear()[1])


@mistake(errors.InvalidExperimentException, "SGD", "not wrapped", "context.wrap_optimizer()")
def step_of_an_unwrapped_optimizer() -> None:
    train(variant(train_batch=step_another))


@pytest.mark.parametrize(("make", "error", "words", "trains"), mistake)
def test_mistake(make: Mistake, error: type[Exception], words: tuple[str, ...], trains: bool) -> None:
    check(make, error, words, trains)


def test_there_are_enough_of_them() -> None:
    assert len({row.id for row in mistake}) >= 40
