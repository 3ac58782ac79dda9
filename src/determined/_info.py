"""What a runner tells a trial process, to and from the environment."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from determined import errors
from determined._secrets import mask_variables

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrialInfo:
    """The trial that a managed process trains."""

    trial_id: int
    experiment_id: int
    trial_seed: int
    hparams: dict[str, Any]
    _config: dict[str, Any]
    _steps_completed: int = 0
    _trial_run_id: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInfo:
    """What a managed process knows about itself; see `get_cluster_info`."""

    trial: TrialInfo
    latest_checkpoint: str | None = None
    task_type: str = "TRIAL"
    task_id: str = ""
    allocation_id: str = ""
    slot_ids: list[int] = dataclasses.field(default_factory=list)
    gpu_uuids: list[str] = dataclasses.field(default_factory=list)
    container_addrs: list[str] = dataclasses.field(default_factory=lambda: ["127.0.0.1"])
    container_rank: int = 0
    container_slot_counts: list[int] = dataclasses.field(default_factory=lambda: [1])
    master_url: str = ""
    cluster_id: str = ""
    agent_id: str = ""

    @property
    def user_data(self) -> dict[str, Any]:
        """The free `data` section of the experiment config."""
        return dict(self.trial._config.get("data") or {})

    def to_environment(self) -> dict[str, str]:
        """Return the variables from which `get_cluster_info` rebuilds this in another process.

        The config there has the names of its environment variables, not their values.
        """
        trial = self.trial
        variables = {
            "DET_CLUSTER_ID": self.cluster_id,
            "DET_AGENT_ID": self.agent_id,
            "DET_SLOT_IDS": json.dumps(self.slot_ids),
            "DET_TASK_ID": self.task_id,
            "DET_ALLOCATION_ID": self.allocation_id,
            "DET_TASK_TYPE": self.task_type,
            "DET_TRIAL_ID": str(trial.trial_id),
            "DET_EXPERIMENT_ID": str(trial.experiment_id),
            "DET_TRIAL_SEED": str(trial.trial_seed),
            "DET_HPARAMS": json.dumps(trial.hparams),
            "DET_EXPERIMENT_CONFIG": json.dumps(mask_variables(trial._config)),
            "DET_STEPS_COMPLETED": str(trial._steps_completed),
            "DET_TRIAL_RUN_ID": str(trial._trial_run_id),
            "DET_GPU_UUIDS": json.dumps(self.gpu_uuids),
            "DET_CHIEF_IP": next(iter(self.container_addrs), ""),
            "DET_CONTAINER_ADDRS": json.dumps(self.container_addrs),
            "DET_CONTAINER_RANK": str(self.container_rank),
            "DET_CONTAINER_SLOT_COUNTS": json.dumps(self.container_slot_counts),
            "DET_MASTER": self.master_url,
        }
        if self.latest_checkpoint:
            variables["DET_LATEST_CHECKPOINT"] = self.latest_checkpoint
        return variables

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> ClusterInfo:
        """Read what `to_environment` wrote."""
        read = _Reader(variables)
        slots = read.items("DET_SLOT_IDS", int) or []
        chief = variables.get("DET_CHIEF_IP") or "127.0.0.1"
        addresses = read.items("DET_CONTAINER_ADDRS", str)
        slot_counts = read.items("DET_CONTAINER_SLOT_COUNTS", int)
        return cls(
            trial=TrialInfo(
                trial_id=read.number("DET_TRIAL_ID"),
                experiment_id=read.number("DET_EXPERIMENT_ID"),
                trial_seed=read.number("DET_TRIAL_SEED"),
                hparams=read.map("DET_HPARAMS"),
                _config=read.map("DET_EXPERIMENT_CONFIG"),
                _steps_completed=read.number("DET_STEPS_COMPLETED", "0"),
                _trial_run_id=read.number("DET_TRIAL_RUN_ID", "0"),
            ),
            latest_checkpoint=variables.get("DET_LATEST_CHECKPOINT") or None,
            task_type=variables.get("DET_TASK_TYPE", "TRIAL"),
            task_id=variables.get("DET_TASK_ID", ""),
            allocation_id=variables.get("DET_ALLOCATION_ID", ""),
            slot_ids=slots,
            gpu_uuids=read.items("DET_GPU_UUIDS", str) or [],
            container_addrs=[chief] if addresses is None else addresses,
            container_rank=read.number("DET_CONTAINER_RANK", "0"),
            container_slot_counts=[max(len(slots), 1)] if slot_counts is None else slot_counts,
            master_url=variables.get("DET_MASTER", ""),
            cluster_id=variables.get("DET_CLUSTER_ID", ""),
            agent_id=variables.get("DET_AGENT_ID", ""),
        )


def get_cluster_info() -> ClusterInfo | None:
    """Return what the runner told this process, or None in a local run."""
    return ClusterInfo.from_environment(os.environ) if os.environ.get("DET_TRIAL_ID") else None


class _Reader:
    """Read typed values from variables; a bad one is named."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def text(self, name: str, default: str | None = None) -> str:
        value = self._variables.get(name) or default
        if value is None:
            raise errors.InternalException(
                f"The environment has DET_TRIAL_ID but no {name}; a managed process needs both. "
                "Unset DET_TRIAL_ID to train locally."
            )
        return value

    def number(self, name: str, default: str | None = None) -> int:
        value = self.text(name, default)
        try:
            return int(value)
        except ValueError:
            raise errors.InternalException(f"{name}={value!r} in the environment is not a number.") from None

    def map(self, name: str) -> dict[str, Any]:
        value = self._json(name, "{}")
        if not isinstance(value, dict):
            raise errors.InternalException(f"{name}={value!r} in the environment is not a JSON object.")
        return value

    def items(self, name: str, kind: type[T]) -> list[T] | None:
        value = self._json(name, "null")
        if value is None or (isinstance(value, list) and all(isinstance(item, kind) for item in value)):
            return value
        raise errors.InternalException(f"{name}={value!r} in the environment is not a JSON list of {kind.__name__}.")

    def _json(self, name: str, default: str) -> Any:
        value = self.text(name, default)
        try:
            return json.loads(value)
        except ValueError:
            raise errors.InternalException(f"{name}={value!r} in the environment is not JSON.") from None
