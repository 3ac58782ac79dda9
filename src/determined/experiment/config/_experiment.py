"""The whole experiment config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, PrivateAttr

from determined._secrets import mask
from determined.experiment.config import _rules
from determined.experiment.config._hyperparameters import Space
from determined.experiment.config._length import Length
from determined.experiment.config._names import generated_name
from determined.experiment.config._searcher import Searcher
from determined.experiment.config._section import Natural, Positive, RuleViolation, Section, Text, broken, inert
from determined.experiment.config._sections import (
    Environment,
    LogPolicy,
    Optimizations,
    Profiling,
    Reproducibility,
    Resources,
    RetentionPolicy,
)
from determined.experiment.config._storage import CheckpointStorage, HomeStorage

_TRIAL_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def _entrypoint(value: Any) -> str | list[str]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(isinstance(word, str) for word in value) and value[0]:
        return value
    rule = "it is neither a text with a command or module:Class nor a list of texts"
    raise broken([RuleViolation((), rule, "Write entrypoint: model_def:MyTrial, or entrypoint: python3 train.py.")])


class ExperimentConfig(Section):
    """All keys of an experiment config. Only `searcher` is required.

    Make one with `load`, `parse` or `from_map`, which name every problem by its place.
    """

    name: Annotated[
        Text,
        Field(
            description="What people call the experiment.",
            examples=["digits"],
            json_schema_extra={"default": "two words"},
        ),
    ] = Field(default_factory=generated_name)
    description: Annotated[str | None, Field(description="More about it.", examples=["with dropout"])] = None
    labels: Annotated[list[Text], Field(description="Words to find it by.", examples=[["baseline", "cnn"]])] = []
    workspace: Annotated[str, Field(description="A group of projects; goes with `project`.", examples=["vision"])] = ""
    project: Annotated[str, Field(description="A group of experiments, in a `workspace`.", examples=["digits"])] = ""
    entrypoint: Annotated[
        str | list[str] | None,
        PlainValidator(_entrypoint),
        Field(
            description="What a trial runs: `module:Class` trains that trial class as the config says; any other text "
            "is a command for the shell; a list is a program and its arguments.",
            examples=["model_def:MyTrial"],
        ),
    ] = None
    hyperparameters: Annotated[
        Space,
        Field(
            description="Constants, ranges to search in, and maps of both. `global_batch_size` gives the batch size of "
            "each slot.",
            examples=[{"global_batch_size": 64, "lr": {"type": "log", "minval": -4, "maxval": -1}}],
        ),
    ] = {}
    searcher: Annotated[
        Searcher,
        Field(
            description="Which hyperparameters are tried, and which trials go on.",
            examples=[{"name": "random", "metric": "validation_loss", "max_trials": 20, "max_length": {"epochs": 5}}],
        ),
    ]
    resources: Annotated[
        Resources, Field(description="What of the machine it may use.", examples=[{"slots_per_trial": 2}])
    ] = Field(default_factory=Resources)
    max_restarts: Annotated[
        Natural,
        Field(description="How often a trial that failed is started again from its latest checkpoint.", examples=[2]),
    ] = 5
    min_validation_period: Annotated[
        Length,
        Field(description="How often a trial validates; 0 = only at the end.", examples=[{"epochs": 1}]),
    ] = Length(batches=0)
    min_checkpoint_period: Annotated[
        Length,
        Field(description="How often a trial saves a checkpoint; 0 = only at the end.", examples=[{"batches": 1000}]),
    ] = Length(batches=0)
    checkpoint_policy: Annotated[
        Literal["best", "all", "none"],
        Field(
            description="After which validations a checkpoint is saved: those with the best metric so far of the whole "
            "experiment, all, or none.",
            examples=["all"],
        ),
    ] = "best"
    checkpoint_storage: Annotated[
        CheckpointStorage,
        Field(
            description="Where checkpoints go, and which of them stay; left out = the home folder.",
            examples=[{"type": "shared_fs", "host_path": "/mnt/shared", "save_trial_best": 2}],
        ),
    ] = Field(default_factory=HomeStorage)
    perform_initial_validation: Annotated[
        bool, Field(description="Whether a trial validates before its first batch.", examples=[True])
    ] = False
    scheduling_unit: Annotated[
        Positive, Field(description="Training metrics are reported every so many batches.", examples=[50])
    ] = 100
    records_per_epoch: Annotated[
        Natural,
        Field(description="Accepted, without effect: the length of the training data says it.", examples=[60000]),
    ] = 0
    optimizations: Annotated[
        Optimizations, Field(description="What makes training faster.", examples=[{"mixed_precision": "bf16"}])
    ] = Field(default_factory=Optimizations)
    profiling: Annotated[
        Profiling, Field(description="System metrics and times of the loop.", examples=[{"enabled": True}])
    ] = Field(default_factory=Profiling)
    reproducibility: Annotated[
        Reproducibility, Field(description="Where random numbers come from.", examples=[{"experiment_seed": 42}])
    ] = Field(default_factory=Reproducibility)
    data: Annotated[
        dict[str, Any],
        Field(
            description="Free settings for the program, which finds them in `context.get_data_config()`. What is below "
            "`secrets` is masked wherever it is shown.",
            examples=[{"path": "/data/digits", "secrets": {"token": "t0k3n"}}],
        ),
    ] = {}
    environment: Annotated[
        Environment,
        Field(
            description="What a trial's processes find around them.",
            examples=[{"environment_variables": ["OMP_NUM_THREADS=2"]}],
        ),
    ] = Field(default_factory=Environment)
    preemption_timeout: Annotated[
        Positive,
        Field(description="Seconds that a trial has from being asked to stop until it is killed.", examples=[60]),
    ] = 3600
    log_policies: Annotated[
        list[LogPolicy],
        Field(
            description="What happens when a trial writes certain lines.",
            examples=[[{"pattern": "CUDA out of memory", "action": "cancel_retries"}]],
        ),
    ] = []
    retention_policy: Annotated[
        RetentionPolicy, Field(description="What is removed after a time.", examples=[{"log_retention_days": 90}])
    ] = Field(default_factory=RetentionPolicy)
    debug: Annotated[bool, Field(description="Whether trials log more.", examples=[True])] = False
    bind_mounts: Annotated[Any, inert("Folders of the machine in a container.", [])] = None
    data_layer: Annotated[Any, inert("Where an old data layer kept its cache.", {})] = None
    integrations: Annotated[Any, inert("Other services of a cluster.", {})] = None
    pbs: Annotated[Any, inert("Settings for PBS.", {})] = None
    pod_spec: Annotated[Any, inert("Settings for Kubernetes.", {})] = None
    registry_auth: Annotated[Any, inert("Access to a registry of containers.", {"username": "me"})] = None
    security: Annotated[Any, inert("Settings of a cluster.", {})] = None
    slurm: Annotated[Any, inert("Settings for Slurm.", {})] = None

    _said: tuple[str, ...] = PrivateAttr(default=())

    @property
    def seed(self) -> int:
        """The seed of everything that is drawn for the experiment."""
        return self.reproducibility.experiment_seed

    @property
    def trial_class(self) -> str | None:
        """The entrypoint if it is `module:Class`, else None."""
        is_class = isinstance(self.entrypoint, str) and _TRIAL_CLASS.fullmatch(self.entrypoint.strip())
        return str(self.entrypoint).strip() if is_class else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What people should know: keys without effect, and old forms that were translated."""
        return (*self._said, *_rules.notes(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the config as JSON would hold it, with every default filled in; `from_map` reads it back.

        A trial's program reads this map, so lengths keep the form that the user wrote.
        """
        return self.model_dump()

    def masked(self) -> dict[str, Any]:
        """Return what `to_dict` does, for showing: secrets are replaced by asterisks."""
        return mask(self.to_dict())

    def breaches(self) -> Iterator[RuleViolation]:
        """Yield the rules over several sections that do not hold."""
        yield from _rules.breaches(self)

    def model_post_init(self, context: Any) -> None:
        """Keep what the reader of the config has to say about it."""
        if isinstance(context, Mapping):
            self._said = tuple(context["notes"])

    def __eq__(self, other: object) -> bool:
        # Two configs that mean the same are equal, whatever was said about how they were written.
        return isinstance(other, ExperimentConfig) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # as that of the maps in it
