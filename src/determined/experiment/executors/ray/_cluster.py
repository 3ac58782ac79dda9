"""A Ray cluster as a place for experiments."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from determined import errors
from determined._home import Home, home, make_private
from determined.experiment.config import ExperimentConfig
from determined.experiment.executors._base import Job
from determined.experiment.executors.ray._agent import AgentSettings, packed
from determined.experiment.executors.ray._allocator import RayAllocator
from determined.experiment.executors.ray._executor import RayExecutor
from determined.experiment.executors.ray._leftovers import remove_leftovers
from determined.experiment.executors.ray._ray import (
    actors_of,
    joined,
    living_nodes,
    prefix_of,
    start_actor,
    this_node,
)
from determined.experiment.executors.ray._runner import RayRunner, start_runner

_HERE = __package__
_SHARED = ("shared_fs", "directory")


def connect(on: str, slots: int | None) -> RayCluster:
    """Return the cluster at an address: `ray` for that of RAY_ADDRESS or of this machine, `ray:HOST:PORT`, `ray://...`."""
    address = on if on.startswith("ray://") else on.removeprefix("ray").removeprefix(":")
    return RayCluster(address or "auto")


class RayCluster:
    """Runs trials on the nodes of a cluster, and runners as detached actors."""

    def __init__(self, address: str) -> None:
        self._address = address

    def check(self, config: ExperimentConfig) -> None:
        """Refuse an experiment whose trials need more slots than there are, or whose files no node could reach."""
        if self._address.startswith("ray://"):
            self._check_from_outside()
        range = config.resources.slot_range
        with joined(self._address):
            nodes = living_nodes().values()
            of_gpus = any(node.gpus for node in nodes)
            slots = sum(node.slots(of_gpus=of_gpus) for node in nodes)
        if (needed := range.min) > slots:
            name = "slots_per_trial.min" if range.is_elastic else "slots_per_trial"
            kind = "GPUs" if of_gpus else "CPUs"
            raise errors.InvalidExperimentException(
                f"resources.{name}={needed}, but the Ray cluster has {slots} {kind} on {len(nodes)} node(s); "
                f"write {name}: {slots} or less, or add nodes by `ray start --address=...`."
            )

    def _check_from_outside(self) -> None:
        if isinstance(home().database, pathlib.Path):
            raise errors.InvalidExperimentException(
                f"on={self._address!r}: the tracking database {home().database} is a file of this machine, which the "
                "cluster cannot reach. Create the experiment on a node of the cluster with --on ray; or set "
                "DET_DATABASE=postgresql://..., DET_HOME to a folder that the nodes share, and a checkpoint_storage "
                "that they all reach."
            )

    def start_runner(self, command: Sequence[str], environment: Mapping[str, str], job: Job) -> RayRunner:
        """Start a runner as the child of a detached actor, which starts it again if it is killed."""
        with joined(self._address) as ray:
            node = None if self._address.startswith("ray://") else this_node()
            own = {**environment, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
            if node is not None:  # in good time: it takes as long to start as the runner
                _Agents(job, own).make(node)
            return start_runner(command, own, job, node, self._address)

    @contextlib.contextmanager
    def open(self, job: Job) -> Iterator[tuple[RayAllocator, RayExecutor]]:
        """Give placement groups as slots, and an executor with an agent on each node that it uses."""
        prefix = prefix_of(job.home, job.experiment_id)
        # A runner in the cluster joins it where it is, whatever its address is outside.
        address = os.environ.get("RAY_ADDRESS", self._address)
        with joined(address), _probe(job.home) as probe:
            allocator = RayAllocator(prefix, job.config.resources.slot_range)
            agents = _Agents(job, os.environ, probe)
            executor = RayExecutor(agents.make, agents.existing, agents.is_alive, allocator.adopt)
            try:
                yield allocator, executor
            finally:
                executor.close()
                allocator.close()
                # What another runner before this one has left, too; only the actor that holds this process stays.
                remove_leftovers(prefix, but=f"{prefix}runner")


@contextlib.contextmanager
def _probe(home: Home) -> Iterator[pathlib.Path]:
    """Give a file by which nodes tell that they see the home folder."""
    make_private(home.path)
    probe = home.path / f".seen-{uuid.uuid4().hex}"
    probe.touch(mode=0o600)
    try:
        yield probe
    finally:
        probe.unlink(missing_ok=True)


class _Agents:
    """Makes the agents of an experiment."""

    def __init__(self, job: Job, environment: Mapping[str, str], probe: pathlib.Path | None = None) -> None:
        prefix = prefix_of(job.home, job.experiment_id)
        self._prefix = f"{prefix}node-"
        self._environment = dict(environment)
        self._records = f"{prefix}records"
        self._job = job
        self._probe = probe
        self._home_node = this_node()
        database = job.home.database
        self._database = str(database) if isinstance(database, pathlib.Path) else ""

    def make(self, node: str) -> Any:
        """Start the agent of a node, or find it."""
        is_home = node == self._home_node
        if not is_home and self._database:
            start_actor(self._records, self._home_node, f"{_HERE}._relay", "RecordsActor", self._database, restarts=-1)
        name = f"{self._prefix}{node[:12]}"
        settings = AgentSettings(
            name=name,
            environment=self._environment,
            is_home=is_home,
            home=str(self._job.home.path),
            probe=str(self._probe or ""),
            needs_home=_is_below_home(self._job),
            records="" if is_home or not self._database else self._records,
        )
        return start_actor(name, node, f"{_HERE}._agent", "Agent", settings, None if is_home else self._code)

    @functools.cached_property
    def _code(self) -> Any:
        """The program, in the object store of the cluster: it travels once to each node."""
        import ray

        return ray.put(packed(self._job.home.code(self._job.experiment_id)))

    def existing(self) -> dict[str, Any]:
        """Return the agents that there are, by name."""
        return actors_of(self._prefix)

    def is_alive(self, node: str) -> bool:
        """Return whether a node still belongs to the cluster, as far as that is known."""
        return node in living_nodes()


def _is_below_home(job: Job) -> bool:
    """Return whether the checkpoints are in a folder that need not exist on other nodes."""
    storage = job.config.to_dict().get("checkpoint_storage") or {}
    path = str(storage.get("container_path") or storage.get("host_path") or "")
    is_folder = storage.get("type", "shared_fs") in _SHARED
    return is_folder and (not path or pathlib.Path(path).is_relative_to(job.home.path))
