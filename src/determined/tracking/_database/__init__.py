"""The tracking database itself: how it is opened, its tables, its versions, and how its errors read."""

from ._access import Access
from ._engine import data_version, empty_log, errors_naming, file_of, for_reading, location, shown, wait_for_turn
from ._files import OpenFile
from ._migrations import VERSION, opened
from ._schema import (
    Damage,
    checkpoints,
    events,
    experiments,
    leases,
    metrics,
    models,
    runners,
    runs,
    snapshots,
    trials,
    versions,
)

__all__ = [
    "VERSION",
    "Access",
    "Damage",
    "OpenFile",
    "checkpoints",
    "data_version",
    "empty_log",
    "errors_naming",
    "events",
    "experiments",
    "file_of",
    "for_reading",
    "leases",
    "location",
    "metrics",
    "models",
    "opened",
    "runners",
    "runs",
    "shown",
    "snapshots",
    "trials",
    "versions",
    "wait_for_turn",
]
