"""What an experiment has on a cluster besides its runs."""

from __future__ import annotations

import contextlib

from determined.experiment.executors.ray._ray import actors_of, kill_actor


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


def remove_leftovers(prefix: str, but: str = "") -> None:
    """Free all slots of an experiment, and end its actors but one."""
    for name in groups_of(prefix):
        remove_group(name)
    for name, actor in actors_of(prefix).items():
        if name != but:
            kill_actor(actor)
