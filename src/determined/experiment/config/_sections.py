"""The small sections of an experiment config."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, PlainValidator

from determined._secrets import MASK
from determined.experiment.config._section import Natural, Path, Positive, RuleViolation, Section, Text, broken, inert

_VARIABLE = re.compile(r"[^\W\d]\w*=.*", re.DOTALL | re.ASCII)


class Resources(Section):
    """What of the machine an experiment may use. A slot is a GPU, or a part of the CPU where there is none."""

    slots_per_trial: Annotated[
        Positive, Field(description="How many slots a trial trains on, each with a process of its own.", examples=[2])
    ] = 1
    max_slots: Annotated[
        Positive | None, Field(description="The most slots that the experiment takes at once.", examples=[4])
    ] = None
    priority: Annotated[
        int | None,
        Field(ge=1, le=99, description="Which experiments get slots first; 1 comes before 99.", examples=[42]),
    ] = None
    weight: Annotated[Any, inert("Share of a cluster's slots.", 1)] = None
    resource_pool: Annotated[Any, inert("Which machines of a cluster.", "a100")] = None
    shm_size: Annotated[Any, inert("Shared memory of a container.", "4 GiB")] = None
    is_single_node: Annotated[Any, inert("Whether a trial stays on one machine of a cluster.", True)] = None
    devices: Annotated[Any, inert("Devices of a container.", [])] = None

    def breaches(self) -> Iterator[RuleViolation]:
        """Yield that no trial can ever start."""
        if self.max_slots is not None and self.slots_per_trial > self.max_slots:
            yield RuleViolation(
                ("slots_per_trial",),
                f"a trial that needs {self.slots_per_trial} slots never fits into max_slots={self.max_slots}",
                f"Write max_slots: {self.slots_per_trial}, or fewer slots_per_trial.",
            )


class Reproducibility(Section):
    """Where random numbers come from."""

    experiment_seed: Annotated[
        int,
        Field(
            ge=0,
            le=2**32 - 1,
            description="Rules which hyperparameters are drawn, and the seeds of the trials.",
            examples=[42],
            json_schema_extra={"default": "the time in seconds"},
        ),
    ] = Field(default_factory=lambda: int(time.time()) % 2**32)


class Profiling(Section):
    """System metrics and times of the training loop's stages. Acts on `module:Class` entrypoints."""

    enabled: Annotated[bool, Field(description="Whether they are collected.", examples=[True])] = False
    begin_on_batch: Annotated[
        Natural, Field(description="The first batch of which they are collected.", examples=[100])
    ] = 0
    end_after_batch: Annotated[
        Natural | None, Field(description="The last such batch; null = the last of all.", examples=[200])
    ] = None
    sync_timings: Annotated[bool, Field(description="Whether each timing waits for the GPU.", examples=[False])] = True

    def breaches(self) -> Iterator[RuleViolation]:
        """Yield that it ends before it begins."""
        if self.end_after_batch is not None and self.end_after_batch < self.begin_on_batch:
            yield RuleViolation(
                ("end_after_batch",),
                f"it is before begin_on_batch={self.begin_on_batch}",
                f"Write end_after_batch: {self.begin_on_batch + 100}.",
            )


class RetentionPolicy(Section):
    """What is removed after a time."""

    log_retention_days: Annotated[
        int | None,
        Field(ge=-1, le=32767, description="How many days logs are kept; -1 and null = forever.", examples=[90]),
    ] = None


class LogPolicy(Section):
    """What happens when a trial writes a line that matches a pattern."""

    name: Annotated[Text | None, Field(description="What people call it.", examples=["out of memory"])] = None
    pattern: Annotated[
        Text | None,
        Field(
            description="A regular expression, searched for in every line. A policy with a `name` and no pattern "
            "changed a default policy of a cluster; there are none here, so it has no effect.",
            examples=["CUDA out of memory"],
        ),
    ] = None
    action: Annotated[
        Literal["cancel_retries", "exclude_node"] | None,
        Field(
            description="`cancel_retries`: a failure of this trial is final. `exclude_node` is accepted, without "
            "effect on a single machine.",
            examples=["cancel_retries"],
        ),
    ] = None

    def breaches(self) -> Iterator[RuleViolation]:
        """Yield that there is no pattern, or that it is not a regular expression."""
        if self.pattern is None:
            if self.name is None:
                yield RuleViolation(("pattern",), "it is required", "Write, for example, pattern: CUDA out of memory.")
            return
        try:
            re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            yield RuleViolation(
                ("pattern",), f"it is not a regular expression ({error})", "Put \\ before signs meant literally."
            )

    def inert_keys(self) -> Iterator[Path]:
        """Yield what only a cluster can do."""
        if self.pattern is None:
            yield ("name",)
        elif self.action == "exclude_node":
            yield ("action",)


class EnvironmentVariables(Section):
    """Variables for all trials, or by what a trial trains on. Each is a text `NAME=value`."""

    cpu: Annotated[list[str], Field(description="Where there is no GPU.", examples=[["NAME=value"]])] = []
    cuda: Annotated[list[str], Field(description="On NVIDIA GPUs.", examples=[["NAME=value"]])] = []
    rocm: Annotated[list[str], Field(description="On AMD GPUs.", examples=[["NAME=value"]])] = []

    def breaches(self) -> Iterator[RuleViolation]:
        """Yield the texts that set no variable."""
        for device in ("cpu", "cuda", "rocm"):
            yield from _bad_variables(getattr(self, device), (device,))

    @pydantic.model_validator(mode="before")
    @classmethod
    def _list_is_for_all(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        if breaches := list(_bad_variables(value)):
            raise broken(breaches)
        return {"cpu": value, "cuda": value, "rocm": value}


def _bad_variables(texts: list[Any], above: Path = ()) -> Iterator[RuleViolation]:
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not _VARIABLE.fullmatch(text):
            yield RuleViolation((*above, index), "it is not a text of the form NAME=value", 'Write "NAME=value".')
        elif text.endswith(f"={MASK}"):
            yield RuleViolation((*above, index), "its value is masked", "Write the value itself.")


class Environment(Section):
    """What a trial's processes find around them."""

    environment_variables: Annotated[
        EnvironmentVariables,
        Field(
            description="Variables for the trial's processes: a list of `NAME=value`, or a map of such lists by "
            "`cpu`, `cuda` and `rocm`. Their values are masked wherever the config is shown or kept.",
            examples=[["OMP_NUM_THREADS=2"]],
        ),
    ] = Field(default_factory=EnvironmentVariables)
    image: Annotated[Any, inert("The container.", "some/image:1.0")] = None
    force_pull_image: Annotated[Any, inert("Whether the container is fetched anew.", True)] = None
    registry_auth: Annotated[Any, inert("Access to a registry of containers.", {"username": "me"})] = None
    ports: Annotated[Any, inert("Ports of the container.", {})] = None
    proxy_ports: Annotated[Any, inert("Ports that a cluster passes on.", [])] = None
    add_capabilities: Annotated[Any, inert("Rights of the container.", [])] = None
    drop_capabilities: Annotated[Any, inert("Rights that the container lacks.", [])] = None
    pod_spec: Annotated[Any, inert("Settings for Kubernetes.", {})] = None
    slurm: Annotated[Any, inert("Settings for Slurm.", {})] = None
    pbs: Annotated[Any, inert("Settings for PBS.", {})] = None

    def variables(self, device: Literal["cpu", "cuda", "rocm"] = "cpu") -> dict[str, str]:
        """Return the variables of a process that trains on such a device."""
        pairs: list[str] = getattr(self.environment_variables, device)
        return dict(pair.split("=", 1) for pair in pairs)


def _flag_or_options(value: Any) -> bool | dict[str, Any]:
    if isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return dict(value)
    raise broken([RuleViolation((), "it is neither true nor false nor a map of options", "Write true or false.")])


class Optimizations(Section):
    """What makes training faster without a change to the program. Acts on `module:Class` entrypoints."""

    aggregation_frequency: Annotated[
        Positive, Field(description="Optimizers step once in so many batches.", examples=[4])
    ] = 1
    average_aggregated_gradients: Annotated[
        bool, Field(description="Whether gradients of aggregated batches are averaged, not summed.", examples=[False])
    ] = True
    gradient_compression: Annotated[
        bool, Field(description="Whether processes exchange gradients in half precision.", examples=[True])
    ] = False
    mixed_precision: Annotated[
        Literal["bf16", "fp16", "O0", "O1", "O2", "O3"] | None,
        Field(
            description="`bf16` or `fp16` for autocast (fp16 with loss scaling); `O0` to `O3` as with apex.",
            examples=["bf16"],
        ),
    ] = None
    compile: Annotated[
        bool | dict[str, Any],
        PlainValidator(_flag_or_options),
        Field(
            description="Whether models are compiled with `torch.compile`; a map gives its options.",
            examples=[{"dynamic": True}],
        ),
    ] = False
    channels_last: Annotated[
        bool,
        Field(description="Whether models and batches of images are kept with their channels last.", examples=[True]),
    ] = False
    tf32: Annotated[
        bool | None,
        Field(
            description="Whether GPUs may multiply fp32 matrices with fewer bits; null = as torch is set.",
            examples=[True],
        ),
    ] = None
    cuda_graphs: Annotated[
        bool | dict[str, Any],
        PlainValidator(_flag_or_options),
        Field(
            description="Whether training steps are recorded and replayed on the GPU; a map gives options.",
            examples=[True],
        ),
    ] = False
    fused_optimizer: Annotated[
        bool | None,
        Field(
            description="`false` keeps optimizers from stepping in one kernel on the GPU; null = where it can be.",
            examples=[False],
        ),
    ] = None
    average_training_metrics: Annotated[Any, inert("Training metrics are always averaged over slots.", True)] = None
    tensor_fusion_threshold: Annotated[Any, inert("A setting of Horovod.", 64)] = None
    tensor_fusion_cycle_time: Annotated[Any, inert("A setting of Horovod.", 5)] = None
    auto_tune_tensor_fusion: Annotated[Any, inert("A setting of Horovod.", False)] = None
