"""The record of this run in the tracking database."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import pathlib
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from determined import errors, tracking
from determined._database_location import shown
from determined._home import home
from determined._info import ClusterInfo
from determined._secrets import mask_storage
from determined._version import VERSION
from determined.core._outbox import Outbox
from determined.core.distributed import DistributedContext

logger = logging.getLogger("determined.core")

T = TypeVar("T")

_MAX_UNWRITTEN = 100_000
_MAX_PER_TRANSACTION = 1000
_GIT_TIMEOUT_S = 10
_RETRY_S = 1.0
_VALIDATION = "validation"
# A local run opens the database this late, or with its first report. Opening it at once would take the interpreter
# from the program, and delay its imports and its first batch.
_OPEN_WITHIN_S = 5.0

UNRECORDED_ID = 0
"""Experiment and trial id of a run that could not be recorded."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a program says about its run."""

    name: str
    config: Mapping[str, Any] | None
    hparams: Mapping[str, Any]
    seed: int


class RunRecorder:
    """Registers this run in the tracking database and writes its history, on the outbox's thread.

    What needs the ids of the run waits until the database is open. Without an outbox nothing is recorded: workers have
    none, as the chief records for all ranks.
    """

    def __init__(self, facts: RunFacts, info: ClusterInfo | None, outbox: Outbox | None) -> None:
        self._home = home()
        self.database = self._home.database
        self._facts = facts
        self._info = info
        self._outbox = outbox
        self._ids = (info.trial.experiment_id, info.trial.trial_id) if info else (UNRECORDED_ID, UNRECORDED_ID)
        self._writer: tracking.TrialWriter | tracking.RelayedWriter | None = None
        self._unwritten: list[tracking.Message] = []
        self._is_on = False  # the database is open, or will be tried again because it was full or away
        self._has_warned = False
        self._will_retry = False
        self._has_dropped = False
        self._lock = threading.Lock()  # of what is unwritten: the training thread can wait for it, too
        # Started on this thread: loader workers forked meanwhile would keep a pipe open that the other waits on.
        self._git = _start_git() if outbox and not info else None
        self._opened = threading.Event()
        if outbox is not None:
            outbox.put(self._open, None, within_s=0 if info else _OPEN_WITHIN_S)

    @property
    def experiment_id(self) -> int:
        """The id under which `det experiment describe` shows this run."""
        return self._current_ids()[0]

    @property
    def trial_id(self) -> int:
        """The id under which `det trial describe` shows this run."""
        return self._current_ids()[1]

    @property
    def tensorboard_path(self) -> pathlib.Path:
        """The folder of this trial's TensorBoard files."""
        return self._home.tensorboard(*self._current_ids())

    @property
    def tensorboard_prefix(self) -> str:
        """Where a checkpoint store has them."""
        return self._home.tensorboard_prefix(*self._current_ids())

    @property
    def origin(self) -> dict[str, Any]:
        """The run as a checkpoint names it, so that `det gc` can record the checkpoint if the run dies before."""
        experiment_id, trial_id = self._current_ids()
        return {"database": self._home.database_name, "experiment_id": experiment_id, "trial_id": trial_id}

    @property
    def is_recorded(self) -> bool:
        """Whether this process records the run."""
        self.wait()
        return self._writer is not None

    def wait(self) -> None:
        """Wait until the database is open, or has failed to open."""
        if self._outbox is not None and not self._opened.is_set():
            self._outbox.hurry()
            self._opened.wait()

    def share_ids(self, distributed: DistributedContext) -> None:
        """Give all ranks the ids of the run. All ranks must call this."""
        self._ids = distributed.broadcast(self._current_ids())

    def put(self, message: tracking.Message) -> None:
        """Add a message to the record; returns at once."""
        if self._outbox is not None:
            self._outbox.put(self._write, message)
            if isinstance(message, tracking.MetricReport) and self._is_urgent(message):
                self._outbox.hurry()

    def _is_urgent(self, report: tracking.MetricReport) -> bool:
        if not self._opened.is_set():  # so that opening the database does not make the first report late
            return True
        # A search waits for validations, and what the trial trains until then may be wasted.
        return self._info is not None and report.group == _VALIDATION

    def flush(self) -> None:
        """Wait until all messages are written, or kept because the database cannot be written now."""
        if self._outbox is not None:
            self._outbox.flush()

    def confirm(self) -> None:
        """Wait until all messages are in the database; raise what prevents it."""
        self.flush()
        if self._unwritten:
            self._when_server_answers(self._write_all)

    def best_validation(self, metric: str, smaller_is_better: bool) -> float | None:
        """Return the experiment's best recorded validation of a metric; None on workers."""
        self.flush()
        if (writer := self._writer) is None:
            return None
        return self._when_server_answers(lambda: writer.best_validation(metric, smaller_is_better))

    def earlier_checkpoints(self) -> list[tracking.CheckpointRecord]:
        """Return the checkpoints to continue this run from, newest first: of its trial, or locally of its name."""
        self.wait()
        if not self._is_on:
            return []
        if isinstance(self._writer, tracking.RelayedWriter):
            return _present(self._writer.checkpoints())
        records = tracking.TrackingReader(self.database)
        if self._info is not None:
            found = records.checkpoints(trial_id=self._info.trial.trial_id)
        else:
            found = records.checkpoints_of_experiments(self._facts.name)
        return _present(found)

    def close(self) -> None:
        """Close the database, after all is written to it; waits for a server that is away. Close the outbox first."""
        if self._unwritten:
            with contextlib.suppress(errors.TrackingException):  # the error below says what to do
                self._has_warned = False  # so that it is said again what this waits for
                self._when_server_answers(self._write_all)
        if self._writer is not None:
            self._writer.close()
        if self._unwritten:
            raise errors.DatabaseException(
                f"{len(self._unwritten)} reports of this run are not in {shown(self.database)}, which could not be "
                "written; the checkpoints are safe. Make room or permission there, or set DET_HOME to another folder."
            )

    def _current_ids(self) -> tuple[int, int]:
        # Asked for each time: they change if the database is replaced during the run.
        if self._info is None:
            self.wait()
            if self._writer is not None:
                return self._writer.experiment_id, self._writer.trial_id
        return self._ids

    def _open(self, _: Sequence[None]) -> None:
        try:
            self._writer = self._open_writer()
            self._is_on = True
        except ImportError as error:
            warnings.warn(
                f"This run is not recorded, because {error.name} is not installed; "
                f"`pip install {error.name}` makes `det experiment list` show it.",
                stacklevel=1,
            )
        except errors.TrackingException as error:
            # A run of an experiment was on record before it began; a script says at once what is wrong.
            if not (tracking.lacks_room(error) or (self._info is not None and tracking.is_away(error))):
                raise
            self._is_on = True
            self._warn(error)
        finally:
            self._opened.set()

    def _open_writer(self) -> tracking.TrialWriter | tracking.RelayedWriter:
        commit = self._git_commit  # first: the process must be waited for even if SQLAlchemy cannot be imported
        if self._info is not None:
            trial = self._info.trial
            run_id = trial._trial_run_id or None
            if (relay := tracking.relay()) is not None:
                return tracking.RelayedWriter(relay, trial.experiment_id, trial.trial_id, run_id)
            return tracking.TrialWriter.attach(self.database, trial.experiment_id, trial.trial_id, run_id)
        return tracking.TrialWriter.start(self.database, _describe(self._facts, commit))

    @functools.cached_property
    def _git_commit(self) -> str | None:
        """The commit of the program, with a mark if tracked files differ from it; None without git."""
        if self._git is None:
            return None
        with self._git as process:
            try:
                output, _ = process.communicate(timeout=_GIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                return None
        return output.strip() if process.returncode == 0 else None

    def _write(self, messages: Sequence[tracking.Message]) -> None:
        """Write to the database; keep what it does not take now, so that training continues."""
        if not self._is_on or self._outbox is None:
            return
        with self._lock:
            self._unwritten += messages
        try:
            self._write_all()
        except errors.TrackingException as error:
            self._warn(error)
            self._drop_oldest()
            if not self._will_retry:
                self._will_retry = True
                self._outbox.put_again(self._write_again, within_s=_RETRY_S)

    def _write_again(self, _: Sequence[None]) -> None:
        self._will_retry = False
        self._write([])

    def _drop_oldest(self) -> None:
        """Keep what waits in bounds by dropping training reports, not what the search or a resume goes by."""
        with self._lock:
            excess = len(self._unwritten) - _MAX_UNWRITTEN
            if excess <= 0:
                return
            minor = [
                place
                for place, one in enumerate(self._unwritten)
                if isinstance(one, tracking.MetricReport) and one.group != _VALIDATION
            ]
            dropped = set(minor[:excess])
            self._unwritten = [one for place, one in enumerate(self._unwritten) if place not in dropped]
            if dropped and not self._has_dropped:
                self._has_dropped = True
                logger.warning(
                    "More than %d reports wait to be written: from now on the oldest training reports are dropped.",
                    _MAX_UNWRITTEN,
                )

    def _when_server_answers(self, action: Callable[[], T]) -> T:
        """Return what an action returns, repeated while the server of the database is away."""
        while True:
            try:
                return action()
            except errors.TrackingException as error:
                if not tracking.is_away(error):
                    raise
                self._warn(error)
            time.sleep(_RETRY_S)

    def _write_all(self) -> None:
        with self._lock:
            self._write_unwritten()
            if self._has_warned:
                self._has_warned = False
                logger.info("The record of this run is written again.")

    def _write_unwritten(self) -> None:
        if self._writer is None:
            self._writer = self._open_writer()
        if self._writer.follow_database():
            logger.warning(
                "The tracking database %s was deleted, moved or replaced during this run. The run continues in the one "
                "that is there now, with what was on record of it, as trial %d of experiment %d.",
                shown(self.database),
                self._writer.trial_id,
                self._writer.experiment_id,
            )
        while self._unwritten:
            # In parts, so that a failing attempt costs little however much there is to write.
            self._writer.write(self._unwritten[:_MAX_PER_TRANSACTION])
            del self._unwritten[:_MAX_PER_TRANSACTION]

    def _warn(self, error: errors.TrackingException) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The record of this run cannot be written: %s Training continues, and writing is tried again "
                "until it succeeds.",
                error,
            )


def _present(found: Sequence[tracking.CheckpointRecord]) -> list[tracking.CheckpointRecord]:
    """Return the checkpoints whose files are there, the newest first."""
    return [one for one in reversed(found) if one.state is tracking.CheckpointState.COMPLETED]


def checked_metadata(owner: str, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of the metadata as it will be read back; `owner` names it in errors."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"The {owner} metadata {metadata!r} must be a dict.")
    try:
        return dict(json.loads(json.dumps(dict(metadata or {}))))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"The {owner} metadata {metadata!r} cannot be kept as JSON: {error}; use dicts, lists, strings and numbers."
        ) from error


def _describe(facts: RunFacts, git_commit: str | None) -> tracking.RunDescription:
    process = tracking.RunProcess.current()
    torch = sys.modules.get("torch")
    return tracking.RunDescription(
        name=facts.name,
        config=None if facts.config is None else mask_storage(facts.config),
        hparams=facts.hparams,
        seed=facts.seed,
        entrypoint=" ".join(sys.argv) or sys.executable,
        torch_version=str(torch.__version__) if torch else None,
        resolute_version=VERSION,
        git_commit=git_commit,
        pid=process.pid,
        process_started=process.started,
        host=process.host,
        identity=None if process.identity is None else process.identity.to_json(),
    )


def _start_git() -> subprocess.Popen[str] | None:
    """Start the git command that prints the program's commit; None without git."""
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return subprocess.Popen(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+changes", "--match="],
            cwd=pathlib.Path(program).absolute().parent if program else pathlib.Path.cwd(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError:
        return None
