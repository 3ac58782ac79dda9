"""The small sections of an experiment config."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Discriminator, Field, PlainValidator, Tag

from determined._secrets import MASK
from determined.experiment.config._section import (
    Natural,
    Path,
    Positive,
    RuleViolation,
    Section,
    SlotRange,
    Text,
    ignored,
    key,
    rule_error,
    tagged,
)

_SBATCH_OPTION = re.compile(r"--([a-z][a-z-]*)(?:=.+)?", re.DOTALL)
_OWN_SBATCH_OPTIONS = {"array", "error", "job-name", "nodes", "ntasks", "ntasks-per-node", "output", "wait", "wrap"}
_VARIABLE = re.compile(r"[^\W\d]\w*=.*", re.DOTALL | re.ASCII)


class Resources(Section):
    """The part of the machine that an experiment may use. A slot is a GPU, or a part of the CPU without GPUs."""

    slots_per_trial: Annotated[
        Annotated[Positive, Tag(tagged("number"))] | Annotated[SlotRange, Tag(tagged("range"))],
        Discriminator(lambda value: tagged("range" if isinstance(value, Mapping | SlotRange) else "number")),
        key(
            "Number of slots of a trial; one process trains on each. `{min: 2, max: 8}` makes the trial elastic: it "
            "starts with as many slots as are free.",
            2,
        ),
    ] = 1
    max_slots: Annotated[
        Positive | None, key("Maximum number of slots of the experiment at once; null = no limit.", 4)
    ] = None
    priority: Annotated[int | None, key("Experiments with a smaller number get slots first.", 42, ge=1, le=99)] = None
    weight: Annotated[Any, ignored("Share of the slots of a cluster.", 1)] = None
    resource_pool: Annotated[Any, ignored("Machines of a cluster.", "a100")] = None
    shm_size: Annotated[Any, ignored("Shared memory of a container.", "4 GiB")] = None
    is_single_node: Annotated[Any, ignored("Whether a trial stays on one machine of a cluster.", True)] = None
    devices: Annotated[Any, ignored("Devices of a container.", [])] = None

    def violations(self) -> Iterator[RuleViolation]:
        """Yield that no trial can ever start."""
        needed = self.slot_range.min
        if self.max_slots is not None and needed > self.max_slots:
            yield RuleViolation(
                ("slots_per_trial",),
                f"a trial that needs {needed} slots never fits into max_slots={self.max_slots}",
                f"Write max_slots: {needed}, or fewer slots_per_trial.",
            )

    @property
    def slot_range(self) -> SlotRange:
        """The smallest and the largest number of slots of a trial."""
        given = self.slots_per_trial
        return given if isinstance(given, SlotRange) else SlotRange(min=given, max=given)


class Slurm(Section):
    """How the runs of trials become jobs of Slurm. Applies to experiments that run `--on slurm`."""

    slots_per_node: Annotated[
        Positive | None, key("Number of slots of a trial on each node; null = as few nodes as possible.", 4)
    ] = None
    gpu_type: Annotated[Text | None, key("Type of the GPUs, as Slurm calls it.", "a100")] = None
    sbatch_args: Annotated[
        list[Text], key("Further options of `sbatch`, in their long form.", ["--partition=gpu", "--time=8:00:00"])
    ] = []

    def violations(self) -> Iterator[RuleViolation]:
        """Yield the options that are none, and those that are chosen for each job."""
        for index, option in enumerate(self.sbatch_args):
            name = _SBATCH_OPTION.fullmatch(option)
            if name is None:
                yield RuleViolation(
                    ("sbatch_args", index),
                    "it is not a long option of sbatch with its value",
                    "Write --partition=gpu, for example.",
                )
            elif name[1] in _OWN_SBATCH_OPTIONS:
                yield RuleViolation(
                    ("sbatch_args", index),
                    f"--{name[1]} follows from slots_per_trial and slots_per_node",
                    "Leave it out.",
                )


class Reproducibility(Section):
    """The source of random numbers."""

    experiment_seed: Annotated[
        int,
        key(
            "Seed of the search, from which the seeds of the trials are drawn.",
            42,
            ge=0,
            le=2**32 - 1,
            json_schema_extra={"default": "the time in seconds"},
        ),
    ] = Field(default_factory=lambda: int(time.time()) % 2**32)


class Profiling(Section):
    """System metrics and timings of the training loop. Applies to `module:Class` entrypoints."""

    enabled: Annotated[bool, key("Whether to collect them.", True)] = False
    begin_on_batch: Annotated[Natural, key("First batch to profile.", 100)] = 0
    end_after_batch: Annotated[Natural | None, key("Last batch to profile; null = the last of the training.", 200)] = (
        None
    )
    sync_timings: Annotated[bool, key("Whether each timing waits for the GPU.", False)] = True

    def violations(self) -> Iterator[RuleViolation]:
        """Yield that it ends before it begins."""
        if self.end_after_batch is not None and self.end_after_batch < self.begin_on_batch:
            yield RuleViolation(
                ("end_after_batch",),
                f"it is before begin_on_batch={self.begin_on_batch}",
                f"Write end_after_batch: {self.begin_on_batch + 100}.",
            )


class RetentionPolicy(Section):
    """How long data is kept."""

    log_retention_days: Annotated[int | None, key("Days to keep logs; -1 and null = forever.", 90, ge=-1, le=32767)] = (
        None
    )


class LogPolicy(Section):
    """An action for trials that print a line matching a pattern."""

    name: Annotated[Text | None, key("Name of the policy.", "out of memory")] = None
    pattern: Annotated[
        Text | None,
        key(
            "Regular expression, searched for in every line. A policy with a `name` and no pattern "
            "changes a default policy of a cluster; it has no effect here.",
            "CUDA out of memory",
        ),
    ] = None
    action: Annotated[
        Literal["cancel_retries", "exclude_node"] | None,
        key(
            "`cancel_retries`: a failure of this trial is final. `exclude_node` is accepted and has no "
            "effect on a single machine.",
            "cancel_retries",
        ),
    ] = None

    def violations(self) -> Iterator[RuleViolation]:
        """Yield that there is no pattern, or that it is not a regular expression."""
        if self.pattern is None:
            if self.name is None:
                yield RuleViolation(("pattern",), "it is required", "Write, for example, pattern: CUDA out of memory.")
            return
        try:
            re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            yield RuleViolation(
                ("pattern",),
                f"it is not a regular expression ({error})",
                "Put \\ before characters that are meant literally.",
            )

    def ignored_keys(self) -> Iterator[Path]:
        """Yield the keys that apply only to a cluster."""
        if self.pattern is None:
            yield ("name",)
        elif self.action == "exclude_node":
            yield ("action",)


class EnvironmentVariables(Section):
    """Variables for all trials, or by device. Each is a string `NAME=value`."""

    cpu: Annotated[list[str], key("Without a GPU.", ["NAME=value"])] = []
    cuda: Annotated[list[str], key("On NVIDIA GPUs.", ["NAME=value"])] = []
    rocm: Annotated[list[str], key("On AMD GPUs.", ["NAME=value"])] = []

    def violations(self) -> Iterator[RuleViolation]:
        """Yield the strings that set no variable."""
        for device in ("cpu", "cuda", "rocm"):
            yield from _invalid_variables(getattr(self, device), (device,))

    @pydantic.model_validator(mode="before")
    @classmethod
    def _list_is_for_all(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        if violations := list(_invalid_variables(value)):
            raise rule_error(violations)
        return {"cpu": value, "cuda": value, "rocm": value}


def _invalid_variables(variables: list[Any], above: Path = ()) -> Iterator[RuleViolation]:
    for index, variable in enumerate(variables):
        if not isinstance(variable, str) or not _VARIABLE.fullmatch(variable):
            yield RuleViolation((*above, index), "it is not a string of the form NAME=value", 'Write "NAME=value".')
        elif variable.endswith(f"={MASK}"):
            yield RuleViolation((*above, index), "its value is masked", "Write the actual value.")


class Environment(Section):
    """The environment of a trial's processes."""

    environment_variables: Annotated[
        EnvironmentVariables,
        key(
            "Variables for the trial's processes: a list of `NAME=value`, or a mapping of such lists by "
            "`cpu`, `cuda` and `rocm`. Their values are masked in all output and in stored configs.",
            ["OMP_NUM_THREADS=2"],
        ),
    ] = Field(default_factory=EnvironmentVariables)
    image: Annotated[Any, ignored("The container image.", "some/image:1.0")] = None
    force_pull_image: Annotated[Any, ignored("Whether to pull the container image again.", True)] = None
    registry_auth: Annotated[Any, ignored("Credentials for a container registry.", {"username": "me"})] = None
    ports: Annotated[Any, ignored("Ports of the container.", {})] = None
    proxy_ports: Annotated[Any, ignored("Ports that a cluster forwards.", [])] = None
    add_capabilities: Annotated[Any, ignored("Capabilities added to the container.", [])] = None
    drop_capabilities: Annotated[Any, ignored("Capabilities removed from the container.", [])] = None
    pod_spec: Annotated[Any, ignored("Settings for Kubernetes.", {})] = None
    slurm: Annotated[Any, ignored("Settings for Slurm.", {})] = None
    pbs: Annotated[Any, ignored("Settings for PBS.", {})] = None

    def variables(self, device: Literal["cpu", "cuda", "rocm"] = "cpu") -> dict[str, str]:
        """Return the variables of a process that trains on the device."""
        pairs: list[str] = getattr(self.environment_variables, device)
        return dict(pair.split("=", 1) for pair in pairs)


def _flag_or_options(value: Any) -> bool | dict[str, Any]:
    if isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return dict(value)
    raise rule_error([RuleViolation((), "it is not true, false or a mapping of options", "Write true or false.")])


class Optimizations(Section):
    """Faster training without a change to the program. Applies to `module:Class` entrypoints."""

    aggregation_frequency: Annotated[Positive, key("Number of batches for each optimizer step.", 4)] = 1
    average_aggregated_gradients: Annotated[
        bool, key("Whether to average the gradients of aggregated batches instead of summing them.", False)
    ] = True
    gradient_compression: Annotated[bool, key("Whether to exchange gradients in half precision.", True)] = False
    mixed_precision: Annotated[
        Literal["bf16", "fp16", "O0", "O1", "O2", "O3"] | None,
        key("`bf16` or `fp16` for autocast (fp16 with loss scaling); `O0` to `O3` as with apex.", "bf16"),
    ] = None
    compile: Annotated[
        bool | dict[str, Any],
        PlainValidator(_flag_or_options),
        key("Whether to compile models with `torch.compile`; a mapping sets its options.", {"dynamic": True}),
    ] = False
    channels_last: Annotated[bool, key("Whether to store models and batches of images with channels last.", True)] = (
        False
    )
    tf32: Annotated[
        bool | None, key("Whether GPUs may multiply fp32 matrices in TF32; null = the setting of torch.", True)
    ] = None
    cuda_graphs: Annotated[
        bool | dict[str, Any],
        PlainValidator(_flag_or_options),
        key("Whether to capture training steps as CUDA graphs; a mapping sets options.", True),
    ] = False
    fused_optimizer: Annotated[
        bool | None, key("`false` turns fused optimizers off; null = fused where possible.", False)
    ] = None
    average_training_metrics: Annotated[Any, ignored("Training metrics are always averaged over slots.", True)] = None
    tensor_fusion_threshold: Annotated[Any, ignored("A setting of Horovod.", 64)] = None
    tensor_fusion_cycle_time: Annotated[Any, ignored("A setting of Horovod.", 5)] = None
    auto_tune_tensor_fusion: Annotated[Any, ignored("A setting of Horovod.", False)] = None
