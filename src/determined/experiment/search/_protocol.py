"""What a runner and a search tell each other: events to the search, operations from it."""

from __future__ import annotations

import abc
import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any


class ExitReason(enum.Enum):
    """Why a trial ended."""

    COMPLETED = "COMPLETED"  # by itself, or because it was stopped
    ERROR = "ERROR"
    INVALID_HP = "INVALID_HP"
    CANCELED = "CANCELED"  # by a person


class Event(abc.ABC):
    """Something that happened: `Began`, `Validated` or `Exited`."""

    __slots__ = ()

    @abc.abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the event as a JSON object, which `Event.from_json` reads."""

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Event:
        """Return the event that `to_json` wrote."""
        match data["type"]:
            case "began":
                return Began()
            case "validated":
                time = data["time"]
                return Validated(data["request_id"], float(data["metric"]), None if time is None else float(time))
            case _:
                return Exited(data["request_id"], ExitReason(data["reason"]))


@dataclasses.dataclass(frozen=True, slots=True)
class Began(Event):
    """The experiment begins; the first event, and the only one of its kind."""

    def to_json(self) -> dict[str, Any]:
        """Return the event as a JSON object."""
        return {"type": "began"}


@dataclasses.dataclass(frozen=True, slots=True)
class Validated(Event):
    """A trial reported validation metrics.

    `metric` is the searcher's metric, NaN if it is not a number. `time` is the searcher's `time_metric`, None if there
    is no such metric.
    """

    request_id: str
    metric: float
    time: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the event as a JSON object."""
        time = None if self.time is None else json_number(self.time)
        return {"type": "validated", "request_id": self.request_id, "metric": json_number(self.metric), "time": time}


@dataclasses.dataclass(frozen=True, slots=True)
class Exited(Event):
    """A trial has ended for good: there will be no further run of it."""

    request_id: str
    reason: ExitReason

    def to_json(self) -> dict[str, Any]:
        """Return the event as a JSON object."""
        return {"type": "exited", "request_id": self.request_id, "reason": self.reason.value}


class Operation:
    """Something that the runner is asked to do: a `Create`, a `Stop` or a `Shutdown`."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Create(Operation):
    """Start a trial with these hyperparameters."""

    request_id: str
    hparams: dict[str, Any]
    seed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Stop(Operation):
    """End a trial early; it keeps its results."""

    request_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Shutdown(Operation):
    """End the experiment: every requested trial has ended.

    `failed` means that all of them failed, `canceled` that all of them were canceled.
    """

    failed: bool = False
    canceled: bool = False


def json_number(number: float) -> float | str:
    """Return the number as JSON, which has no infinities and no NaN; `float` reads it back."""
    return number if math.isfinite(number) else str(number)
