"""The tracking database: experiments, trials, metrics and checkpoints of every run on this machine.

A run writes messages through a `Recorder`; the command line and other readers use `Records`. Importing
this package costs nothing: SQLAlchemy is imported when either of them is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._json import encode_json
from ._messages import (
    CheckpointDeleted,
    CheckpointSaved,
    CheckpointState,
    Continued,
    Message,
    MetadataChanged,
    MetricReport,
    ProgressChanged,
    RunDescription,
    RunState,
    SeedChanged,
    StateChanged,
    StatusChanged,
)
from ._views import (
    BestValidation,
    CheckpointRecord,
    ExperimentRecord,
    MetricSummary,
    RunProcess,
    TrialRecord,
)

if TYPE_CHECKING:
    from ._recorder import Recorder
    from ._records import Records

__all__ = [
    "BestValidation",
    "CheckpointDeleted",
    "CheckpointRecord",
    "CheckpointSaved",
    "CheckpointState",
    "Continued",
    "ExperimentRecord",
    "Message",
    "MetadataChanged",
    "MetricReport",
    "MetricSummary",
    "ProgressChanged",
    "Recorder",
    "Records",
    "RunDescription",
    "RunProcess",
    "RunState",
    "SeedChanged",
    "StateChanged",
    "StatusChanged",
    "TrialRecord",
    "encode_json",
]

_LOADED_ON_USE = {"Recorder": "_recorder", "Records": "_records"}


def __getattr__(name: str) -> Any:
    if name not in _LOADED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LOADED_ON_USE[name]}", __name__), name)
