"""The clusters that experiments can run on, by name: each subpackage with a module `_cluster` is one."""

from __future__ import annotations

import importlib
import pathlib

from determined import errors
from determined.experiment.executors._base import Cluster

LOCAL = "local"


def connect(on: str | None = None, slots: int | None = None) -> Cluster:
    """Return a cluster by its name, followed by an address where it has one, such as `ray://host:10001`.

    None is this machine. `slots` is the number of slots into which its CPU is divided.
    """
    name = (on or LOCAL).partition(":")[0]
    if name not in _names():
        raise errors.InvalidExperimentException(
            f"on={on!r} is nowhere to run an experiment; use one of {', '.join(_names())}."
        )
    if slots is not None and name != LOCAL:
        raise errors.InvalidExperimentException(
            f"slots={slots} divides the CPU of this machine, but the experiment runs on {on!r}; leave it out."
        )
    module = importlib.import_module(f"{__package__}.{name}._cluster")
    cluster: Cluster = module.connect(on or LOCAL, slots)
    return cluster


def _names() -> list[str]:
    folder = pathlib.Path(__file__).parent
    return sorted(path.parent.name for path in folder.glob("*/_cluster.py"))
