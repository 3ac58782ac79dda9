"""The slots of this machine, shared by the experiments that run on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from determined.experiment.config import SlotRange
from determined.experiment.executors._base import Device, Handle, Placement
from determined.experiment.executors.local._machine import Machine
from determined.tracking import Demand, RunProcess

if TYPE_CHECKING:
    from determined.tracking import Slots

DEFAULT_PRIORITY = 42
"""The priority of an experiment that sets none; 1 comes before 99."""


class LocalAllocator:
    """Slots of this machine, shared through the tracking database."""

    def __init__(self, slots: Slots, machine: Machine, experiment_id: int, slots_per_trial: SlotRange) -> None:
        self._machine = machine
        self._slots = slots
        self._experiment_id = experiment_id
        self._range = slots_per_trial

    @property
    def capacity(self) -> int:
        return self._machine.slots

    @property
    def device(self) -> Device:
        return "cuda" if self._machine.gpus else "cpu"

    def allowance(self, wanted: int, priority: int | None) -> int:
        others = [self._rival(one) for one in self._slots.demands() if one.experiment_id != self._experiment_id]
        own = Claimant(self._experiment_id, wanted, self._range.min, priority, self._range.is_elastic)
        return shares(self._machine.slots, [*others, own])[self._experiment_id]

    def _rival(self, demand: Demand) -> Claimant:
        """Return what another experiment wants of the slots here: less those that it has elsewhere."""
        elsewhere = len(set(demand.slots).difference(self._machine.numbers))
        wanted = max(demand.wanted, demand.held) - elsewhere
        return Claimant(demand.experiment_id, wanted, demand.unit, demand.priority, demand.is_elastic)

    def take(self, trial_id: int, slots: int) -> Placement | None:
        taken = self._slots.take(
            self._experiment_id, trial_id, slots, self._machine.numbers, least=min(slots, self._range.min)
        )
        return None if taken is None else self._machine.placement(taken)

    def attach(self, trial_id: int, handle: Handle) -> None:
        """Let the process of a run hold the slots of its trial: they are free once that has ended."""
        self._slots.hand_over(trial_id, RunProcess.from_json(handle))

    def release(self, trial_id: int) -> None:
        self._slots.release(trial_id)


@dataclasses.dataclass(frozen=True, slots=True)
class Claimant:
    """An experiment that wants slots, in units of what one of its trials needs."""

    experiment_id: int
    wanted: int
    unit: int = 1
    priority: int | None = None
    is_elastic: bool = False
    """Whether a trial that has its unit can use further slots, one by one."""


def shares(capacity: int, claimants: Iterable[Claimant]) -> dict[int, int]:
    """Return how many slots each experiment may hold.

    Those of the best priority come first. Among equals slots go round one trial at a time, the older experiment first,
    until nobody wants more or nothing is left: nobody has less than another who has more than one trial more. What is
    left then goes to elastic trials, slot by slot.
    """
    given: dict[int, int] = {}
    free = capacity
    by_priority: dict[int, list[Claimant]] = {}
    for one in claimants:
        given[one.experiment_id] = 0
        by_priority.setdefault(DEFAULT_PRIORITY if one.priority is None else one.priority, []).append(one)
    for _, equals in sorted(by_priority.items()):
        equals.sort(key=lambda one: one.experiment_id)
        free = _go_round(free, equals, given)
        growing = [one for one in equals if one.is_elastic and given[one.experiment_id]]
        free = _go_round(free, [dataclasses.replace(one, unit=1) for one in growing], given)
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
