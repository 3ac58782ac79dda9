"""The training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from determined.errors import InvalidHP
from determined.pytorch._callback import Callbacks
from determined.pytorch._checkpoint.saver import Saver
from determined.pytorch._data import rng
from determined.pytorch._loop.plan import Plan, ShouldExit, Stopped, TrainBoundaryType
from determined.pytorch._loop.progress import Progress
from determined.pytorch._loop.stop import Stops
from determined.pytorch._loop.validation import Validation
from determined.pytorch._metrics.reducers import ReducerSet
from determined.pytorch._metrics.window import MetricWindow
from determined.pytorch._report.reporter import Reporter


@dataclasses.dataclass(slots=True, kw_only=True)
class Loop:
    """Trains a trial according to a plan."""

    plan: Plan
    progress: Progress
    fetch: Callable[[], Any]
    to_device: Callable[[Any], Any]
    train_batch: Callable[[Any, int, int], Any]
    after_batch: Sequence[Callable[[], None]]
    window: MetricWindow
    reducers: ReducerSet
    validation: Validation
    worth_saving: Callable[[dict[str, Any]], bool]
    saver: Saver
    callbacks: Callbacks
    reporter: Reporter
    stops: Stops
    validate_first: bool

    def run(self) -> None:
        """Train to the planned length, then leave a current validation and checkpoint."""
        try:
            with rng.set_aside():  # a resumed run runs it again
                self.callbacks.run("on_training_start")
            if self.validate_first:
                with self.progress.training():  # no batch was trained, so the first one is the current one
                    self.validate_if_stale()
            self.perform_due()  # a stop may have been requested before
            while not self.plan.finished(self.progress):
                self.train_window()
                if not self.plan.due(self.progress):
                    raise Stopped
                self.report()
                self.perform_due()
            self.saver.finish()
        except Stopped:
            self.leave(save=True)
        except ShouldExit as request:
            self.stops.check_exit(request)
            self.leave(save=not request.skip_exit_checkpoint)
        except InvalidHP:
            if self.stops.agree_to_exit():
                self.leave(save=True)
            raise

    def train_window(self) -> None:
        """Train until something is due or the program asks to stop, and keep the metrics of each batch."""
        self.validation.resume_training()
        if not len(self.window):  # values that hooks added between two windows belong to neither
            self.reducers.reset()
        self.train_stretch()
        while not (self.plan.due(self.progress) or self.stops.now()):
            self.train_stretch()

    def train_stretch(self) -> None:
        """Train until something may be due, the epoch ends or the program asks to stop."""
        begin, epoch = self.progress.batches_trained, self.progress.epochs_trained
        end = min(self.plan.next_stop(self.progress), self.reporter.next_stop())
        with self.progress.training():
            if self.progress.is_epoch_start:
                self.callbacks.run("on_training_epoch_start", epoch)
            batch = self.train_batches(end, epoch)
        self.reporter.trained(batch, self.progress.batches_trained - begin)
        if self.progress.is_epoch_end:
            self.callbacks.run("on_training_epoch_end", epoch)

    def train_batches(self, end: int, epoch: int) -> Any:
        """Train batches of one epoch, and return the last of them."""
        progress, add, after_batch = self.progress, self.window.add, self.after_batch
        program, preempt, bound = self.stops.program, self.stops.preempt, self.stops.bound
        timed = self.reporter.begin_stretch()
        fetch, to_device = timed("data_fetch", self.fetch), timed("to_device", self.to_device)
        train_batch = timed("train_batch", self.train_batch)
        while progress.batches_trained < end:
            batch = to_device(fetch())
            add(train_batch(batch, epoch, progress.batches_trained))
            for step in after_batch:
                step()
            progress.batches_trained += 1
            wanted = program.stop_requested or preempt.signum is not None
            if (wanted or progress.batches_trained >= bound.limit) and self.stops.now():
                break
        return batch

    def report(self) -> None:
        """Report the metrics of the window that ends here."""
        with rng.set_aside(self.plan.is_extra(TrainBoundaryType.REPORT, self.progress)):
            self.reporter.timed("metrics", self.reporter.report_training)(self.window)
        self.saver.poll()

    def perform_due(self) -> None:
        """Do what is due at this batch and not done yet, unless asked to stop."""
        self.stops.raise_if_now()
        for action in self.plan.due(self.progress) if self.progress.batches_trained else ():
            if action is TrainBoundaryType.VALIDATE:
                self.validate_if_stale()
            elif action is TrainBoundaryType.CHECKPOINT:
                self.save_if_stale()
            self.stops.raise_if_now()

    def validate_if_stale(self) -> None:
        """Validate unless the last validation was at this batch, and save if the result is worth it."""
        if self.progress.last_val == self.progress.batches_trained:
            return
        with rng.set_aside(self.plan.is_extra(TrainBoundaryType.VALIDATE, self.progress)):
            metrics = self.reporter.timed("validation", self.validation.run)()
            self.progress.last_val = self.progress.batches_trained
            self.progress.last_ckpt = None  # no checkpoint knows of this validation, not even one of this batch
            is_worth_saving = self.worth_saving(metrics)
            self.reporter.report_validation(metrics)
        if is_worth_saving:
            self.save_if_stale()

    def save_if_stale(self) -> None:
        """Save a checkpoint unless the last one was at this batch."""
        if self.progress.last_ckpt != self.progress.batches_trained:
            self.saver.wait()
            self.reporter.timed("checkpoint", self.saver.save)()

    def leave(self, *, save: bool) -> None:
        """End training before its length."""
        if save:
            self.save_if_stale()
        # Second: a complete window is reported again, so the checkpoint must not know of this report.
        if len(self.window):
            self.reporter.report_training(self.window, keep=True)
        self.saver.finish()
