"""The protocols of executors and allocators, the run that an executor starts, and the exit that it reports."""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeAlias

from determined._home import Home, RunFolder
from determined.launch import is_class_entrypoint

if TYPE_CHECKING:
    from determined.experiment.config import ExperimentConfig

Device: TypeAlias = Literal["cpu", "cuda"]
Handle: TypeAlias = Mapping[str, Any]
"""What an executor finds a run by: JSON that means something to that executor only."""
Placement: TypeAlias = Mapping[str, Any]
"""Where a run may run: JSON from an allocator that means something to its executor only.

Its entry `slots` is a list with one entry for each slot that the trial got; the rest is up to the two.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The ranks of a run on one of several machines. An executor starts each group as a run of its own there."""

    number: int
    """Of the machine; that with number 0 has rank 0."""
    sizes: list[int]
    """The ranks on each machine."""
    addresses: list[str]
    """Of the machines."""
    port: int
    """Where the ranks meet, on the first machine."""

    @property
    def first_rank(self) -> int:
        return sum(self.sizes[: self.number])


STARTUP_HOOK = "startup-hook.sh"
"""A script of the program that bash runs before each run of a trial."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One run of a trial: what to start, where, and with which resources."""

    experiment_id: int
    trial_id: int
    run_id: int
    entrypoint: str | list[str]
    """`module:Class` names a trial class; any other string is for `sh -c`; a list is a program and its arguments."""
    code: pathlib.Path
    """The working folder: a snapshot of the program."""
    folder: pathlib.Path
    """The run's own folder, for its output and its exit; the executor makes it."""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """Variables besides those of the executor. Those that do not begin with DET_ should be the same for all runs of an
    executor: after each change, the next class entrypoint starts slowly."""
    ranks: int = 1
    """Processes of a class entrypoint; a script is started once and starts its ranks itself."""
    placement: Placement = dataclasses.field(default_factory=dict)
    """What the allocator gave; an executor of another kind leaves out what it does not know."""
    group: RankGroup | None = None
    """Which ranks these are, if the run is on several machines; `ranks` counts them."""
    grace_period: float = 3600.0
    """Seconds from a request to stop to the kill."""
    patterns: list[str] = dataclasses.field(default_factory=list)
    """Regular expressions to look for in the output."""

    @property
    def is_class(self) -> bool:
        return isinstance(self.entrypoint, str) and is_class_entrypoint(self.entrypoint)

    @property
    def has_startup_hook(self) -> bool:
        """Whether the program has a script to run first."""
        return (self.code / STARTUP_HOOK).is_file()

    @property
    def files(self) -> RunFolder:
        return RunFolder(self.folder)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON mapping that `from_json` reads back."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        group = None if self.group is None else dataclasses.asdict(self.group)
        return fields | {"code": str(self.code.absolute()), "folder": str(self.folder.absolute()), "group": group}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return what `to_json` was called on."""
        paths = {name: pathlib.Path(value[name]) for name in ("code", "folder")}
        group = value.get("group")
        return cls(**{**value, **paths, "group": None if group is None else RankGroup(**group)})


class EndReason(enum.Enum):
    """How a run ended."""

    COMPLETED = "COMPLETED"
    """By itself, without a failure."""
    FAILED = "FAILED"
    """With an exit status other than 0, or killed by somebody else."""
    STOPPED = "STOPPED"
    """In time after it was asked to."""
    KILLED = "KILLED"
    """By its executor, on request or after the grace period; or together with the process that supervised it."""
    INVALID_HP = "INVALID_HP"
    """Because the trial gave up on its hyperparameters."""
    INTERRUPTED = "INTERRUPTED"
    """By its cluster, or together with its machine, which is no failure of the trial."""
    NOT_STARTED = "NOT_STARTED"
    """Before any training: the entrypoint cannot be run."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunExit:
    """How a run ended."""

    trial_id: int
    run_id: int
    reason: EndReason
    message: str = ""
    """One line for people: of a failure, the last line of the traceback."""
    status: int | None = None
    """The exit status of the rank that failed first, by the convention of shells; None if unknown."""
    last_lines: tuple[str, ...] = ()
    """The end of that rank's error output."""
    blamed: int | None = None
    """The rank because of which that rank failed, as it said itself."""
    matches: dict[str, str] = dataclasses.field(default_factory=dict)
    """The patterns that were found in the output, with the first line for each."""
    runner_gone: bool = False
    """Whether the run was stopped because its runner had ended."""
    started: float = 0.0
    ended: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON mapping that `from_json` reads back."""
        return dataclasses.asdict(self) | {"reason": self.reason.value, "last_lines": list(self.last_lines)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return what `to_json` was called on."""
        return cls(**{**value, "reason": EndReason(value["reason"]), "last_lines": tuple(value["last_lines"])})

    @classmethod
    def of(cls, spec: RunSpec, reason: EndReason, message: str = "", **more: Any) -> Self:
        """Return the exit of a run that ends now."""
        values = {"ended": time.time(), **more}
        return cls(trial_id=spec.trial_id, run_id=spec.run_id, reason=reason, message=message, **values)


class Executor(Protocol):
    """Runs trials. Each trial has at most one run at a time; one thread calls all of these, and only `poll` waits."""

    def start(self, spec: RunSpec) -> None:
        """Begin a run. Whatever goes wrong is reported by its exit."""

    def handle(self, trial_id: int) -> Handle | None:
        """Return what `adopt` finds the run of a trial by; None if there is no run, or its handle is not known yet."""

    def stop(self, trial_id: int) -> None:
        """Ask a run to save and end; it is killed after its grace period. Ignores a trial without a run."""

    def kill(self, trial_id: int) -> None:
        """End a run at once. Ignores a trial without a run."""

    def poll(self, timeout_s: float | None) -> list[RunExit]:
        """Return the runs that have ended since the last call; waits up to `timeout_s` seconds for one."""

    def adopt(self, spec: RunSpec, handle: Handle | None) -> None:
        """Take over a run that an earlier runner started; `poll` reports its exit.

        `handle` is None if that runner ended before it could store one. A run that was never started counts as killed.
        """

    def close(self) -> None:
        """Release everything; runs that still go on are asked to stop."""


class Allocator(Protocol):
    """Gives the trials of one experiment a place to run, shared with other experiments."""

    @property
    def capacity(self) -> int:
        """How many slots there are."""

    @property
    def device(self) -> Device:
        """What a slot computes with."""

    def allowance(self, wanted: int, priority: int | None) -> int:
        """Return how many of the `wanted` slots the experiment may hold now."""

    def take(self, trial_id: int, slots: int) -> Placement | None:
        """Reserve up to `slots` slots for a trial, as many as are free; None if too few are for any trial."""

    def attach(self, trial_id: int, handle: Handle) -> None:
        """Let a run hold the slots of its trial, so that they are free once that run and this runner are gone."""

    def release(self, trial_id: int) -> None:
        """Free the slots of a trial."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The experiment that a runner runs on a cluster."""

    experiment_id: int
    config: ExperimentConfig
    home: Home


class RunnerProcess(Protocol):
    """A runner that was just started."""

    @property
    def pid(self) -> int:
        """Its process id on the machine where it runs."""

    def poll(self) -> int | None:
        """Return its exit status; None while it lives."""


class Cluster(Protocol):
    """Where experiments run: one machine or many. A subpackage with a module `_cluster` that has `connect`.

    Each process that deals with an experiment makes its own. To make one costs little and changes nothing.
    """

    def check(self, config: ExperimentConfig) -> None:
        """Raise `InvalidExperimentException` if an experiment with this config cannot run here."""

    def start_runner(self, command: Sequence[str], environment: Mapping[str, str], job: Job) -> RunnerProcess:
        """Start the process that runs an experiment; it outlives this process and writes to the log of the runner."""

    def open(self, job: Job) -> AbstractContextManager[tuple[Allocator, Executor]]:
        """Give the runner of an experiment, for a block, what it places and runs trials with."""
