"""What an executor is told of a run, what it tells of its end, and what every executor can do."""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

from determined._home import RunFolder

if TYPE_CHECKING:
    from determined.tracking import RunProcess

STARTUP_HOOK = "startup-hook.sh"
"""A script of the program that bash runs before each run of a trial."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One run of a trial: what to start, where, and with which resources."""

    experiment_id: int
    trial_id: int
    run_id: int
    entrypoint: str | list[str]
    """`module:Class` names a trial class; any other text is for `sh -c`; a list is a program and its arguments."""
    code: pathlib.Path
    """The working folder: a snapshot of the program."""
    folder: pathlib.Path
    """The run's own folder, for its output and its end; it is made."""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """Variables beside those of the executor. Those that do not begin with DET_ are best the same for all runs of an
    executor: with each change, the next class entrypoint starts slowly."""
    ranks: int = 1
    """Processes of a class entrypoint; a script is started once and starts its ranks itself."""
    threads: int = 1
    """Compute threads of each process."""
    gpus: list[str] = dataclasses.field(default_factory=list)
    """The GPUs that it sees, by numbers or UUIDs."""
    patience: float = 3600.0
    """Seconds from a request to stop to the kill."""
    patterns: list[str] = dataclasses.field(default_factory=list)
    """Regular expressions to look for in the output."""

    @property
    def is_class(self) -> bool:
        """Whether the entrypoint is a trial class."""
        return isinstance(self.entrypoint, str) and is_class_entrypoint(self.entrypoint)

    @property
    def has_startup_hook(self) -> bool:
        """Whether the program has a script to run first."""
        return (self.code / STARTUP_HOOK).is_file()

    @property
    def files(self) -> RunFolder:
        """The files of the run's folder."""
        return RunFolder(self.folder)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON map that `from_json` reads back."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"code": str(self.code.absolute()), "folder": str(self.folder.absolute())}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return what `to_json` was called on."""
        paths = {name: pathlib.Path(value[name]) for name in ("code", "folder")}
        return cls(**{**value, **paths})


def is_class_entrypoint(text: str) -> bool:
    """Say whether an entrypoint is written as `module:Class`."""
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *name.split(".")))


class EndReason(enum.Enum):
    """How a run ended."""

    COMPLETED = "COMPLETED"
    """By itself, without a failure."""
    FAILED = "FAILED"
    """With an exit status other than 0, or killed by somebody else."""
    STOPPED = "STOPPED"
    """In time after it was asked to."""
    KILLED = "KILLED"
    """By its executor, which was told to, or had asked for a stop in vain; or together with its keeper."""
    INVALID_HP = "INVALID_HP"
    """Because the trial gave up on its hyperparameters."""
    NOT_STARTED = "NOT_STARTED"
    """Before any training: the entrypoint cannot be run."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunExit:
    """The end of a run."""

    trial_id: int
    run_id: int
    reason: EndReason
    message: str = ""
    """One line for people: of a failure, the last line of the traceback."""
    status: int | None = None
    """The exit status by the convention of shells, of the rank that failed first; None if nobody saw it."""
    last_lines: tuple[str, ...] = ()
    """The end of that rank's error output."""
    matches: dict[str, str] = dataclasses.field(default_factory=dict)
    """The patterns that were found in the output, with the first line for each."""
    runner_gone: bool = False
    """Whether the run was stopped because its runner had ended."""
    started: float = 0.0
    ended: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON map that `from_json` reads back."""
        return dataclasses.asdict(self) | {"reason": self.reason.value, "last_lines": list(self.last_lines)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return what `to_json` was called on."""
        return cls(**{**value, "reason": EndReason(value["reason"]), "last_lines": tuple(value["last_lines"])})

    @classmethod
    def of(cls, spec: RunSpec, reason: EndReason, message: str = "", **more: Any) -> Self:
        """Return the end of a run that ends now."""
        values = {"ended": time.time(), **more}
        return cls(trial_id=spec.trial_id, run_id=spec.run_id, reason=reason, message=message, **values)


class Executor(Protocol):
    """Runs trials. Each trial has at most one run at a time; one thread calls all of these."""

    def start(self, spec: RunSpec) -> None:
        """Begin a run; returns at once. Whatever goes wrong is told by its end."""

    def stop(self, trial_id: int) -> None:
        """Ask a run to save and end; it is killed after its patience. A trial without a run is passed over."""

    def kill(self, trial_id: int) -> None:
        """End a run at once. A trial without a run is passed over."""

    def ended(self, timeout: float | None) -> list[RunExit]:
        """Return the runs that have ended since the last call; waits for one, up to so many seconds."""

    def adopt(self, spec: RunSpec) -> None:
        """Take over a run that an earlier runner started; returns at once, `ended` tells its end.

        It stops by itself, since its runner is gone. One that was never started counts as killed.
        """

    def process(self, trial_id: int) -> RunProcess | None:
        """Return the process that stands for a run; None if there is none, or none yet."""

    def fileno(self) -> int:
        """Return a file descriptor that is readable when `ended` has something to do, for `select` and the like."""

    def close(self) -> None:
        """Let go of everything; runs that still go on are asked to stop."""
