"""The whole experiment config."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, PrivateAttr

from determined._secrets import mask
from determined.experiment.config import _rules
from determined.experiment.config._hyperparameters import Space
from determined.experiment.config._searcher import Searcher
from determined.experiment.config._section import (
    Length,
    Natural,
    Positive,
    RuleViolation,
    Section,
    Text,
    ignored,
    key,
    rule_error,
)
from determined.experiment.config._sections import (
    Environment,
    LogPolicy,
    Optimizations,
    Profiling,
    Reproducibility,
    Resources,
    RetentionPolicy,
    Slurm,
)
from determined.experiment.config._storage import CheckpointStorage, HomeStorage

_TRIAL_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def _entrypoint(value: Any) -> str | list[str]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(isinstance(word, str) for word in value) and value[0]:
        return value
    rule = "it is neither a string with a command or module:Class nor a list of strings"
    raise rule_error([RuleViolation((), rule, "Write entrypoint: model_def:MyTrial, or entrypoint: python3 train.py.")])


class ExperimentConfig(Section):
    """All keys of an experiment config. Only `searcher` is required.

    Make one with `load`, `parse` or `from_map`, which report every problem with its line.
    """

    name: Annotated[Text, key("Name of the experiment.", "digits", json_schema_extra={"default": "two words"})] = Field(
        default_factory=lambda: _generated_name()
    )
    description: Annotated[str | None, key("Free text.", "with dropout")] = None
    labels: Annotated[list[Text], key("Words to find the experiment by.", ["baseline", "cnn"])] = []
    workspace: Annotated[str, key("Group of projects; requires `project`.", "vision")] = ""
    project: Annotated[str, key("Group of experiments in a `workspace`; requires `workspace`.", "digits")] = ""
    entrypoint: Annotated[
        str | list[str] | None,
        PlainValidator(_entrypoint),
        key(
            "What a trial runs: `module:Class` trains that trial class; any other string is a shell "
            "command; a list is a program and its arguments.",
            "model_def:MyTrial",
        ),
    ] = None
    hyperparameters: Annotated[
        Space,
        key(
            "Constants, ranges to search in, and mappings of both. `global_batch_size` is divided among the "
            "slots of a trial.",
            {"global_batch_size": 64, "lr": {"type": "log", "minval": -4, "maxval": -1}},
        ),
    ] = {}
    searcher: Annotated[
        Searcher,
        key(
            "The search method: which hyperparameters are tried, and which trials are stopped early.",
            {"name": "random", "metric": "validation_loss", "max_trials": 20, "max_length": {"epochs": 5}},
        ),
    ]
    resources: Annotated[
        Resources, key("The part of the machine that the experiment may use.", {"slots_per_trial": 2})
    ] = Field(default_factory=Resources)
    max_restarts: Annotated[Natural, key("How many times a failed trial restarts from its latest checkpoint.", 2)] = 5
    min_validation_period: Annotated[
        Length, key("How often a trial validates; 0 = only at the end.", {"epochs": 1})
    ] = Length(batches=0)
    min_checkpoint_period: Annotated[
        Length, key("How often a trial saves a checkpoint; 0 = only at the end.", {"batches": 1000})
    ] = Length(batches=0)
    checkpoint_policy: Annotated[
        Literal["best", "all", "none"],
        key(
            "Validations after which a trial saves a checkpoint: those with the best metric of the "
            "experiment so far, all, or none.",
            "all",
        ),
    ] = "best"
    checkpoint_storage: Annotated[
        CheckpointStorage,
        key(
            "Where checkpoints are stored, and which of them are kept. Default: the home folder.",
            {"type": "shared_fs", "host_path": "/mnt/shared", "save_trial_best": 2},
        ),
    ] = Field(default_factory=HomeStorage)
    perform_initial_validation: Annotated[bool, key("Whether to validate before the first batch.", True)] = False
    scheduling_unit: Annotated[Positive, key("Number of batches between reports of training metrics.", 50)] = 100
    records_per_epoch: Annotated[Natural, key("No effect: an epoch is one pass over the training data.", 60000)] = 0
    optimizations: Annotated[Optimizations, key("Settings for faster training.", {"mixed_precision": "bf16"})] = Field(
        default_factory=Optimizations
    )
    profiling: Annotated[Profiling, key("System metrics and timings of the training loop.", {"enabled": True})] = Field(
        default_factory=Profiling
    )
    reproducibility: Annotated[Reproducibility, key("The source of random numbers.", {"experiment_seed": 42})] = Field(
        default_factory=Reproducibility
    )
    data: Annotated[
        dict[str, Any],
        key(
            "Free settings, which the program reads with `context.get_data_config()`. Values below "
            "`secrets` are masked in all output.",
            {"path": "/data/digits", "secrets": {"token": "t0k3n"}},
        ),
    ] = {}
    environment: Annotated[
        Environment, key("The environment of a trial's processes.", {"environment_variables": ["OMP_NUM_THREADS=2"]})
    ] = Field(default_factory=Environment)
    preemption_timeout: Annotated[Positive, key("Seconds between the request to stop a trial and its kill.", 60)] = 3600
    log_policies: Annotated[
        list[LogPolicy],
        key(
            "Actions for trials that print certain lines.",
            [{"pattern": "CUDA out of memory", "action": "cancel_retries"}],
        ),
    ] = []
    retention_policy: Annotated[RetentionPolicy, key("How long data is kept.", {"log_retention_days": 90})] = Field(
        default_factory=RetentionPolicy
    )
    debug: Annotated[bool, key("Whether trials write more log lines.", True)] = False
    bind_mounts: Annotated[Any, ignored("Folders mounted into a container.", [])] = None
    data_layer: Annotated[Any, ignored("Cache of a data layer of old versions.", {})] = None
    integrations: Annotated[Any, ignored("Other services of a cluster.", {})] = None
    pbs: Annotated[Any, ignored("Settings for PBS.", {})] = None
    pod_spec: Annotated[Any, ignored("Settings for Kubernetes.", {})] = None
    registry_auth: Annotated[Any, ignored("Credentials for a container registry.", {"username": "me"})] = None
    security: Annotated[Any, ignored("Settings of a cluster.", {})] = None
    slurm: Annotated[
        Slurm, key("How the runs of trials become jobs of Slurm.", {"sbatch_args": ["--partition=gpu"]})
    ] = Field(default_factory=Slurm)

    _translated: tuple[str, ...] = PrivateAttr(default=())

    @property
    def seed(self) -> int:
        """The seed of everything that the search draws."""
        return self.reproducibility.experiment_seed

    @property
    def trial_class(self) -> str | None:
        """The entrypoint if it is `module:Class`, else None."""
        is_class = isinstance(self.entrypoint, str) and _TRIAL_CLASS.fullmatch(self.entrypoint.strip())
        return str(self.entrypoint).strip() if is_class else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What people should know: keys without effect, and old forms that were translated."""
        return (*self._translated, *_rules.notes(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the config as a JSON object with every default filled in; `from_map` reads it back.

        A trial's program reads this mapping, so lengths keep the form that the user wrote.
        """
        return self.model_dump()

    def masked(self) -> dict[str, Any]:
        """Return what `to_dict` returns, with secrets replaced by asterisks."""
        return mask(self.to_dict())

    def violations(self) -> Iterator[RuleViolation]:
        """Yield the violated rules over several sections."""
        yield from _rules.violations(self)

    def model_post_init(self, context: Any) -> None:
        """Keep the notes of the reader of the config."""
        if isinstance(context, Mapping):
            self._translated = tuple(context["notes"])

    def __eq__(self, other: object) -> bool:
        # Two configs that mean the same are equal, even if their notes differ.
        return isinstance(other, ExperimentConfig) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # as the mappings in it


_FIRST = """
    amber ancient balmy bold brave breezy bright brisk calm candid cheerful clear clever cosy crisp curious
    dapper daring dewy eager early easy fair fearless fleet floral fond fresh gentle gilded glad golden graceful
    grand happy hardy hazel honest humble jolly joyful keen kind lively loyal lucid lucky mellow merry mighty
    mild mossy nimble noble patient placid playful polite proud quick quiet radiant ready rosy royal rustic sage
    serene shiny silent silver simple smooth snowy solid spry steady sunny sure sweet swift tidy tranquil true
    upbeat velvet vivid warm wise witty young zesty
"""
_SECOND = """
    acorn alder arch aspen badger bay beacon beaver birch bison brook canyon cedar clover comet cove crane creek
    dawn delta dolphin dune ember falcon fern finch fjord forest fox garden geyser glade grove gull harbor hare
    hawk heath heron hill island ivy jay juniper kestrel lagoon lake lark laurel lily lynx maple marten meadow
    mesa moon moss oak ocean orchard orchid osprey otter owl pebble pine plover pond poplar prairie puffin quail
    raven reef ridge river robin rowan salmon seal shore sparrow spring spruce star stone stream swan thistle
    thrush tide trail valley violet walnut willow wren
"""
# Not the shared generator: a name must not change what a seeded program draws.
_RANDOM = random.SystemRandom()


def _generated_name() -> str:
    """Return a name for an experiment without one: two words, such as 'quiet-otter'."""
    return f"{_RANDOM.choice(_FIRST.split())}-{_RANDOM.choice(_SECOND.split())}"
