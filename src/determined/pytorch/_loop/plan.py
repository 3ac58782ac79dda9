"""When to act: units of training, and which action is due now."""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Collection, Container, Mapping
from typing import Any

from determined.pytorch._loop.progress import Epochs, Progress


class TrainUnit:
    """A number of batches or epochs, as a period or as a schedule.

    An int is a period: `Batch(100)` means every 100 batches. A container is a schedule of exact points:
    `Batch([5, 30])`, or `Batch(5, 30)`.
    """

    def __init__(self, value: int | Container[int], *more: int) -> None:
        self.value: int | Container[int] = _checked(type(self).__name__, [value, *more] if more else value)

    def should_stop(self, step_num: int) -> bool:
        """Return whether step `step_num` is one of these: divisible by the period, or in the schedule."""
        if isinstance(self.value, int):
            return self.value < 1 or (step_num > 0 and step_num % self.value == 0)
        return step_num in self.value

    def next_after(self, step_num: int) -> int:
        """Return the first step after `step_num` that can be one of these."""
        if isinstance(self.value, int):
            return step_num + 1 if self.value < 1 else (step_num // self.value + 1) * self.value
        if isinstance(self.value, Collection) and not isinstance(self.value, range):
            return min((step for step in self.value if step > step_num), default=NEVER)
        return step_num + 1  # ranges and bare containers can only be asked step by step

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TrainUnit):
            return NotImplemented
        return type(self) is type(other) and self.value == other.value

    def __hash__(self) -> int:
        # Schedules may be lists, which have no hash: all schedules of a class share one.
        return hash((type(self), self.value if isinstance(self.value, int) else None))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"


class Batch(TrainUnit):
    """Counts batches: `Batch(100)`."""


class Epoch(TrainUnit):
    """Counts epochs, which end with the last batch of the training loader: `Epoch(3)`."""


class TrainBoundaryType(enum.Enum):
    """What the loop does between batches."""

    CHECKPOINT = "CHECKPOINT"
    REPORT = "REPORT"
    VALIDATE = "VALIDATE"
    TRAIN = "TRAIN"


_IN_ORDER = (TrainBoundaryType.REPORT, TrainBoundaryType.VALIDATE, TrainBoundaryType.CHECKPOINT)
"""Actions in the order in which those that fall on one batch must run."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrainBoundary:
    """An action and when it is due."""

    step_type: TrainBoundaryType
    unit: TrainUnit


class ShouldExit(Exception):  # the name is the API's
    """Raised, also by user code, to leave the training loop; a checkpoint is saved unless `skip_exit_checkpoint`."""

    def __init__(self, skip_exit_checkpoint: bool = False) -> None:
        super().__init__("training was asked to stop")
        self.skip_exit_checkpoint = skip_exit_checkpoint


class Stopped(ShouldExit):
    """Raised by the loop itself when it was asked to stop, on all ranks alike."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """When to act. Pure arithmetic: no torch, no clock, no flags to reset."""

    length: TrainUnit
    every: Mapping[TrainBoundaryType, TrainUnit]  # in the order in which actions must run
    epochs: Epochs

    def __post_init__(self) -> None:
        units = (self.length, *self.every.values())
        if self.epochs.length is None and (epochs := [unit for unit in units if isinstance(unit, Epoch)]):
            raise ValueError(
                f"{epochs[0]!r} counts epochs, but the training data loader has no length, so an epoch "
                "never ends; use pytorch.Batch instead, or give the data a __len__ method."
            )

    def finished(self, progress: Progress) -> bool:
        """Return whether training has reached its length."""
        return progress.batches_trained >= self.total_batches

    def due(self, progress: Progress) -> list[TrainBoundaryType]:
        """Return what must be done now, after a batch, in order; after the last batch, all of it."""
        return list(_IN_ORDER) if self.finished(progress) else self._periodic(progress)

    def is_extra(self, action: TrainBoundaryType, progress: Progress) -> bool:
        """Return whether an action comes now only because training ends here: a longer one would not do it.

        Random numbers that such an action draws do not affect the training.
        """
        periodic = self._periodic(progress)
        # Any action that is due ends a window of metrics, which is reported.
        return not periodic if action is TrainBoundaryType.REPORT else action not in periodic

    def _periodic(self, progress: Progress) -> list[TrainBoundaryType]:
        return [action for action, unit in self.every.items() if self._is_due(unit, progress.batches_trained)]

    def next_stop(self, progress: Progress) -> int:
        """Return the number of batches at which something can be due next, or the epoch ends."""
        now = progress.batches_trained
        stops = [self._next(unit, now) for unit in self.every.values()]
        epoch_end = NEVER if self.epochs.length is None else self.epochs.end_of(self.epochs.of(now) + 1)
        return min([self.total_batches, epoch_end, *stops])

    @property
    def total_batches(self) -> int:
        """The length in batches."""
        assert isinstance(self.length.value, int)
        return self.epochs.end_of(self.length.value) if isinstance(self.length, Epoch) else self.length.value

    def _is_due(self, unit: TrainUnit, batches: int) -> bool:
        if not isinstance(unit, Epoch):
            return unit.should_stop(batches)
        # More than one if a single batch of all ranks is more than a pass over the data.
        completed = range(self.epochs.of(batches - 1) + 1, self.epochs.of(batches) + 1)
        return any(unit.should_stop(epochs) for epochs in completed)

    def _next(self, unit: TrainUnit, batches: int) -> int:
        if not isinstance(unit, Epoch):
            return unit.next_after(batches)
        return self.epochs.end_of(unit.next_after(self.epochs.of(batches)))


NEVER = 2**62


def _checked(kind: str, value: Any) -> int | Container[int]:
    """Return a period or a schedule with Python ints for integers of other libraries; else raise `TypeError`."""
    if not isinstance(value, Container) or isinstance(value, (str, bytes)):
        period = _integer(value)
        if period is None:
            raise TypeError(
                f"{kind}({value!r}) takes an integer as a period, such as {kind}(100), or a container of integers as a "
                f"schedule, such as {kind}([5, 30])."
            )
        return period
    if not isinstance(value, Collection) or isinstance(value, range):
        return value
    steps = [_integer(step) for step in value]
    for step, integer in zip(value, steps, strict=True):
        if integer is None:
            raise TypeError(f"{kind}({value!r}) holds {step!r}; a schedule holds integers.")
    return value if all(isinstance(step, int) for step in value) else [step for step in steps if step is not None]


def _integer(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
