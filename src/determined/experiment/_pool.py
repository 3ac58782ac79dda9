"""The slots that one experiment may use, shared with those that run beside it."""

from __future__ import annotations

from typing import Protocol

from determined.experiment._machine import Machine
from determined.experiment._shares import Claimant, shares
from determined.tracking import Demand, RunProcess, Slots


class Pool(Protocol):
    """Gives slots to trials."""

    machine: Machine

    def allowance(self, wanted: int, priority: int | None) -> int:
        """Return how many slots the experiment may hold now, if it wants so many."""

    def take(self, trial_id: int) -> list[int] | None:
        """Give a trial its slots; None if there are not enough."""

    def hand_over(self, trial_id: int, process: RunProcess) -> None:
        """Let the process of a run hold the slots: they are free when that is gone."""

    def release(self, trial_id: int) -> None:
        """Take the slots of a trial back."""


class SharedPool:
    """Slots of this machine, shared through the tracking database."""

    def __init__(self, slots: Slots, machine: Machine, experiment_id: int, slots_per_trial: int) -> None:
        self.machine = machine
        self._slots = slots
        self._experiment_id = experiment_id
        self._unit = slots_per_trial

    def allowance(self, wanted: int, priority: int | None) -> int:
        """Return how many slots the experiment may hold now, if it wants so many."""
        others = [self._rival(one) for one in self._slots.demands() if one.experiment_id != self._experiment_id]
        own = Claimant(self._experiment_id, wanted, self._unit, priority)
        return shares(self.machine.slots, [*others, own])[self._experiment_id]

    def _rival(self, demand: Demand) -> Claimant:
        """Return what another experiment wants of the slots here: less those that it has elsewhere."""
        elsewhere = len(set(demand.slots).difference(self.machine.numbers))
        wanted = max(demand.wanted, demand.held) - elsewhere
        return Claimant(demand.experiment_id, wanted, demand.unit, demand.priority)

    def take(self, trial_id: int) -> list[int] | None:
        """Give a trial its slots; None if there are not enough."""
        return self._slots.take(self._experiment_id, trial_id, self._unit, self.machine.numbers)

    def hand_over(self, trial_id: int, process: RunProcess) -> None:
        """Let the process of a run hold the slots: they are free when that is gone."""
        self._slots.hand_over(trial_id, process)

    def release(self, trial_id: int) -> None:
        """Take the slots of a trial back."""
        self._slots.release(trial_id)
