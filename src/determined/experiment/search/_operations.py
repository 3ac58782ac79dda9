"""What a search asks of its runner."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any


class Operation(abc.ABC):
    """Something that the runner is asked to do: a `Create`, a `Stop` or a `Shutdown`."""

    __slots__ = ()

    @abc.abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the operation as a JSON map, which `Operation.from_json` reads."""

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Operation:
        """Return the operation that `to_json` wrote."""
        fields = dict(data)
        return _KINDS[fields.pop("type")](**fields)


@dataclasses.dataclass(frozen=True, slots=True)
class Create(Operation):
    """Start a trial with these hyperparameters."""

    request_id: str
    hparams: dict[str, Any]
    seed: int

    def to_json(self) -> dict[str, Any]:
        """Return the operation as a JSON map."""
        return {"type": "create", "request_id": self.request_id, "hparams": self.hparams, "seed": self.seed}


@dataclasses.dataclass(frozen=True, slots=True)
class Stop(Operation):
    """End a trial early; it keeps its results."""

    request_id: str

    def to_json(self) -> dict[str, Any]:
        """Return the operation as a JSON map."""
        return {"type": "stop", "request_id": self.request_id}


@dataclasses.dataclass(frozen=True, slots=True)
class Shutdown(Operation):
    """End the experiment: every trial that was asked for has ended.

    `failed` says that all of them failed, `canceled` that all of them were cancelled.
    """

    failed: bool = False
    canceled: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the operation as a JSON map."""
        return {"type": "shutdown", "failed": self.failed, "canceled": self.canceled}


_KINDS: dict[str, type[Create | Stop | Shutdown]] = {"create": Create, "stop": Stop, "shutdown": Shutdown}
