"""The training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from determined.core._context import Context
from determined.errors import InvalidHP
from determined.pytorch._callback import Callbacks
from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._display import Display
from determined.pytorch._finite import FiniteWatch
from determined.pytorch._metrics import MetricWindow, averages
from determined.pytorch._plan import Plan, ShouldExit, TrainBoundaryType
from determined.pytorch._policy import CheckpointPolicy
from determined.pytorch._profile import Timings
from determined.pytorch._progress import Clock, Progress
from determined.pytorch._saver import Saver
from determined.pytorch._validation import Validation


@dataclasses.dataclass(slots=True, kw_only=True)
class Loop:
    """Trains a trial by a plan. Made of parts that each know their own business."""

    plan: Plan
    progress: Progress
    clock: Clock
    fetch: Callable[[], Any]
    to_device: Callable[[Any], Any]
    train_batch: Callable[[Any, int, int], Any]
    after_batch: Sequence[Callable[[], None]]
    validation: Validation
    saver: Saver
    policy: CheckpointPolicy
    callbacks: Callbacks
    context: PyTorchTrialContext
    services: Context
    timings: Timings
    display: Display
    validate_first: bool
    window: MetricWindow
    watch: FiniteWatch = dataclasses.field(default_factory=FiniteWatch)

    def run(self) -> None:
        """Train to the planned length, then leave a current validation and checkpoint."""
        self.services.preempt.listen()
        try:
            self.callbacks.run("on_training_start")
            if self.validate_first:
                self.validate_if_stale()
            self.perform_due()  # what a stop may have come before
            while not self.plan.finished(self.progress):
                self.train_window()
                if not self.is_window_complete():
                    self.raise_if_stopping()
                self.report()
                self.announce_saved()
                self.perform_due()
            self.validate_if_stale()
            self.save_if_stale()
            self.finish_saving()
        except ShouldExit as request:
            self.leave(save=not request.skip_exit_checkpoint)
        except InvalidHP:
            self.leave(save=True)
            raise
        finally:
            self.services.preempt.stop_listening()

    def train_window(self) -> None:
        """Train until something is due, and hold on to the metrics of each batch."""
        while True:
            self.train_until(self.next_stop())
            if self.is_window_complete() or self.context.stopping():
                return

    def is_window_complete(self) -> bool:
        """Say whether something is due at this batch, so that the window of metrics ends with it."""
        return bool(self.plan.due(self.progress)) or self.plan.finished(self.progress)

    def train_until(self, end: int) -> None:
        """Train up to a number of batches, within one epoch, or until asked to stop."""
        progress, add, after_batch = self.progress, self.window.add, self.after_batch
        context, preempt = self.context, self.services.preempt
        self.timings.look(progress.batches_trained)
        fetch = self.timings.timed("data_fetch", self.fetch)
        to_device = self.timings.timed("to_device", self.to_device)
        train_batch = self.timings.timed("train_batch", self.train_batch)
        begin, epoch = progress.batches_trained, progress.epochs_trained
        if self.clock.is_epoch_start:
            self.callbacks.run("on_training_epoch_start", epoch)
        while progress.batches_trained < end:
            batch = to_device(fetch())
            add(train_batch(batch, epoch, progress.batches_trained))
            for step in after_batch:
                step()
            progress.batches_trained += 1
            if context.stop_requested or preempt.signum is not None:
                break
        self.display.trained(batch, progress.batches_trained - begin)
        if self.clock.is_epoch_start:
            progress.epochs_trained += 1
            self.callbacks.run("on_training_epoch_end", epoch)

    def report(self, *, keep: bool = False) -> None:
        """Report the metrics of the window that ends here; keep them for a checkpoint if it ends too early."""
        batches = self.window.peek() if keep else self.window.take()
        metrics = averages(batches) | self.context.reduce_metrics(for_training=True)
        self.stamp(metrics)
        done = self.progress.batches_trained
        self.watch.look_at_batches(batches, done)
        self.watch.look("training", metrics, done)
        self.services.steps_completed = done
        self.services.train.report_training_metrics(done, metrics, batches)
        self.services.train.report_progress(min(done / self.plan.total_batches, 1.0))
        if times := self.timings.take():
            self.services.train.report_metrics("timing", done, times)
        self.display.reported(metrics)
        if self.callbacks.wants("on_training_workload_end"):
            self.callbacks.run("on_training_workload_end", dict(metrics), list(batches))
        if not keep:
            self.context.reset_reducers()

    def perform_due(self) -> None:
        """Do what is due at this batch and not done yet, unless asked to stop."""
        self.raise_if_stopping()
        for action in self.plan.due(self.progress) if self.progress.batches_trained else ():
            if action is TrainBoundaryType.VALIDATE:
                self.validate_if_stale()
            elif action is TrainBoundaryType.CHECKPOINT:
                self.save_if_stale()
            self.raise_if_stopping()

    def validate(self) -> None:
        """Validate, report, and save if the policy finds the result worth it."""
        self.display.validating()
        if self.validation.starts_processes:  # none is forked while another thread is in the middle of a write
            self.finish_saving()
        metrics = self.timings.timed("validation", self.validation.run)()
        self.stamp(metrics)
        self.progress.last_val = self.progress.batches_trained
        self.watch.look("validation", metrics, self.progress.batches_trained)
        worth_saving = self.policy.wants(metrics)
        self.services.train.report_validation_metrics(self.progress.batches_trained, metrics)
        self.display.validated(metrics)
        try:
            self.callbacks.run("on_validation_end", dict(metrics))
        finally:  # a callback may leave the loop, and the checkpoint that follows is one of training
            self.context.reset_reducers()
        if worth_saving:
            self.save_if_stale()

    def validate_if_stale(self) -> None:
        """Validate unless the last validation was at this batch."""
        if self.progress.last_val != self.progress.batches_trained:
            self.validate()

    def save_if_stale(self) -> None:
        """Save a checkpoint unless the last one was at this batch."""
        if self.progress.last_ckpt != self.progress.batches_trained:
            self.finish_saving()
            self.timings.timed("checkpoint", self.saver.save)()
            self.announce_saved()

    def announce_saved(self) -> None:
        """Show a checkpoint whose write has come to its end."""
        if uuid := self.saver.announce():
            self.display.saved(uuid)

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is being written."""
        self.saver.wait()
        self.announce_saved()

    def leave(self, *, save: bool) -> None:
        """End training before its length."""
        if save:
            self.save_if_stale()
        # Second: the window is reported anew when it is complete, so the checkpoint must not know of this report.
        if len(self.window):
            self.report(keep=True)
        self.finish_saving()

    def raise_if_stopping(self) -> None:
        """Leave the loop if asked to stop."""
        if self.context.stopping():
            raise ShouldExit

    def next_stop(self) -> int:
        """Return the number of batches at which to look up next."""
        stop = self.plan.next_stop(self.progress)
        change = self.timings.next_change(self.progress.batches_trained)
        return stop if change is None else min(stop, change)

    def stamp(self, metrics: dict[str, Any]) -> None:
        """Add how far training has come, unless the trial has metrics of such names."""
        metrics.setdefault("batches", self.progress.batches_trained)
        metrics.setdefault("epochs", self.progress.epochs_trained)
