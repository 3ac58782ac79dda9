"""The tracking database: experiments, trials, metrics and checkpoints of every run on this machine.

A run writes messages through a `TrialWriter`. A runner manages an experiment of many trials through an
`ExperimentStore` and shares the machine's `Slots`. The command line and other readers use `TrackingReader`, a
`Registry` of models and, for what people add to the record or delete from it, a `Catalog`. Importing this package costs
nothing: SQLAlchemy is imported when one of them is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._data.changesets import (
    KEEP,
    Changeset,
    Control,
    Demand,
    Desired,
    ExperimentChange,
    ExperimentDescription,
    Keep,
    Lease,
    NewTrial,
    RunRecord,
    SearchEvent,
    Snapshot,
    TrialChange,
    TrialEntry,
    TrialRequest,
    Validation,
)
from ._data.json import as_stored, encode_json
from ._data.messages import (
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
from ._data.process import RunProcess
from ._data.records import (
    BestValidation,
    CheckpointRecord,
    ExperimentRecord,
    MetricSummary,
    ModelRecord,
    ModelVersionRecord,
    Overview,
    Problem,
    TrialOverview,
    TrialRecord,
    is_comparable,
    searcher_metric,
)
from ._data.room import is_away, lacks_room
from ._waiting import when_available

if TYPE_CHECKING:
    from ._catalog import Catalog
    from ._experiments import ExperimentStore
    from ._leases import Slots
    from ._maintenance import back_up, check_database
    from ._models import Registry
    from ._reader import TrackingReader
    from ._writer import TrialWriter

__all__ = [
    "KEEP",
    "BestValidation",
    "Catalog",
    "Changeset",
    "CheckpointDeleted",
    "CheckpointRecord",
    "CheckpointSaved",
    "CheckpointState",
    "Continued",
    "Control",
    "Demand",
    "Desired",
    "ExperimentChange",
    "ExperimentDescription",
    "ExperimentRecord",
    "ExperimentStore",
    "Keep",
    "Lease",
    "Message",
    "MetadataChanged",
    "MetricReport",
    "MetricSummary",
    "ModelRecord",
    "ModelVersionRecord",
    "NewTrial",
    "Overview",
    "Problem",
    "ProgressChanged",
    "Registry",
    "RunDescription",
    "RunProcess",
    "RunRecord",
    "RunState",
    "SearchEvent",
    "SeedChanged",
    "Slots",
    "Snapshot",
    "StateChanged",
    "StatusChanged",
    "TrackingReader",
    "TrialChange",
    "TrialEntry",
    "TrialOverview",
    "TrialRecord",
    "TrialRequest",
    "TrialWriter",
    "Validation",
    "as_stored",
    "back_up",
    "check_database",
    "encode_json",
    "is_away",
    "is_comparable",
    "lacks_room",
    "searcher_metric",
    "when_available",
]

_LOADED_ON_USE = {
    "Catalog": "_catalog",
    "ExperimentStore": "_experiments",
    "TrialWriter": "_writer",
    "TrackingReader": "_reader",
    "Registry": "_models",
    "Slots": "_leases",
    "back_up": "_maintenance",
    "check_database": "_maintenance",
}


def __getattr__(name: str) -> Any:
    if name not in _LOADED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LOADED_ON_USE[name]}", __name__), name)
