"""Experiments, trials, checkpoints and models of this machine in Python.

    from determined.experimental import client

    experiment = client.create_experiment("adaptive.yaml", ".")
    experiment.wait()
    print(experiment.top_checkpoint().download())

Calls work in this process, on the tracking database in the home folder; `det` shows the same. Errors are exceptions
of `determined.errors`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from determined.experimental._checkpoint import Checkpoint, CheckpointTrainingMetadata, DownloadMode
from determined.experimental._determined import Determined
from determined.experimental._experiment import Experiment
from determined.experimental._metrics import TrialMetrics
from determined.experimental._model import Model, ModelVersion
from determined.experimental._orders import (
    CheckpointSortBy,
    ExperimentSortBy,
    ModelSortBy,
    OrderBy,
    TrialSortBy,
)
from determined.experimental._states import CheckpointState, ExperimentState, TrialState
from determined.experimental._trial import Trial
from determined.experimental._workspace import Project, Workspace

__all__ = [
    "Checkpoint",
    "CheckpointSortBy",
    "CheckpointState",
    "CheckpointTrainingMetadata",
    "Determined",
    "DownloadMode",
    "Experiment",
    "ExperimentSortBy",
    "ExperimentState",
    "Model",
    "ModelSortBy",
    "ModelVersion",
    "OrderBy",
    "Project",
    "Trial",
    "TrialMetrics",
    "TrialSortBy",
    "TrialState",
    "Workspace",
    "create_experiment",
    "create_model",
    "create_workspace",
    "get_checkpoint",
    "get_experiment",
    "get_model",
    "get_trial",
    "get_workspace",
    "iter_trials_metrics",
    "list_experiments",
    "list_models",
    "list_workspaces",
    "login",
    "stream_trials_metrics",
    "stream_trials_training_metrics",
    "stream_trials_validation_metrics",
]


def login(*arguments: Any, **options: Any) -> None:
    """Warn that there is no service to log in to; programs for Determined begin with this call."""
    warnings.warn(
        "login() has no effect: experiments run on this machine, without a service to log in to. Remove the call.",
        stacklevel=2,
    )


def create_experiment(
    config: str | os.PathLike[str] | Mapping[str, Any],
    model_dir: str | os.PathLike[str] | None = None,
    includes: Iterable[str | os.PathLike[str]] | None = None,
    *,
    project_id: str | None = None,
    paused: bool = False,
    slots: int | None = None,
    on: str | None = None,
) -> Experiment:
    """Create an experiment and run it. See `Determined.create_experiment`."""
    return Determined().create_experiment(
        config, model_dir, includes, project_id=project_id, paused=paused, slots=slots, on=on
    )


def get_experiment(experiment_id: int) -> Experiment:
    """Return the experiment with an id."""
    return Determined().get_experiment(experiment_id)


def list_experiments(
    sort_by: ExperimentSortBy | None = None,
    order_by: OrderBy | None = None,
    experiment_ids: Iterable[int] | None = None,
    labels: Iterable[str] | None = None,
    states: Iterable[ExperimentState] | None = None,
    name: str | None = None,
    *,
    project_id: str | None = None,
    include_archived: bool = False,
) -> list[Experiment]:
    """Return experiments. See `Determined.list_experiments`."""
    return Determined().list_experiments(
        sort_by,
        order_by,
        experiment_ids,
        labels,
        states,
        name,
        project_id=project_id,
        include_archived=include_archived,
    )


def get_trial(trial_id: int) -> Trial:
    """Return the trial with an id."""
    return Determined().get_trial(trial_id)


def iter_trials_metrics(trial_ids: Iterable[int], group: str) -> Iterator[TrialMetrics]:
    """Yield the reports of several trials so far, of one group such as "training", by trial and step."""
    return Determined().iter_trials_metrics(trial_ids, group)


def stream_trials_metrics(trial_ids: Iterable[int], group: str) -> Iterator[TrialMetrics]:
    """Same as `iter_trials_metrics`, the newer name."""
    return iter_trials_metrics(trial_ids, group)


def stream_trials_training_metrics(trial_ids: Iterable[int]) -> Iterator[TrialMetrics]:
    """Same as `iter_trials_metrics(trial_ids, "training")`, the newer form."""
    return iter_trials_metrics(trial_ids, "training")


def stream_trials_validation_metrics(trial_ids: Iterable[int]) -> Iterator[TrialMetrics]:
    """Same as `iter_trials_metrics(trial_ids, "validation")`, the newer form."""
    return iter_trials_metrics(trial_ids, "validation")


def get_workspace(name: str) -> Workspace:
    """Return a workspace, whether or not it has experiments."""
    return Determined().get_workspace(name)


def create_workspace(name: str) -> Workspace:
    """Return a workspace, which exists once it has an experiment."""
    return Determined().create_workspace(name)


def list_workspaces() -> list[Workspace]:
    """Return the workspaces that have experiments, by name."""
    return Determined().list_workspaces()


def get_checkpoint(uuid: str) -> Checkpoint:
    """Return the checkpoint with an id, or with a unique prefix of it (at least 4 characters)."""
    return Determined().get_checkpoint(uuid)


def create_model(
    name: str,
    description: str | None = "",
    metadata: Mapping[str, Any] | None = None,
    labels: Iterable[str] | None = None,
) -> Model:
    """Add a model to the registry."""
    return Determined().create_model(name, description, metadata, labels)


def get_model(identifier: str | int) -> Model:
    """Return the model with a name or an id."""
    return Determined().get_model(identifier)


def list_models(
    sort_by: ModelSortBy = ModelSortBy.NAME,
    order_by: OrderBy = OrderBy.ASCENDING,
    name: str = "",
    description: str = "",
    *,
    include_archived: bool = False,
) -> list[Model]:
    """Return the models of the registry. See `Determined.list_models`."""
    return Determined().list_models(sort_by, order_by, name, description, include_archived=include_archived)
