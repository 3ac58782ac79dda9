"""How many of a machine's slots each experiment gets. Pure: what all want goes in, what each may hold comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

DEFAULT_PRIORITY = 42
"""The priority of an experiment that says nothing of it; 1 comes before 99."""


@dataclasses.dataclass(frozen=True, slots=True)
class Claimant:
    """An experiment that wants slots, in units of what one of its trials needs."""

    experiment_id: int
    wanted: int
    unit: int = 1
    priority: int | None = None


def shares(capacity: int, claimants: Iterable[Claimant]) -> dict[int, int]:
    """Return how many slots each experiment may hold.

    Those of the best priority come first. Among equals slots go round one trial at a time, the older experiment first,
    until nobody wants more or nothing is left: nobody has less than another who has more than one trial more.
    """
    given: dict[int, int] = {}
    free = capacity
    by_priority: dict[int, list[Claimant]] = {}
    for one in claimants:
        given[one.experiment_id] = 0
        by_priority.setdefault(DEFAULT_PRIORITY if one.priority is None else one.priority, []).append(one)
    for _, equals in sorted(by_priority.items()):
        free = _go_round(free, sorted(equals, key=lambda one: one.experiment_id), given)
    return given


def _go_round(free: int, equals: list[Claimant], given: dict[int, int]) -> int:
    unmet = equals
    while unmet:
        still = []
        for one in unmet:
            if one.unit <= free and given[one.experiment_id] + one.unit <= one.wanted:
                given[one.experiment_id] += one.unit
                free -= one.unit
                still.append(one)
        unmet = still
    return free
