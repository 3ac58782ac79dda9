"""When schedulers step, what is refused, and that every scheduler of torch survives a resume."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import IterableDataset

from cases import every
from determined import errors, pytorch
from trials import LineTrial, assert_resumes_exactly, fit, line_data, state_in, train_and_save, trainer

LRScheduler = pytorch.LRScheduler
Mode = pytorch.LRScheduler.StepMode
AUTOMATIC = [Mode.STEP_EVERY_EPOCH, Mode.STEP_EVERY_BATCH, Mode.STEP_EVERY_OPTIMIZER_STEP]


class Counting(LineTrial):
    """Notes, before each batch and at the end, how often its scheduler has stepped so far."""

    batch_size = 1
    mode = Mode.STEP_EVERY_BATCH
    frequency = 1

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        scheduler = lr_scheduler.LambdaLR(self.optimizer, lambda steps: 1.0 / (steps + 1))
        self.scheduler = context.wrap_lr_scheduler(scheduler, self.mode, self.frequency)
        self.counts: list[int] = []

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.counts.append(self.scheduler.last_epoch)
        return super().train_batch(batch, epoch_idx, batch_idx)

    def steps(self) -> list[int]:
        """Return the number of steps after each batch."""
        ends = [*self.counts[1:], self.scheduler.last_epoch]
        return [after - before for before, after in zip(self.counts, ends, strict=True)]


def counting(mode: Any, frequency: int, epoch_length: int) -> type[Counting]:
    return type("Chosen", (Counting,), {"mode": mode, "frequency": frequency, "samples": epoch_length})


# The rule, told batch by batch


def simulated(mode: Any, frequency: int, aggregation: int, epoch_length: int, batches: int) -> list[int]:
    """Walk through a training and note how many scheduler steps follow each batch."""
    steps, due, optimizer_steps = [], 0, 0
    for number in range(1, batches + 1):
        optimizer_moves = number % aggregation == 0
        if mode is Mode.STEP_EVERY_BATCH and number % frequency == 0:
            due += 1
        if mode is Mode.STEP_EVERY_OPTIMIZER_STEP and optimizer_moves:
            optimizer_steps += 1
            due += optimizer_steps % frequency == 0
        if mode is Mode.STEP_EVERY_EPOCH and optimizer_moves:
            for later in range(number, number + aggregation):  # what is trained before the optimizer moves again
                due += later % epoch_length == 0 and (later // epoch_length) % frequency == 0
        steps.append(due if optimizer_moves else 0)
        due = 0 if optimizer_moves else due
    return steps


@given(
    mode=st.sampled_from(AUTOMATIC),
    frequency=st.integers(1, 5),
    aggregation=st.integers(1, 5),
    epoch_length=st.integers(1, 7),
    batches=st.integers(1, 25),
)
def test_steps_follow_the_rule(mode: Any, frequency: int, aggregation: int, epoch_length: int, batches: int) -> None:
    trial = fit(
        counting(mode, frequency, epoch_length),
        {"aggregation_frequency": aggregation},
        max_length=pytorch.Batch(batches),
    )
    assert trial.steps() == simulated(mode, frequency, aggregation, epoch_length, batches)


@settings(max_examples=15, deadline=None)
@given(
    mode=st.sampled_from(AUTOMATIC),
    frequency=st.integers(1, 3),
    aggregation=st.integers(1, 4),
    epoch_length=st.integers(1, 6),
    stop=st.integers(1, 9),
)
def test_steps_after_a_resume_follow_the_rule(
    mode: Any, frequency: int, aggregation: int, epoch_length: int, stop: int
) -> None:
    init = {"aggregation_frequency": aggregation}
    kind = counting(mode, frequency, epoch_length)
    checkpoint = train_and_save(kind, stop, **init)
    trial = fit(kind, init, max_length=pytorch.Batch(12), latest_checkpoint=checkpoint)
    assert trial.steps() == simulated(mode, frequency, aggregation, epoch_length, 12)[stop:]


@pytest.mark.parametrize(
    ("mode", "frequency", "aggregation", "steps"),
    [
        (Mode.STEP_EVERY_BATCH, 1, 1, [1, 1, 1, 1, 1, 1, 1, 1]),
        (Mode.STEP_EVERY_BATCH, 3, 1, [0, 0, 1, 0, 0, 1, 0, 0]),
        (Mode.STEP_EVERY_BATCH, 1, 2, [0, 2, 0, 2, 0, 2, 0, 2]),
        (Mode.STEP_EVERY_BATCH, 3, 2, [0, 0, 0, 1, 0, 1, 0, 0]),
        (Mode.STEP_EVERY_OPTIMIZER_STEP, 1, 2, [0, 1, 0, 1, 0, 1, 0, 1]),
        (Mode.STEP_EVERY_OPTIMIZER_STEP, 2, 2, [0, 0, 0, 1, 0, 0, 0, 1]),
        (Mode.STEP_EVERY_EPOCH, 1, 1, [0, 0, 1, 0, 0, 1, 0, 0]),
        (Mode.STEP_EVERY_EPOCH, 2, 1, [0, 0, 0, 0, 0, 1, 0, 0]),
        (Mode.STEP_EVERY_EPOCH, 1, 2, [0, 1, 0, 0, 0, 1, 0, 1]),
    ],
)
def test_steps_in_epochs_of_three_batches(mode: Any, frequency: int, aggregation: int, steps: list[int]) -> None:
    init = {"aggregation_frequency": aggregation}
    trial = fit(counting(mode, frequency, 3), init, max_length=pytorch.Batch(8))
    assert trial.steps() == steps


def test_the_loop_leaves_manual_schedulers_alone() -> None:
    assert sum(fit(counting(Mode.MANUAL_STEP, 1, 2), max_length=pytorch.Batch(8)).steps()) == 0


def test_the_optimizer_of_a_batch_uses_the_rate_from_before_it() -> None:
    rates: list[float] = []

    class Rates(Counting):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            rates.append(self.optimizer.param_groups[0]["lr"])
            return super().train_batch(batch, epoch_idx, batch_idx)

    fit(Rates, max_length=pytorch.Batch(4))
    assert rates == [0.05, 0.05 / 2, 0.05 / 3, 0.05 / 4]


def test_schedulers_of_several_optimizers_step_apart() -> None:
    class Two(Counting):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            other = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
            scheduler = lr_scheduler.ExponentialLR(other, 0.5)
            self.slow = context.wrap_lr_scheduler(scheduler, Mode.STEP_EVERY_BATCH, frequency=4)
            self.other = other

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            metrics = super().train_batch(batch, epoch_idx, batch_idx)
            self.context.step_optimizer(self.other)
            return metrics

    trial = fit(Two, max_length=pytorch.Batch(9))
    assert (trial.scheduler.last_epoch, trial.slow.last_epoch) == (9, 2)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from line_data(8)


class WithoutEpochs(Counting):
    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(Endless(), batch_size=2)


def test_epochs_of_data_without_a_length_are_refused() -> None:
    trial = type("Trial", (WithoutEpochs,), {"mode": Mode.STEP_EVERY_EPOCH})
    with pytest.raises(errors.InvalidExperimentException, match=r"STEP_EVERY_EPOCH.*no length.*STEP_EVERY_BATCH"):
        fit(trial)


def test_batches_of_data_without_a_length_are_steps() -> None:
    assert fit(WithoutEpochs).steps() == [1] * 6


# The wrapper


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0, momentum=0.9)


def a_scheduler() -> lr_scheduler.LRScheduler:
    return lr_scheduler.StepLR(an_optimizer(), step_size=1, gamma=0.5)


def test_modes_have_the_values_that_programs_know() -> None:
    assert {mode.name: mode.value for mode in Mode} == {
        "STEP_EVERY_EPOCH": 1,
        "STEP_EVERY_BATCH": 2,
        "MANUAL_STEP": 3,
        "STEP_EVERY_OPTIMIZER_STEP": 4,
    }


@pytest.mark.parametrize("mode", ["STEP_EVERY_BATCH", 2, None])
def test_a_mode_of_another_type_is_refused(mode: Any) -> None:
    with pytest.raises(TypeError, match=rf"step_mode={mode!r}.*LRScheduler\.StepMode"):
        LRScheduler(a_scheduler(), mode)


@pytest.mark.parametrize("frequency", [0, -1, 1.5, True, "2", None])
def test_a_frequency_that_is_no_count_is_refused(frequency: Any) -> None:
    with pytest.raises(ValueError, match=rf"frequency={frequency!r}.*at least 1"):
        LRScheduler(a_scheduler(), Mode.STEP_EVERY_BATCH, frequency)


def test_something_that_cannot_step_is_refused() -> None:
    with pytest.raises(TypeError, match="step"):
        LRScheduler(object(), Mode.STEP_EVERY_BATCH)


def test_step_moves_the_scheduler() -> None:
    scheduler = a_scheduler()
    scheduler.optimizer.step()
    LRScheduler(scheduler, Mode.MANUAL_STEP).step()
    assert scheduler.get_last_lr() == [0.5]


def test_get_last_lr_is_that_of_the_scheduler() -> None:
    assert LRScheduler(a_scheduler(), Mode.MANUAL_STEP).get_last_lr() == [1.0]


def test_the_state_goes_into_another_scheduler() -> None:
    scheduler = a_scheduler()
    scheduler.optimizer.step()
    first = LRScheduler(scheduler, Mode.MANUAL_STEP)
    first.step()
    second = LRScheduler(a_scheduler(), Mode.MANUAL_STEP)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.get_last_lr() == [0.5]


def test_wrapping_returns_the_scheduler_given() -> None:
    with trainer() as (_, trial):
        scheduler = lr_scheduler.ExponentialLR(trial.optimizer, 0.9)
        assert trial.context.wrap_lr_scheduler(scheduler, Mode.MANUAL_STEP) is scheduler


def test_the_context_lists_wrapped_schedulers() -> None:
    with trainer() as (_, trial):
        scheduler = lr_scheduler.ExponentialLR(trial.optimizer, 0.9)
        trial.context.wrap_lr_scheduler(scheduler, Mode.STEP_EVERY_BATCH, frequency=3)
        (wrapped,) = trial.context.lr_schedulers
        assert isinstance(wrapped, LRScheduler)
        assert (wrapped.step_mode, wrapped.frequency) == (Mode.STEP_EVERY_BATCH, 3)


def test_a_scheduler_of_an_unwrapped_optimizer_is_refused() -> None:
    with trainer() as (_, trial):
        with pytest.raises(errors.InvalidExperimentException, match=r"StepLR.*not wrapped.*wrap_optimizer"):
            trial.context.wrap_lr_scheduler(a_scheduler(), Mode.STEP_EVERY_BATCH)
        assert trial.context.lr_schedulers == []


class OfItsOwn:
    """A scheduler that is not one of torch, and tells nobody which optimizer it schedules."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}


def test_a_scheduler_without_an_optimizer_is_stepped() -> None:
    scheduler = OfItsOwn()

    class Variant(LineTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            context.wrap_lr_scheduler(scheduler, Mode.STEP_EVERY_BATCH)

    fit(Variant, max_length=pytorch.Batch(4))
    assert scheduler.steps == 4


@pytest.mark.parametrize("mode", AUTOMATIC)
def test_the_loop_cannot_step_a_plateau_scheduler(mode: Any) -> None:
    with trainer() as (_, trial):
        plateau = lr_scheduler.ReduceLROnPlateau(trial.optimizer)
        with pytest.raises(errors.InvalidExperimentException, match="MANUAL_STEP") as caught:
            trial.context.wrap_lr_scheduler(plateau, mode)
        assert "on_validation_end" in str(caught.value)


class OnPlateau(LineTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        plateau = lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0, mode="max")
        self.plateau = context.wrap_lr_scheduler(plateau, Mode.MANUAL_STEP)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        plateau = self.plateau

        class StepOnPlateau(pytorch.PyTorchCallback):
            def on_validation_end(self, metrics: dict[str, Any]) -> None:
                plateau.step(metrics["validation_loss"])

        return {"plateau": StepOnPlateau()}


def test_a_callback_steps_a_plateau_scheduler() -> None:
    # The loss falls, which a scheduler that wants it to rise takes for two bad validations of three.
    trial = fit(OnPlateau, validation_period=pytorch.Batch(2))
    assert trial.optimizer.param_groups[0]["lr"] == 0.05 / 4


# Every scheduler of torch

SCHEDULERS: dict[type, Callable[[torch.optim.Optimizer], Any]] = {
    lr_scheduler.LambdaLR: lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    lr_scheduler.MultiplicativeLR: lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    lr_scheduler.StepLR: lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    lr_scheduler.MultiStepLR: lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 7], 0.5),
    lr_scheduler.ConstantLR: lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=6),
    lr_scheduler.LinearLR: lambda o: lr_scheduler.LinearLR(o, 0.2, total_iters=7),
    lr_scheduler.ExponentialLR: lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    lr_scheduler.PolynomialLR: lambda o: lr_scheduler.PolynomialLR(o, total_iters=8, power=2.0),
    lr_scheduler.CosineAnnealingLR: lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6),
    lr_scheduler.CosineAnnealingWarmRestarts: lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
    lr_scheduler.CyclicLR: lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    lr_scheduler.OneCycleLR: lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
    lr_scheduler.SequentialLR: lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.8)], milestones=[4]
    ),
    lr_scheduler.ChainedScheduler: lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.MultiStepLR(o, [3, 6])], o
    ),
    lr_scheduler.ReduceLROnPlateau: lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
    swa_utils.SWALR: lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=6),
}


class AnyScheduler(LineTrial):
    make: Any = None

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        torch.manual_seed(11)
        self.model = context.wrap_model(self.make_model())
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9))
        scheduler = type(self).make(self.optimizer)
        self.is_plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        mode = Mode.MANUAL_STEP if self.is_plateau else Mode.STEP_EVERY_BATCH
        self.scheduler = context.wrap_lr_scheduler(scheduler, mode)
        self.seen = []

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        if self.is_plateau:
            self.scheduler.step(metrics["loss"].item())
        return metrics


def test_all_schedulers_of_torch_are_tried() -> None:
    classes = {value for value in vars(lr_scheduler).values() if inspect.isclass(value)}
    base = lr_scheduler.LRScheduler
    schedulers = {c for c in classes if issubclass(c, base) and c not in (base, lr_scheduler._LRScheduler)}
    assert schedulers | {swa_utils.SWALR} == SCHEDULERS.keys()


@pytest.mark.parametrize("kind", every(4, SCHEDULERS), ids=lambda kind: kind.__name__)
def test_a_scheduler_resumes_exactly(kind: type) -> None:
    assert_resumes_exactly(type("Trial", (AnyScheduler,), {"make": staticmethod(SCHEDULERS[kind])}), 5, 11)


@pytest.mark.parametrize("kind", SCHEDULERS, ids=lambda kind: kind.__name__)
def test_a_checkpoint_holds_the_state_of_the_scheduler(kind: type) -> None:
    trial_class = type("Trial", (AnyScheduler,), {"make": staticmethod(SCHEDULERS[kind])})
    (state,) = state_in(train_and_save(trial_class, 3))["lr_schedulers_state_dict"]
    trial = fit(trial_class, max_length=pytorch.Batch(3))
    assert state == trial.scheduler.state_dict()


def test_the_rates_of_a_resumed_run_are_those_of_one_without_a_break() -> None:
    one_cycle = type("Trial", (AnyScheduler,), {"make": staticmethod(SCHEDULERS[lr_scheduler.OneCycleLR])})
    checkpoint = train_and_save(one_cycle, 7)
    resumed = fit(one_cycle, max_length=pytorch.Batch(8), latest_checkpoint=checkpoint)
    whole = fit(one_cycle, max_length=pytorch.Batch(8))
    rates = functools.partial(map, lambda group: (group["lr"], group["momentum"]))
    assert list(rates(resumed.optimizer.param_groups)) == list(rates(whole.optimizer.param_groups))
