"""A Ray cluster of simulated nodes on this machine, and experiments on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

from determined.experiment import config as configs
from determined.experiment import control, create
from determined.tracking import RunState
from driven import Experiments, eventually

CPUS = 2
_OBJECT_STORE_BYTES = 100 << 20


class RayCluster:
    """Nodes with two CPUs each, whatever the machine has. The first one is the head."""

    def __init__(self, nodes: int, **resources: Any) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self._resources = {"num_cpus": CPUS, "object_store_memory": _OBJECT_STORE_BYTES, **resources}
        for _ in range(nodes):
            self.add_node()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add_node(self) -> None:
        self._cluster.add_node(include_dashboard=False, **self._resources)

    def worker_nodes(self) -> list[str]:
        """Return the ids of all nodes but the head."""
        return [node.node_id for node in self._cluster.worker_nodes]

    def kill_node(self, id: str) -> None:
        """Kill a node as a power cut would: with all that runs on it."""
        (node,) = [one for one in self._cluster.worker_nodes if one.node_id == id]
        below = _below(node)
        self._cluster.remove_node(node, allow_graceful=False)
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def shutdown(self) -> None:
        self._cluster.shutdown()

    @contextlib.contextmanager
    def joined(self) -> Iterator[Any]:
        """Let this process ask the cluster for the block."""
        import ray

        ray.init(self.address, namespace="determined", log_to_driver=False, logging_level="ERROR")
        try:
            yield ray
        finally:
            ray.shutdown()

    def actors(self) -> dict[str, Any]:
        """Return the states of all actors that have not ended, by name. Call it where this process has joined."""
        import ray

        return {one["name"]: one for one in ray.util.list_named_actors(all_namespaces=True)}

    def groups(self) -> list[str]:
        """Return the names of the placement groups. Call it where this process has joined."""
        from ray.util import placement_group_table

        return [one["name"] for one in placement_group_table().values() if one["state"] != "REMOVED"]

    def wait_until_empty(self) -> None:
        """Wait until nothing of any experiment is left. Call it where this process has joined."""
        deadline = time.monotonic() + 30
        while left := [*self.actors(), *self.groups()]:
            assert time.monotonic() < deadline, f"{left} are left"
            time.sleep(0.05)


def _below(node: Any) -> list[psutil.Process]:
    """Return all processes of a node but its raylet."""
    found = []
    for infos in node.all_processes.values():
        for info in infos:
            with contextlib.suppress(psutil.Error):
                found += psutil.Process(info.process.pid).children(recursive=True)
    return found


@contextlib.contextmanager
def ray_cluster(nodes: int, **resources: Any) -> Iterator[RayCluster]:
    """Give a cluster, when no other one of these tests is on the machine; it wants a token of everybody."""
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    before = dict(os.environ)
    with open(pathlib.Path(tempfile.gettempdir()) / "resolute-ray-tests.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.environ.update(variables)
        cluster = RayCluster(nodes, **resources)
        os.environ["RAY_ADDRESS"] = cluster.address
        try:
            yield cluster
        finally:
            cluster.shutdown()
            for name in [*variables, "RAY_ADDRESS"]:
                os.environ.pop(name, None)
                if name in before:
                    os.environ[name] = before[name]


class RayExperiments(Experiments):
    """Experiments on the cluster, in a home folder of their own."""

    def create(self, settings: Mapping[str, Any], slots: int = 1, starts: bool = True) -> int:
        id = create(configs.from_map(settings), self.code, at=self.home, on="ray")
        if starts:
            control.activate(id, self.home)
        return id

    def running(self, id: int, count: int = 1) -> list[int]:
        """Wait until so many trials have reported validations and go on; returns their ids."""

        def found() -> list[int]:
            trials = [one.id for one in self.records.trials(id) if one.state is RunState.ACTIVE and one.steps_completed]
            return trials if len(trials) >= count else []

        result: list[int] = eventually(found, 90)
        return result

    def node_of(self, id: int, trial: int) -> str:
        """Return the node of the latest run of a trial."""
        with self.store(id) as store:
            handle = store.runs(trial)[-1].handle
        assert handle is not None
        return str(handle["placement"]["nodes"][0]["node"])


@contextlib.contextmanager
def ray_experiments(folder: pathlib.Path) -> Iterator[RayExperiments]:
    """Give experiments of which nothing is left running afterwards."""
    made = RayExperiments(folder)
    try:
        yield made
    finally:
        for record in made.records.experiments():
            if not record.state.is_final:
                with contextlib.suppress(Exception):
                    control.kill(record.id, made.home)
                    control.wait(record.id, 30, made.home)
        for process in made.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
