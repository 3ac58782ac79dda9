"""What listings can be sorted by."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Item = TypeVar("Item")


class OrderBy(enum.Enum):
    """The order of a listing."""

    ASC = "ORDER_BY_ASC"
    DESC = "ORDER_BY_DESC"
    ASCENDING = ASC
    DESCENDING = DESC


class ExperimentSortBy(enum.Enum):
    """What experiments can be sorted by."""

    ID = "id"
    NAME = "name"
    STATE = "state"
    START_TIME = "started"
    END_TIME = "ended"
    PROGRESS = "progress"
    NUM_TRIALS = "trial_count"


class TrialSortBy(enum.Enum):
    """What trials can be sorted by."""

    ID = "id"
    STATE = "state"
    START_TIME = "started"
    END_TIME = "ended"
    BATCHES_PROCESSED = "steps_completed"
    RESTARTS = "restarts"
    BEST_VALIDATION_METRIC = "best_validation"


class CheckpointSortBy(enum.Enum):
    """What checkpoints can be sorted by, besides the name of a validation metric."""

    UUID = "uuid"
    TRIAL_ID = "trial_id"
    BATCH_NUMBER = "steps_completed"
    END_TIME = "time"
    SEARCHER_METRIC = "searcher_metric"


class ModelSortBy(enum.Enum):
    """What models can be sorted by."""

    NAME = "name"
    DESCRIPTION = "description"
    CREATION_TIME = "created"
    LAST_UPDATED_TIME = "updated"
    NUM_VERSIONS = "version_count"


def checked(call: str, name: str, value: Any, kind: type[enum.Enum]) -> None:
    """Raise `TypeError` if an argument is not a member of its enumeration."""
    if not isinstance(value, kind):
        choices = ", ".join(f"client.{kind.__name__}.{member.name}" for member in kind)
        raise TypeError(f"{call}({name}={value!r}): pass one of {choices}.")


def strings(call: str, name: str, values: Iterable[Item] | None) -> list[Item]:
    """Return strings or paths as a list; raise `TypeError` for a single string, which would be split into letters."""
    if isinstance(values, str):
        raise TypeError(f"{call}({name}={values!r}): pass a list of strings, such as [{values!r}].")
    return list(values or ())


def ordered(items: Iterable[Item], key: Callable[[Item], Any], order_by: OrderBy) -> list[Item]:
    """Return items sorted by key; those whose key is None come last in both orders."""
    known = [item for item in items if key(item) is not None]
    return sorted(known, key=key, reverse=order_by is OrderBy.DESC) + [item for item in items if key(item) is None]
