"""Ray as this package uses it: joining a cluster, its nodes, and detached actors on them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import Any

from determined import errors
from determined._home import Home
from determined._version import VERSION

NAMESPACE = "determined"
_WAITING_CALLS = 8
_ANSWER_TIMEOUT_S = 10.0
_SOURCES = str(pathlib.Path(__file__).parents[4])


@contextlib.contextmanager
def joined(address: str) -> Iterator[Any]:
    """Connect this process to a cluster for a block, unless it is connected already, and give the module `ray`."""
    ray = _imported()
    if ray.is_initialized():
        yield ray
        return
    try:
        _require_answer(address)
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise errors.InvalidExperimentException(
            f"there is no Ray cluster at {address!r} ({first}); start one with `ray start --head`, or name one by "
            "RAY_ADDRESS or --on ray:HOST:PORT."
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Raise OSError if nothing answers at an address, for which Ray itself would wait for minutes."""
    chosen = os.environ.get("RAY_ADDRESS") if address == "auto" else address
    host, _, port = (chosen or "").removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_TIMEOUT_S).close()


def _imported() -> Any:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray will do anyway, without its notice
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise errors.InvalidExperimentException(
            "Ray is not installed, and the experiment is to run on it; `pip install 'resolute[ray]'` installs it, here "
            "and on every node."
        ) from None
    return ray


def prefix_of(home: Home, experiment_id: int) -> str:
    """Return what the names of all begin with that an experiment has on a cluster."""
    return f"det-{hashlib.sha256(home.database_name.encode()).hexdigest()[:8]}-{experiment_id}-"


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A living machine of the cluster."""

    id: str
    address: str
    cpus: int
    gpus: int

    def slots(self, *, of_gpus: bool) -> int:
        """Return how many slots it has."""
        return self.gpus if of_gpus else self.cpus

    def threads(self, *, of_gpus: bool) -> int:
        """Return the compute threads of a process with one slot."""
        return max(1, self.cpus // max(self.slots(of_gpus=of_gpus), 1))


def living_nodes() -> dict[str, Node]:
    """Return the living nodes of the cluster by their ids."""
    import ray

    found = {}
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # as Ray declares it
    for one in nodes:
        if one["Alive"]:
            resources = one["Resources"]
            cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
            found[one["NodeID"]] = Node(one["NodeID"], one["NodeManagerAddress"], cpus, gpus)
    return found


def this_node() -> str:
    """Return the id of the node that this process is connected through."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def start_actor(name: str, node: str | None, module: str, cls: str, *arguments: Any, restarts: int = 0) -> Any:
    """Return the detached actor of a name, which holds an object of a class; it is started if it is not there.

    It stays on its node, if that is given. Nothing is waited for: what is wrong with it shows when it is called.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    host = _host_class()
    return host.options(
        name=name,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=restarts,
        max_task_retries=restarts,
        scheduling_strategy="DEFAULT" if node is None else NodeAffinitySchedulingStrategy(node, soft=False),
    ).remote([_SOURCES], VERSION, module, cls, *arguments)


def _host_class() -> Any:
    import ray
    from ray import cloudpickle

    from determined.experiment.executors.ray import _host

    cloudpickle.register_pickle_by_value(_host)  # type: ignore[no-untyped-call]  # as Ray declares it

    class Host(_host.Host):
        __doc__ = _host.Host.__doc__

        wait = ray.method(concurrency_group="waiting")(_host.Host.wait)

    remote: Any = ray.remote  # whose types leave this out
    return remote(concurrency_groups={"waiting": _WAITING_CALLS})(Host)


def kill_actor(handle: Any) -> None:
    """End an actor for good, if it is there."""
    import ray

    with contextlib.suppress(Exception):  # it is gone, as is what could say so
        ray.kill(handle, no_restart=True)


def actors_of(prefix: str) -> dict[str, Any]:
    """Return the living actors whose names begin with a prefix, by name."""
    import ray

    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == NAMESPACE]
    found = {}
    for name in names:
        if name.startswith(prefix):
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                found[name] = ray.get_actor(name, namespace=NAMESPACE)
    return found


def end_this_actor() -> None:
    """End the actor that this process is, from any thread."""
    import ray

    kill_actor(ray.get_runtime_context().current_actor)
