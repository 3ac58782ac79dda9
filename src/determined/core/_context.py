"""The services of one trial process, opened and closed together."""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NoReturn

from determined import errors, storage, tensorboard, tracking
from determined._home import home, note_invalid_hp
from determined._info import get_cluster_info
from determined._packages import note_missing_package
from determined.core._checkpoint import CheckpointContext
from determined.core._outbox import Outbox
from determined.core._preempt import PreemptContext, PreemptMode
from determined.core._profiler import ProfilerContext
from determined.core._recorder import RunFacts, RunRecorder
from determined.core._searcher import SearcherContext
from determined.core._train import EarlyExitReason, ScalarLog, TrainContext
from determined.core.checkpoint_gc import expired_checkpoints
from determined.core.distributed import DistributedContext, HealthMonitor

logger = logging.getLogger("determined.core")

StorageLocation = str | os.PathLike[str] | Mapping[str, Any]


class TensorboardMode(enum.Enum):
    """Who writes TensorBoard files: `AUTO` writes curves of what is reported, `MANUAL` leaves all to the program."""

    AUTO = "AUTO"
    MANUAL = "MANUAL"


class Context:
    """Reporting, checkpoints, preemption and exchange between ranks, for one trial process.

    A context manager: leaving it writes what is buffered, records how the run ended, and closes everything.
    """

    def __init__(
        self,
        facts: RunFacts,
        *,
        distributed: DistributedContext | None = None,
        checkpoint_storage: StorageLocation | None = None,
        preempt_mode: PreemptMode = PreemptMode.WorkersAskChief,
        tensorboard_mode: TensorboardMode = TensorboardMode.AUTO,
    ) -> None:
        _check_member("preempt_mode", preempt_mode, PreemptMode)
        _check_member("tensorboard_mode", tensorboard_mode, TensorboardMode)
        store = storage.store_for(checkpoint_storage, home().checkpoints)
        section = checkpoint_storage if isinstance(checkpoint_storage, Mapping) else {}
        self._retention = storage.Retention.of_section(section)
        self.info = info = get_cluster_info()
        self.distributed = distributed = distributed or DistributedContext.single()
        if distributed.is_chief:
            store.begin()  # before the threads that a refusal would leave
        self._outbox = Outbox()
        self.recorder = RunRecorder(facts, info, self._outbox if distributed.is_chief else None)
        writes_scalars = distributed.is_chief and tensorboard_mode is TensorboardMode.AUTO
        self.scalars = ScalarLog(self._outbox, self.recorder, writes_scalars)
        self.train = TrainContext(self.recorder, self.scalars, tracking.searcher_metric(facts.config))
        self.checkpoint = CheckpointContext(distributed, store, self.recorder)
        self.preempt = PreemptContext(distributed, preempt_mode)
        exchange = distributed.exchange
        self.health = None if exchange is None else HealthMonitor(distributed, exchange, self.preempt)
        """The monitor of the other ranks; None for a process that trains alone."""
        self._tensorboard = self._mirrored_curves(store) if distributed.local_rank == 0 else None
        self.searcher = SearcherContext(distributed, facts.config, self.train.report_progress)
        self.profiler = ProfilerContext(
            lambda group, metrics: self.train.report_metrics(group, self.steps_completed, metrics)
        )
        self._is_closed = False
        self.steps_completed = 0
        """The latest step of the training, under which system metrics are recorded."""

    def _mirrored_curves(self, store: storage.CheckpointStore) -> storage.FolderMirror | None:
        """Return what keeps the TensorBoard files of this machine in an object store, beside the checkpoints."""
        if not isinstance(store, storage.FsspecStore):
            return None
        recorder = self.recorder
        return storage.FolderMirror(
            store, lambda: (recorder.tensorboard_path, recorder.tensorboard_prefix), "TensorBoard files"
        )

    def __enter__(self) -> Context:
        tensorboard.set_current(lambda: self.scalars.file)
        self.preempt.start()
        if self.health is not None:
            self.health.start(self._abort)
            self.recorder.share_ids(self.distributed)
        if self._tensorboard is not None:
            self._tensorboard.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_closed:
            return
        if error is not None:
            note_missing_package(error)
        self.preempt.listen()  # a signal that comes now must not keep the end from being written
        if self.health is not None and error is not None and not _is_orderly(error):
            if (elsewhere := self.health.explain(error)) is not None and not elsewhere.invalid_hp:
                self._stop_after(errors.PeerLostException(elsewhere.message(self.distributed.rank)))
            elif elsewhere is not None:
                error = errors.InvalidHP(elsewhere.reason)
        failure = self._leave(error)
        if failure is not None:
            if error is not None and not isinstance(error, errors.InvalidHP | SystemExit):
                # The error that the user sees stays the same, with a note about the other one.
                error.add_note(f"The end of the run could not be recorded: {type(failure).__name__}: {failure}")
                return
            raise failure
        if isinstance(error, errors.InvalidHP):
            raise SystemExit(0) from error
        if error is None and self.preempt.signum is not None:
            # The exit code by which shells report a process that a signal has ended.
            raise SystemExit(128 + self.preempt.signum)

    def _stop_after(self, error: errors.PeerLostException) -> NoReturn:
        """End this process because another rank has failed, whose traceback is the one to read."""
        failure = self._leave(error)
        sys.stderr.write(f"{error}\n" + (f"{failure}\n" if failure is not None else ""))
        raise SystemExit(1) from None

    def _abort(self, error: BaseException) -> None:
        """Record the end of a run whose main thread does not come back."""
        self._record_end(error)
        self._outbox.flush()

    def start(self) -> Context:
        """Do what entering the `with` block does; `close()` is its counterpart."""
        return self.__enter__()

    def close(self) -> None:
        """Do what leaving the `with` block does. Calling it twice is fine."""
        self.__exit__(None, None, None)

    def alert(self, title: str | None = None, description: str | None = None, level: str | None = "info") -> None:
        """Log a title and a description at a level, such as "info" or "error". No webhook is called."""
        number = logging.getLevelNamesMapping().get(str(level).upper(), logging.INFO)
        text = ": ".join(filter(None, (title, description)))
        logger.log(number, "Alert (logged only, as there are no webhooks): %s", text)

    def collect_checkpoints(self, metric: tuple[str, bool] | None, protected: str | None = None) -> list[str]:
        """Delete the experiment's checkpoints that `checkpoint_storage` does not ask to keep, and return their ids.

        `metric` decides which are the best: (name, smaller_is_better). The checkpoint `protected` is kept.
        """
        if self._retention is None or self.info is not None or not self.recorder.is_recorded:
            return []
        try:
            self.checkpoint.wait()
            self.recorder.confirm()
            records, stored = tracking.TrackingReader(self.recorder.database), self.checkpoint.store.list()
            expired = expired_checkpoints(records, stored, self.recorder.experiment_id, self._retention, metric)
            to_delete = [one.uuid for one in expired if one.uuid != protected]
            for uuid in to_delete:
                with contextlib.suppress(errors.CheckpointNotFoundException):  # another trial's run was faster
                    self.checkpoint.delete(uuid)
            return to_delete
        except (errors.TrackingException, errors.StorageException, OSError) as error:
            # The training is done and saved; failing to clean up must not fail the program.
            logger.warning("Some expired checkpoints could not be deleted: %s", error)
            return []

    def flush(self) -> None:
        """Wait until everything reported so far is written."""
        self.scalars.flush()

    def _leave(self, error: BaseException | None) -> Exception | None:
        """Record how the run ended and close everything; return the first failure to write."""
        failures: list[Exception] = []

        def attempt(action: Callable[..., None], *args: Any) -> None:
            try:
                action(*args)
            except Exception as failure:
                failures.append(failure)

        self._is_closed = True
        with contextlib.ExitStack() as stack:  # closes everything even if a second interrupt comes
            # Closed last: until everything is written, a signal must not end the process.
            stack.callback(attempt, self.preempt.close)
            stack.callback(attempt, self.distributed.close)
            if self.health is not None:
                failed = not _is_orderly(error) and not isinstance(error, errors.InvalidHP)
                stack.callback(attempt, functools.partial(self.health.close, failed=failed))
            stack.callback(attempt, self.recorder.close)
            if self._tensorboard is not None:
                stack.callback(attempt, self._tensorboard.close)
            stack.callback(attempt, self.scalars.close)
            stack.callback(attempt, self._outbox.close)
            stack.callback(attempt, tensorboard.set_current, None)
            stack.callback(attempt, self.profiler.off)
            attempt(self.flush)
            if not isinstance(error, KeyboardInterrupt):  # which is to end the process now
                attempt(self.checkpoint.wait)
            attempt(lambda: self._record_end(error or next(iter(failures), None)))
        return next(iter(failures), None)

    def _record_end(self, error: BaseException | None) -> None:
        if isinstance(error, errors.InvalidHP):
            note_invalid_hp(str(error))
            self.train.report_early_exit(EarlyExitReason.INVALID_HP)
        state, reason = _end_state(error, self.preempt.signum)
        self.recorder.put(tracking.StateChanged(state=state, time=time.time(), reason=reason))


def _is_orderly(error: BaseException | None) -> bool:
    """Return whether a program that ends with this exception, or with none, has not failed."""
    return error is None or (isinstance(error, SystemExit) and not error.code)


def _end_state(error: BaseException | None, signum: int | None) -> tuple[tracking.RunState, str | None]:
    if isinstance(error, KeyboardInterrupt) or (_is_orderly(error) and signum is not None):
        return tracking.RunState.CANCELED, f"signal {signum}" if signum else "interrupted"
    if _is_orderly(error):
        return tracking.RunState.COMPLETED, None
    if isinstance(error, errors.InvalidHP):
        return tracking.RunState.COMPLETED, f"invalid hyperparameters: {error}"
    return tracking.RunState.ERROR, f"{type(error).__name__}: {error}"


def _check_member(name: str, value: Any, kind: type[enum.Enum]) -> None:
    if not isinstance(value, kind):
        choices = ", ".join(f"core.{kind.__name__}.{member.name}" for member in kind)
        raise TypeError(f"core.init({name}={value!r}): pass one of {choices}.")


def init(
    *,
    distributed: DistributedContext | None = None,
    checkpoint_storage: StorageLocation | None = None,
    preempt_mode: PreemptMode = PreemptMode.WorkersAskChief,
    tensorboard_mode: TensorboardMode = TensorboardMode.AUTO,
) -> Context:
    """Return the services of a trial process, to be used in a `with` block.

        with det.core.init() as core_context:
            core_context.train.report_training_metrics(steps_completed=1, metrics={"loss": 0.5})

    `checkpoint_storage` is the path of a folder, a URL such as `s3://bucket/prefix`, or that section of an experiment
    config. The default is what the
    config of a managed run says, else a folder in the home folder.
    """
    info = get_cluster_info()
    config: Mapping[str, Any] = info.trial._config if info else {}
    if checkpoint_storage is None:
        checkpoint_storage = config.get("checkpoint_storage")
    facts = RunFacts(
        name=str(config.get("name") or "core"),
        config=config if info else None,
        hparams=info.trial.hparams if info else {},
        seed=info.trial.trial_seed if info else secrets.randbits(31),
    )
    return Context(
        facts,
        distributed=distributed,
        checkpoint_storage=checkpoint_storage,
        preempt_mode=preempt_mode,
        tensorboard_mode=tensorboard_mode,
    )
