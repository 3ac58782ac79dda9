"""The slots of a Ray cluster: GPUs where it has any, else CPUs. A placement group holds those of one trial."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from determined.experiment.config import SlotRange
from determined.experiment.executors._base import Device, Handle, Placement
from determined.experiment.executors.ray._leftovers import groups_of, remove_group
from determined.experiment.executors.ray._ray import Node, living_nodes

_IDLE_TIMEOUT_S = 2.0
"""Seconds for which the slots of an ended trial wait for the next one."""
_READY_TIMEOUT_S = 0.03
"""Seconds that a free cluster takes to make a group; waiting for them saves the next look at it."""
_NODES_PERIOD_S = 1.0


@dataclasses.dataclass(eq=False, slots=True)
class _Group:
    """A placement group of this experiment, for any of its trials."""

    name: str
    group: Any
    ready: Any
    gpus: list[Any] = dataclasses.field(default_factory=list)
    """The tasks that say which GPUs each bundle has, once they have been started."""
    placement: dict[str, Any] | None = None
    trial_id: int | None = None
    idle_since: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def size(self) -> int:
        """How many slots it has."""
        return int(sum(next(iter(bundle.values())) for bundle in self.group.bundle_specs))


class RayAllocator:
    """Slots of a cluster, shared with whatever else runs there.

    Ray serves placement groups in the order in which they are asked for. A group goes from one trial of the experiment
    to the next, unless another experiment waits for slots.
    """

    def __init__(self, prefix: str, slots_per_trial: SlotRange) -> None:
        self._prefix = f"{prefix}slots-"
        self._range = slots_per_trial
        self._groups: dict[str, _Group] = {}
        self._nodes: dict[str, Node] = {}
        self._looked_at = float("-inf")
        self._of_gpus = any(node.gpus for node in self._living().values())

    @property
    def capacity(self) -> int:
        return sum(node.slots(of_gpus=self._of_gpus) for node in self._living().values())

    @property
    def device(self) -> Device:
        return "cuda" if self._of_gpus else "cpu"

    def allowance(self, wanted: int, priority: int | None) -> int:
        """Return what is wanted, as far as there is so much; whether it is free shows when it is taken."""
        surplus = [one for one in self._groups.values() if one.trial_id is None]
        for one in surplus:
            is_wanted = sum(each.size for each in self._groups.values()) <= wanted
            if not is_wanted and time.monotonic() - one.idle_since > _IDLE_TIMEOUT_S:
                self._remove(one)
        return min(wanted, self.capacity)

    def take(self, trial_id: int, slots: int) -> Placement | None:
        self._remove_broken()
        least = min(slots, self._range.min)
        for one in [one for one in self._groups.values() if one.trial_id is None]:
            if not least <= one.size <= slots or self._is_stuck(one):
                self._remove(one)
        free = [one for one in self._groups.values() if one.trial_id is None]
        for one in free or [self._ask_for_group(slots if least == slots else self._available(least, slots))]:
            if self._is_ready(one):
                one.trial_id = trial_id
                return one.placement
        return None

    def attach(self, trial_id: int, handle: Handle) -> None:
        """A group stays as long as its experiment wants it, whatever happens to this runner."""

    def adopt(self, trial_id: int, placement: Placement) -> None:
        """Hold the slots of a run of an earlier runner."""
        from ray.util import get_placement_group

        name = placement["group"]
        group = _Group(name, get_placement_group(name), None, placement=dict(placement), trial_id=trial_id)
        self._groups[name] = group

    def release(self, trial_id: int) -> None:
        for one in [one for one in self._groups.values() if one.trial_id == trial_id]:
            one.trial_id, one.idle_since = None, time.monotonic()
            if self._others_wait():
                self._remove(one)

    def close(self) -> None:
        """Free what no run holds."""
        for one in [one for one in self._groups.values() if one.trial_id is None]:
            self._remove(one)

    def remove_unknown(self) -> None:
        """Free what earlier runners of the experiment have left."""
        for name in groups_of(self._prefix):
            if name not in self._groups:
                remove_group(name)

    def _living(self) -> dict[str, Node]:
        if time.monotonic() - self._looked_at > _NODES_PERIOD_S:
            self._nodes, self._looked_at = living_nodes(), time.monotonic()
        return self._nodes

    def _remove_broken(self) -> None:
        """Give up groups of nodes that are gone, which Ray would move."""
        living = living_nodes()
        for one in [one for one in self._groups.values() if one.trial_id is None]:
            nodes = [] if one.placement is None else one.placement["nodes"]
            if not all(node["node"] in living for node in nodes):
                self._remove(one)

    def _others_wait(self) -> bool:
        return any(state == "PENDING" and not name.startswith(self._prefix) for name, state in groups_of("").items())

    def _is_stuck(self, one: _Group) -> bool:
        """Return whether a group of an elastic trial waits for more slots than there are now."""
        waited = time.monotonic() - one.idle_since
        return self._range.is_elastic and one.placement is None and waited > _IDLE_TIMEOUT_S

    def _available(self, least: int, most: int) -> int:
        """Return how many slots an elastic trial asks for: those that are free now."""
        import ray

        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]  # as Ray declares it
        return max(least, min(most, int(free.get("GPU" if self._of_gpus else "CPU", 0))))

    def _ask_for_group(self, slots: int) -> _Group:
        from ray.util import placement_group

        kind = "GPU" if self._of_gpus else "CPU"
        nodes = [node.slots(of_gpus=self._of_gpus) for node in self._living().values()]
        bundles = [{kind: float(share)} for share in shares(slots, nodes)]
        name = f"{self._prefix}{uuid.uuid4().hex[:12]}"
        group = placement_group(bundles, strategy="PACK", name=name, lifetime="detached")
        made = self._groups[name] = _Group(name, group, group.ready())
        group.wait(_READY_TIMEOUT_S)
        return made

    def _is_ready(self, one: _Group) -> bool:
        """Return whether a group has its slots, and its placement is known."""
        import ray
        from ray.util import placement_group_table

        if one.placement is not None:
            return True
        if not one.group.wait(0):
            return False
        nodes: dict[int, str] = placement_group_table(one.group)["bundles_to_node_id"]
        if self._of_gpus and not one.gpus:
            one.gpus = [_gpus_of_bundle(one.group, index) for index in range(len(nodes))]
        ids: list[list[str]] = [[]] * len(nodes)
        if one.gpus:
            done, _ = ray.wait(one.gpus, num_returns=len(one.gpus), timeout=0)
            if len(done) < len(one.gpus):
                return False
            ids = ray.get(one.gpus)
        # The runner counts the slots; which they are is a matter of each node.
        one.placement = {
            "group": one.name,
            "slots": list(range(one.size)),
            "nodes": self._placed(one, nodes, ids),
        }
        return True

    def _placed(self, one: _Group, nodes: dict[int, str], ids: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """Return what the group has on each node."""
        counts: dict[str, int] = defaultdict(int)
        gpus: dict[str, list[str]] = defaultdict(list)
        for index, bundle in enumerate(one.group.bundle_specs):
            counts[nodes[index]] += int(next(iter(bundle.values())))
            gpus[nodes[index]] += ids[index]
        living = self._living()
        return [
            {
                "node": id,
                "address": living[id].address if id in living else "",
                "slots": [int(gpu) for gpu in gpus[id] if gpu.isdecimal()] or list(range(count)),
                "gpus": gpus[id],
                "threads": living[id].threads(of_gpus=self._of_gpus) if id in living else 1,
            }
            for id, count in counts.items()
        ]

    def _remove(self, one: _Group) -> None:
        from ray.util import remove_placement_group

        del self._groups[one.name]
        remove_placement_group(one.group)


def shares(count: int, nodes: Iterable[int]) -> list[int]:
    """Divide the slots of a trial among as few nodes as possible, evenly if that fits; `nodes` are their sizes."""
    largest = sorted(nodes, reverse=True)
    needed = next((n for n in range(1, len(largest) + 1) if sum(largest[:n]) >= count), 1)
    even = [count // needed + (index < count % needed) for index in range(needed)]
    if all(share <= size for share, size in zip(even, largest, strict=False)):
        return even
    found: list[int] = []
    for size in largest[:needed]:
        found.append(min(size, count - sum(found)))
    return found


def _gpus_of_bundle(group: Any, index: int) -> Any:
    """Start a task that returns the ids of the GPUs of a bundle."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    count = int(group.bundle_specs[index]["GPU"])
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    task = ray.remote(lambda: __import__("ray").get_runtime_context().get_accelerator_ids()["GPU"])
    return task.options(num_cpus=0, num_gpus=count, scheduling_strategy=strategy).remote()
