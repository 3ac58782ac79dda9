"""The class `Determined`, with which programs reach a cluster; here it reaches this machine."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from determined import errors, experiment
from determined._home import home
from determined.experimental._checkpoint import Checkpoint
from determined.experimental._experiment import Experiment
from determined.experimental._metrics import TrialMetrics
from determined.experimental._model import Model
from determined.experimental._orders import ExperimentSortBy, ModelSortBy, OrderBy, checked, ordered, strings
from determined.experimental._states import ExperimentState
from determined.experimental._trial import Trial
from determined.experimental._workspace import Workspace, labels_of, project_id_of, workspace_of, workspaces
from determined.tracking import ExperimentRecord, Registry, TrackingReader


class Determined:
    """The experiments, trials, checkpoints and models in the home folder.

    Arguments, which name a cluster and a user, are accepted and ignored.
    """

    def __init__(self, master: str | None = None, *arguments: Any, **options: Any) -> None:
        if master is not None or arguments or options:
            warnings.warn(
                "Determined() needs no master and no user: experiments run on this machine. Remove the arguments.",
                stacklevel=2,
            )
        self._home = home()
        self._records = TrackingReader(self._home.database)

    def create_experiment(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any],
        model_dir: str | os.PathLike[str] | None = None,
        includes: Iterable[str | os.PathLike[str]] | None = None,
        *,
        project_id: str | None = None,
        paused: bool = False,
        slots: int | None = None,
        on: str | None = None,
    ) -> Experiment:
        """Create an experiment and run it in a process of its own, which outlives this one.

        `config` is a mapping, a string of YAML, or the path of a file. `model_dir` is the folder of the program, which
        is copied; None is for a command that needs no files. `includes` are further files and folders to copy.
        `project_id` is the `id` of a `Project`. With `paused`, the experiment waits for `activate`. `slots` is the
        number of slots into which the CPU is divided on a machine without GPUs. `on` is the cluster to run on, as
        `--on` of `det experiment create` takes it. Keys without effect cause a warning; `errors.InvalidConfig` lists
        all problems of the config.
        """
        settings = _config(config)
        if settings.notes:
            warnings.warn("\n".join(settings.notes), stacklevel=3)
        if project_id is not None:
            settings = experiment.config.from_map({**settings.to_dict(), **labels_of("create_experiment", project_id)})
        further = strings("create_experiment", "includes", includes)
        with tempfile.TemporaryDirectory() as empty:
            folder = empty if model_dir is None else model_dir
            id = experiment.create(settings, folder, further, paused=paused, at=self._home, slots=slots, on=on)
        if not paused:
            experiment.control.activate(id, self._home, slots)
        return self.get_experiment(id)

    def get_experiment(self, experiment_id: int) -> Experiment:
        """Return the experiment with an id."""
        return Experiment(self._records.experiment(experiment_id), self._home)

    def list_experiments(
        self,
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
        """Return experiments, oldest first unless `sort_by` and `order_by` are given.

        The other arguments filter: by ids, all of some labels, states, a part of the name, and the project. The list
        includes runs of scripts; archived experiments only with `include_archived`.
        """
        by, order = sort_by or ExperimentSortBy.ID, order_by or OrderBy.ASC
        checked("list_experiments", "sort_by", by, ExperimentSortBy)
        checked("list_experiments", "order_by", order, OrderBy)
        ids = None if experiment_ids is None else set(experiment_ids)
        wanted = set(strings("list_experiments", "labels", labels))
        state_names = None if states is None else _names(states)
        found = [
            record
            for record in self._records.experiments(include_archived=include_archived)
            if (ids is None or record.id in ids)
            and wanted <= set(record.labels)
            and (state_names is None or record.state.name in state_names)
            and (name is None or name in record.name)
            and (project_id is None or project_id == project_id_of(record))
        ]
        return [Experiment(one, self._home) for one in ordered(found, lambda one: _value(one, by), order)]

    def get_trial(self, trial_id: int) -> Trial:
        """Return the trial with an id."""
        return Trial(self._records.trial(trial_id), self._home)

    def iter_trials_metrics(self, trial_ids: Iterable[int], group: str) -> Iterator[TrialMetrics]:
        """Yield the reports of several trials so far, of one group such as "training", by trial and step."""
        for trial_id in trial_ids:
            yield from self.get_trial(trial_id).iter_metrics(group)

    stream_trials_metrics = iter_trials_metrics  # the older name

    def stream_trials_training_metrics(self, trial_ids: Iterable[int]) -> Iterator[TrialMetrics]:
        """Same as `iter_trials_metrics(trial_ids, "training")`, the newer form."""
        return self.iter_trials_metrics(trial_ids, "training")

    def stream_trials_validation_metrics(self, trial_ids: Iterable[int]) -> Iterator[TrialMetrics]:
        """Same as `iter_trials_metrics(trial_ids, "validation")`, the newer form."""
        return self.iter_trials_metrics(trial_ids, "validation")

    def get_workspace(self, name: str) -> Workspace:
        """Return a workspace, whether or not it has experiments."""
        return workspace_of("get_workspace", name, self._home)

    def create_workspace(self, name: str) -> Workspace:
        """Return a workspace, which exists once it has an experiment."""
        return workspace_of("create_workspace", name, self._home)

    def list_workspaces(self) -> list[Workspace]:
        """Return the workspaces that have experiments, by name."""
        return workspaces(self._home)

    def get_checkpoint(self, uuid: str) -> Checkpoint:
        """Return the checkpoint with an id, or with a unique prefix of it (at least 4 characters)."""
        return Checkpoint(self._records.checkpoint(uuid), self._home)

    def create_model(
        self,
        name: str,
        description: str | None = "",
        metadata: Mapping[str, Any] | None = None,
        labels: Iterable[str] | None = None,
    ) -> Model:
        """Add a model to the registry; `ConflictException` if the name exists."""
        record = Registry(self._home.database).create_model(
            name, description, strings("create_model", "labels", labels), metadata
        )
        return Model(record, self._home)

    def get_model(self, identifier: str | int) -> Model:
        """Return the model with a name or an id."""
        return Model(Registry(self._home.database).model(identifier), self._home)

    def list_models(
        self,
        sort_by: ModelSortBy = ModelSortBy.NAME,
        order_by: OrderBy = OrderBy.ASCENDING,
        name: str = "",
        description: str = "",
        *,
        include_archived: bool = False,
    ) -> list[Model]:
        """Return the models of the registry whose name and description contain the given strings."""
        checked("list_models", "sort_by", sort_by, ModelSortBy)
        checked("list_models", "order_by", order_by, OrderBy)
        found = [
            record
            for record in Registry(self._home.database).models(include_archived=include_archived)
            if name in record.name and description in (record.description or "")
        ]
        return [Model(one, self._home) for one in ordered(found, lambda one: getattr(one, sort_by.value), order_by)]


def _names(states: Iterable[ExperimentState]) -> set[str]:
    for state in (given := list(states)):
        checked("list_experiments", "states", state, ExperimentState)
    return {state.name for state in given}


def _value(record: ExperimentRecord, by: ExperimentSortBy) -> Any:
    return getattr(record, by.value)


def _config(given: str | os.PathLike[str] | Mapping[str, Any]) -> experiment.config.ExperimentConfig:
    """Return the config in a mapping, a string or a file."""
    if isinstance(given, Mapping):
        return experiment.config.from_map(given)
    if isinstance(given, str) and _is_config(given):
        return experiment.config.parse(given)
    if isinstance(given, str | os.PathLike):
        return experiment.config.load(given)
    raise errors.InvalidExperimentException(
        f"create_experiment(config={given!r}): pass a dict, a string of YAML, or the path of a file."
    )


def _is_config(given: str) -> bool:
    """Return whether a string is a config; the path of a file has neither lines nor a key with a value."""
    return "\n" in given or ": " in given or given.lstrip().startswith("{")
