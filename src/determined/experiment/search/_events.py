"""What a runner tells a search."""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from determined.experiment.search._numbers import to_json


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
        """Return the event as a JSON map, which `Event.from_json` reads."""

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
        """Return the event as a JSON map."""
        return {"type": "began"}


@dataclasses.dataclass(frozen=True, slots=True)
class Validated(Event):
    """A trial reported validation metrics.

    `metric` is the searcher's metric, NaN for one that is no number; `time` is the value of the searcher's
    `time_metric`, None where there is none.
    """

    request_id: str
    metric: float
    time: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the event as a JSON map."""
        time = None if self.time is None else to_json(self.time)
        return {"type": "validated", "request_id": self.request_id, "metric": to_json(self.metric), "time": time}


@dataclasses.dataclass(frozen=True, slots=True)
class Exited(Event):
    """A trial has ended for good: there will be no further run of it."""

    request_id: str
    reason: ExitReason

    def to_json(self) -> dict[str, Any]:
        """Return the event as a JSON map."""
        return {"type": "exited", "request_id": self.request_id, "reason": self.reason.value}
