"""The record of this run in the tracking database."""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from determined import errors, tracking
from determined._home import Home
from determined._info import ClusterInfo
from determined._version import VERSION
from determined.core._distributed import DistributedContext
from determined.core._outbox import Outbox

if TYPE_CHECKING:
    from determined.tracking import Message, Recorder

logger = logging.getLogger("determined.core")

_MOST_UNWRITTEN = 100_000
_MOST_AT_ONCE = 1000

UNRECORDED_ID = 0
"""Experiment and trial id of a run that could not be recorded."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a local run is, as far as its program says."""

    name: str
    config: Mapping[str, Any] | None
    hparams: Mapping[str, Any]
    seed: int


class Recording:
    """Register this run in the tracking database and write its history, on the outbox's thread.

    The database is opened in the background, since that takes longer than starting to train;
    `experiment_id` and `trial_id` wait for it.
    """

    _waits_for_room = False  # whether the database could not be opened for want of it, and may be later

    def __init__(self, outbox: Outbox, home: Home, facts: RunFacts, info: ClusterInfo | None) -> None:
        self._outbox = outbox
        self._home = home
        self._facts = facts
        self._info = info
        self._recorder: Recorder | None = None
        # Started on this thread: loader workers forked meanwhile would keep a pipe open that the other waits on.
        self._git = None if info else _ask_git()
        self._opened = threading.Event()
        self._unwritten: list[Message] = []
        self._has_complained = False
        # Locally a moment later, when training has begun: the first batch comes sooner if it need not share Python.
        outbox.put(self._open, None, urgent=info is not None)

    @property
    def experiment_id(self) -> int:
        """The id under which `det experiment describe` shows this run."""
        return self._info.trial.experiment_id if self._info else self._ids()[0]

    @property
    def trial_id(self) -> int:
        """The id under which `det trial describe` shows this run."""
        return self._info.trial.trial_id if self._info else self._ids()[1]

    def share_ids(self, distributed: DistributedContext) -> None:
        """Give all ranks the ids of the run. All ranks must call this."""
        self._take_ids(distributed.broadcast((self.experiment_id, self.trial_id)))

    def wait(self) -> None:
        """Wait until the database is open, or known not to open."""
        if not self._opened.is_set():
            self._outbox.hurry()
            self._opened.wait()

    @property
    def is_kept(self) -> bool:
        """Whether this run is in the database."""
        self.wait()
        return self._recorder is not None

    @property
    def database(self) -> pathlib.Path:
        """The tracking database."""
        return self._home.database

    @property
    def tensorboard_path(self) -> pathlib.Path:
        """The folder of this trial's TensorBoard files."""
        return self._home.tensorboard(self.experiment_id, self.trial_id)

    def put(self, message: Message) -> None:
        """Add to the record; returns at once."""
        # A search waits for validations: what a trial does before it is told to stop was in vain.
        is_awaited = isinstance(message, tracking.MetricReport) and message.group == "validation"
        self._outbox.put(self._write, message, urgent=is_awaited and self._info is not None)

    def confirm(self) -> None:
        """Wait until all that was put is in the database, or raise what keeps it out."""
        self._outbox.flush()
        if self._unwritten:
            self._write_all()

    def best_validation(self, metric: str, smaller_is_better: bool) -> float | None:
        """Return the experiment's best recorded validation of a metric."""
        self._outbox.flush()
        return self._recorder.best_validation(metric, smaller_is_better) if self._recorder else None

    def earlier_checkpoints(self) -> list[tracking.CheckpointRecord]:
        """Return the checkpoints to continue this run from, newest first: of its trial, or locally of its name."""
        if not self.is_kept and not self._waits_for_room:
            return []
        from determined.tracking import CheckpointState, Records

        records = Records(self._home.database)
        if self._info is not None:
            found = records.checkpoints(trial_id=self._info.trial.trial_id)
        else:
            found = records.checkpoints_of_experiments(self._facts.name)
        return [one for one in reversed(found) if one.state is CheckpointState.COMPLETED]

    @property
    def origin(self) -> dict[str, Any]:
        """What a checkpoint says of the run that saved it, so that it can be recorded later if a crash came first."""
        ids = {"experiment_id": self.experiment_id, "trial_id": self.trial_id}
        return {"database": str(self._home.database), **ids}

    def close(self) -> None:
        """Let go of the database. The outbox must have been closed before."""
        if self._recorder is not None:
            self._recorder.close()
        if self._unwritten:
            raise errors.TrackingException(
                f"{len(self._unwritten)} reports of this run are not in {self._home.database}, which could not be "
                "written; the checkpoints are safe. Make room or permission there, or set DET_HOME to another folder."
            )

    def _take_ids(self, ids: tuple[int, int]) -> None:
        """Do nothing: the chief gave them."""

    def _ids(self) -> tuple[int, int]:
        self.wait()
        if self._recorder is None:
            return UNRECORDED_ID, UNRECORDED_ID
        return self._recorder.experiment_id, self._recorder.trial_id

    def _open(self, _: Sequence[None]) -> None:
        try:
            self._recorder = self._opened_recorder()
        except ImportError as error:
            warnings.warn(
                f"This run is not recorded, because {error.name} is not installed; "
                f"`pip install {error.name}` makes `det experiment list` show it.",
                stacklevel=1,
            )
        except errors.TrackingException as error:
            if not tracking.lacks_room(error):
                raise
            self._waits_for_room = True
            self._complain(error)
        finally:
            self._opened.set()

    @functools.cached_property
    def _commit(self) -> str | None:
        return _answer_of(self._git)

    def _opened_recorder(self) -> Recorder:
        commit = self._commit
        from determined.tracking import Recorder

        if self._info is not None:
            trial = self._info.trial
            run_id = trial._trial_run_id or None
            return Recorder.attach(self._home.database, trial.experiment_id, trial.trial_id, run_id)
        return Recorder.start(self._home.database, _describe(self._facts, commit))

    def _write(self, messages: Sequence[Message]) -> None:
        """Write to the database; what it does not take now is kept, so that training need not end for it."""
        if self._recorder is None and not self._waits_for_room:
            return
        self._unwritten += messages
        try:
            self._write_all()
        except errors.TrackingException as error:
            self._complain(error)
            del self._unwritten[:-_MOST_UNWRITTEN]

    def _write_all(self) -> None:
        if self._recorder is None:
            self._recorder = self._opened_recorder()
        self._follow_database(self._recorder)
        while self._unwritten:
            # In parts, so that a vain attempt costs little however much there is to write.
            self._recorder.write(self._unwritten[:_MOST_AT_ONCE])
            del self._unwritten[:_MOST_AT_ONCE]

    def _follow_database(self, recorder: Recorder) -> None:
        """Notice when the database is deleted or moved under the run, and have the run on record again."""
        if recorder.follow_database():
            logger.warning(
                "The tracking database %s was deleted, moved or replaced during this run. The run goes on in the one "
                "that is there now, with what was on record of it, as trial %d of experiment %d.",
                self._home.database,
                recorder.trial_id,
                recorder.experiment_id,
            )

    def _complain(self, error: errors.TrackingException) -> None:
        if not self._has_complained:
            self._has_complained = True
            logger.warning(
                "The record of this run cannot be written: %s Training goes on, and writing is tried again with each "
                "report.",
                error,
            )


def _describe(facts: RunFacts, git_commit: str | None) -> tracking.RunDescription:
    process = tracking.RunProcess.current()
    torch = sys.modules.get("torch")
    return tracking.RunDescription(
        name=facts.name,
        config=facts.config,
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


def _ask_git() -> subprocess.Popen[str] | None:
    """Ask for the commit of the program, with a mark when tracked files differ from it; None without git."""
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


def _answer_of(process: subprocess.Popen[str] | None) -> str | None:
    """Return what a process printed; None if it failed or took too long."""
    if process is None:
        return None
    with process:
        try:
            answer, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            return None
    return answer.strip() if process.returncode == 0 else None


def now() -> float:
    """Return the time stamp of a record, in seconds since the epoch."""
    return time.time()
