"""The tracking database itself: how it is opened, its tables, its versions, and how its errors read."""

from ._access import Access
from ._engine import (
    SALVAGE,
    data_version,
    empty_log,
    errors_naming,
    file_of,
    for_reading,
    location,
    shown,
    vacuum_into,
    wait_for_turn,
)
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
    "SALVAGE",
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
    "vacuum_into",
    "versions",
    "wait_for_turn",
]
