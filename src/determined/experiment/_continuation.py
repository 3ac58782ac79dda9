"""What may change in the config of an experiment that is continued."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from determined import errors
from determined._home import Home
from determined._secrets import mask_storage
from determined.experiment._create import check
from determined.experiment.config import ExperimentConfig, from_map
from determined.experiment.executors import connect
from determined.tracking import KEEP, Keep, TrackingReader

_DETAILS = ("name", "description", "labels", "project", "workspace")
_LOCATION = (
    *("type", "host_path", "storage_path", "container_path", "bucket", "prefix", "endpoint_url", "container"),
    "account_url",
)


class Continuation(NamedTuple):
    """What changes when an experiment goes on: its config, and the limits that people can set."""

    config: dict[str, Any] | None = None
    max_slots: int | Keep | None = KEEP
    priority: int | Keep | None = KEEP


def continuation(experiment_id: int, overrides: Iterable[str], home: Home, slots: int | None = None) -> Continuation:
    """Return what overrides change in an experiment; refuse changes of what its trials depend on."""
    record = TrackingReader(home.database).experiment(experiment_id)
    before = from_map(record.config or {})
    after = from_map(before.to_dict(), overrides)
    fixed_before, fixed_after = _fixed(before), _fixed(after)
    for key, value in fixed_before.items():
        if fixed_after[key] != value:
            raise errors.InvalidExperimentException(
                f"experiment {experiment_id} cannot be continued with {key} {fixed_after[key]!r} instead of {value!r}: "
                f"{_remedy(key)}"
            )
    check(after, home.code(experiment_id), home, connect(record.cluster, slots))
    if after == before:
        return Continuation()
    now, then = after.resources, before.resources
    return Continuation(
        config=mask_storage(after.to_dict()),
        max_slots=KEEP if now.max_slots == then.max_slots else now.max_slots,
        priority=KEEP if now.priority == then.priority else now.priority,
    )


def _fixed(config: ExperimentConfig) -> dict[str, Any]:
    """Return the values that cannot change, by key."""
    tree = config.to_dict()
    fixed = {key: tree[key] for key in (*_DETAILS, "entrypoint", "hyperparameters", "reproducibility", "searcher")}
    if config.searcher.name == "single":
        del fixed["searcher"]["max_length"]
    section = tree["checkpoint_storage"]
    return {**fixed, "checkpoint_storage": {key: section[key] for key in _LOCATION if key in section}}


def _remedy(key: str) -> str:
    if key in _DETAILS:
        return "use `det experiment label`." if key == "labels" else f"use `det experiment set {key}`."
    if key == "searcher":
        return "only its max_length can change, for a `single` search; create a new experiment."
    return "its trials depend on it; create a new experiment, with their weights by searcher.source_trial_id."
