"""The slots of this machine, shared by the experiments that run on it."""

from __future__ import annotations

from determined.experiment._machine import Machine
from determined.experiment._shares import Claimant, shares
from determined.experiment.executors import Device, Handle, Placement
from determined.tracking import Demand, RunProcess, Slots


class LocalAllocator:
    """Slots of this machine, shared through the tracking database."""

    def __init__(self, slots: Slots, machine: Machine, experiment_id: int, slots_per_trial: int) -> None:
        self._machine = machine
        self._slots = slots
        self._experiment_id = experiment_id
        self._unit = slots_per_trial

    @property
    def capacity(self) -> int:
        """How many slots there are."""
        return self._machine.slots

    @property
    def device(self) -> Device:
        """What a slot computes with."""
        return "cuda" if self._machine.gpus else "cpu"

    def allowance(self, wanted: int, priority: int | None) -> int:
        """Return how many of the `wanted` slots the experiment may hold now."""
        others = [self._rival(one) for one in self._slots.demands() if one.experiment_id != self._experiment_id]
        own = Claimant(self._experiment_id, wanted, self._unit, priority)
        return shares(self._machine.slots, [*others, own])[self._experiment_id]

    def _rival(self, demand: Demand) -> Claimant:
        """Return what another experiment wants of the slots here: less those that it has elsewhere."""
        elsewhere = len(set(demand.slots).difference(self._machine.numbers))
        wanted = max(demand.wanted, demand.held) - elsewhere
        return Claimant(demand.experiment_id, wanted, demand.unit, demand.priority)

    def take(self, trial_id: int) -> Placement | None:
        """Reserve the slots of a trial; None if too few are free."""
        slots = self._slots.take(self._experiment_id, trial_id, self._unit, self._machine.numbers)
        return None if slots is None else self._machine.placement(slots)

    def attach(self, trial_id: int, handle: Handle) -> None:
        """Let the process of a run hold the slots of its trial: they are free once that has ended."""
        self._slots.hand_over(trial_id, RunProcess.from_json(handle))

    def release(self, trial_id: int) -> None:
        """Free the slots of a trial."""
        self._slots.release(trial_id)
