"""What an experiment has on a cluster besides its runs."""

from __future__ import annotations

import contextlib

from determined.experiment.executors.ray._ray import actors_of, kill_actor

_STATUS_TIMEOUT_S = 10.0


def groups_of(prefix: str) -> dict[str, str]:
    """Return the states of the placement groups whose names begin with a prefix, by name."""
    from ray.util import placement_group_table

    return {
        one["name"]: one["state"]
        for one in placement_group_table().values()
        if one["name"].startswith(prefix) and one["state"] != "REMOVED"
    }


def remove_group(name: str) -> None:
    """Free the slots of a placement group, if there is one of that name."""
    from ray.util import get_placement_group, remove_placement_group

    with contextlib.suppress(ValueError):
        remove_placement_group(get_placement_group(name))


def runner_lives(prefix: str) -> bool:
    """Return whether the actor of a runner says that its child lives."""
    import ray

    actor = actors_of(f"{prefix}runner").get(f"{prefix}runner")
    with contextlib.suppress(ray.exceptions.RayError):
        return actor is not None and ray.get(actor.call.remote("status"), timeout=_STATUS_TIMEOUT_S) is None
    return False


def remove_leftovers(prefix: str, but: str = "") -> None:
    """Free all slots of an experiment, and end its actors but one."""
    for name in groups_of(prefix):
        remove_group(name)
    for name, actor in actors_of(prefix).items():
        if name != but:
            kill_actor(actor)
