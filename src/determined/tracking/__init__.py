"""The tracking database: experiments, trials, metrics and checkpoints of every run on this machine.

A run writes messages through a `TrialWriter`. A runner drives an experiment of many trials through an
`ExperimentStore` and shares the machine's `Slots`. The command line and other readers use `TrackingReader`, a
`Registry` of models and, for what people add to the record or delete from it, a `Catalog`. Importing this package costs
nothing: SQLAlchemy is imported when one of them is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._json import as_stored, encode_json
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
from ._process import RunProcess
from ._room import lacks_room
from ._turns import (
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
from ._views import (
    BestValidation,
    CheckpointRecord,
    ExperimentRecord,
    MetricSummary,
    ModelRecord,
    ModelVersionRecord,
    Overview,
    TrialOverview,
    TrialRecord,
    is_comparable,
    searcher_metric,
)

if TYPE_CHECKING:
    from ._catalog import Catalog
    from ._ledger import ExperimentStore
    from ._recorder import TrialWriter
    from ._records import TrackingReader
    from ._registry import Registry
    from ._slots import Slots

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
    "encode_json",
    "is_comparable",
    "lacks_room",
    "searcher_metric",
]

_LOADED_ON_USE = {
    "Catalog": "_catalog",
    "ExperimentStore": "_ledger",
    "TrialWriter": "_recorder",
    "TrackingReader": "_records",
    "Registry": "_registry",
    "Slots": "_slots",
}


def __getattr__(name: str) -> Any:
    if name not in _LOADED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LOADED_ON_USE[name]}", __name__), name)
