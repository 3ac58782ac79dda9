"""The training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from determined.core.metrics import BatchColumns
from determined.errors import InvalidHP
from determined.pytorch._callback import Callbacks, as_numpy
from determined.pytorch._checkpoint.saver import Saver
from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._data import rng
from determined.pytorch._loop.plan import Plan, ShouldExit, Stopped, TrainBoundaryType
from determined.pytorch._loop.policy import CheckpointPolicy
from determined.pytorch._loop.progress import Clock, Progress
from determined.pytorch._loop.stop import Stops
from determined.pytorch._loop.validation import Validation
from determined.pytorch._metrics.nonfinite import FiniteWatch
from determined.pytorch._metrics.window import MetricWindow, averaged_over_ranks, averages, plain_data
from determined.pytorch._report.display import Display
from determined.pytorch._report.profile import Timings


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
    timings: Timings
    display: Display
    stops: Stops
    compiles: bool
    validate_first: bool
    window: MetricWindow
    watch: FiniteWatch

    def run(self) -> None:
        """Train to the planned length, then leave a current validation and checkpoint."""
        with self.context.services.preempt.listening(self.context.services.watch is not None):
            self._run()

    def _run(self) -> None:
        try:
            with rng.set_aside():  # a resumed run comes here once more
                self.callbacks.run("on_training_start")
            if self.validate_first:
                with self.clock.training():  # it is told of the first batch, as no other has been trained
                    self.validate_if_stale()
            self.perform_due()  # what a stop may have come before
            while not self.plan.finished(self.progress):
                self.train_window()
                if not self.is_window_complete():
                    raise Stopped
                with self.random_numbers_of(TrainBoundaryType.REPORT):
                    self.timings.timed("metrics", self.report)()
                self.announce_saved()
                self.perform_due()
            self.finish_saving()
        except Stopped:
            self.leave(save=True)
        except ShouldExit as request:
            if not self.stops.leave_unasked(request):
                request.add_note(
                    "Not all ranks raised ShouldExit, and one cannot leave the loop alone: raise it on all of them, or "
                    "use context.set_stop_requested(True), by which one rank stops all."
                )
                raise
            self.leave(save=not request.skip_exit_checkpoint)
        except InvalidHP as error:
            if self.stops.leave_unasked(error):  # else the others cannot take part in a checkpoint
                self.leave(save=True)
            raise

    def train_window(self) -> None:
        """Train until something is due, and hold on to the metrics of each batch."""
        self.validation.resume_training()
        if not len(self.window):  # what hooks between two windows added belongs to neither
            self.context.reset_reducers()
        if self.compiles:
            self.train_compiling()
        else:
            self.train_until(self.next_stop())
        while not (self.is_window_complete() or self.stops.now()):
            self.train_until(self.next_stop())

    def train_compiling(self) -> None:
        """Train the first batch, and say that it takes longer than others."""
        self.compiles = False
        self.display.say("The first batch compiles the models, which can take minutes.")
        began = time.monotonic()
        self.train_until(self.progress.batches_trained + 1)
        self.display.say(f"The first batch took {time.monotonic() - began:.1f} s with compiling.")

    def is_window_complete(self) -> bool:
        """Say whether something is due at this batch, so that the window of metrics ends with it."""
        return bool(self.plan.due(self.progress))

    def train_until(self, end: int) -> None:
        """Train up to a number of batches, within one epoch, or until asked to stop."""
        begin, epoch = self.progress.batches_trained, self.progress.epochs_trained
        with self.clock.training():
            if self.clock.is_epoch_start:
                self.callbacks.run("on_training_epoch_start", epoch)
            batch = self.train_batches(end, epoch)
        self.display.trained(batch, self.progress.batches_trained - begin)
        if self.clock.is_epoch_end:
            self.progress.epochs_trained = self.clock.epoch_of(self.progress.batches_trained)
            self.callbacks.run("on_training_epoch_end", epoch)

    def train_batches(self, end: int, epoch: int) -> Any:
        """Train batches of one epoch, and return the last of them."""
        progress, add, after_batch = self.progress, self.window.add, self.after_batch
        context, preempt, bound = self.context, self.context.services.preempt, self.stops.bound
        self.timings.look(progress.batches_trained)
        fetch = self.timings.timed("data_fetch", self.fetch)
        to_device = self.timings.timed("to_device", self.to_device)
        train_batch = self.timings.timed("train_batch", self.train_batch)
        while progress.batches_trained < end:
            batch = to_device(fetch())
            add(train_batch(batch, epoch, progress.batches_trained))
            for step in after_batch:
                step()
            progress.batches_trained += 1
            wanted = context.stop_requested or preempt.signum is not None
            if (wanted or progress.batches_trained >= bound.limit) and self.stops.now():
                break
        return batch

    def report(self, *, keep: bool = False) -> None:
        """Report the metrics of the window that ends here; keep them for a checkpoint if it ends too early."""
        batches, own = self.gathered(self.window.peek() if keep else self.window.take())
        done = self.progress.batches_trained
        self.watch.look_at_batches(batches, done)
        own = self.watch.recordable("training", own, done)
        metrics = self.with_position(own)
        self.context.services.steps_completed = done
        self.context.services.train.report_training_metrics(done, metrics, batches)
        self.context.services.train.report_progress(min(done / self.plan.total_batches, 1.0))
        if times := self.timings.take():
            self.context.services.train.report_metrics("timing", done, times)
        self.display.reported(metrics)
        if self.callbacks.wants("on_training_workload_end"):
            averages = self.with_position(as_numpy(own))
            self.callbacks.run("on_training_workload_end", averages, [as_numpy(one) for one in batches])
        if not keep:
            self.context.reset_reducers()

    def gathered(self, own: BatchColumns) -> tuple[BatchColumns, dict[str, Any]]:
        """Return the metrics of each batch and those of the window, over all ranks."""
        ranks, reducers = self.context.distributed, self.context.reducers
        if ranks.size == 1:
            return own, averages(own) | reducers.reduce(for_training=True)
        per_rank = ranks.allgather((plain_data(own), reducers.gathered(for_training=True)))
        parts = [part for part, _ in per_rank]
        metrics = averages(BatchColumns.interleaved(parts))
        return averaged_over_ranks(parts), metrics | reducers.combined([r for _, r in per_rank], for_training=True)

    def perform_due(self) -> None:
        """Do what is due at this batch and not done yet, unless asked to stop."""
        self.raise_if_stopping()
        for action in self.plan.due(self.progress) if self.progress.batches_trained else ():
            if action is TrainBoundaryType.VALIDATE:
                self.validate_if_stale()
            elif action is TrainBoundaryType.CHECKPOINT:
                self.save_if_stale()
            self.raise_if_stopping()

    def random_numbers_of(self, action: TrainBoundaryType) -> contextlib.AbstractContextManager[None]:
        """Keep what an action draws out of the training's random numbers if a longer run would not do it here."""
        return rng.set_aside() if self.plan.is_extra(action, self.progress) else contextlib.nullcontext()

    def validate(self) -> bool:
        """Validate and report; returns whether the policy finds the result worth a checkpoint."""
        self.display.validating()
        if self.validation.starts_processes:  # none is forked while another thread is in the middle of a write
            self.saver.wait()
        metrics = self.timings.timed("validation", self.validation.run)()
        self.progress.last_val = self.progress.batches_trained
        self.progress.last_ckpt = None  # none knows of this validation yet, not even one of this batch
        worth_saving: bool = self.context.distributed.broadcast(self.policy.wants(self.with_position(metrics)))
        metrics = self.watch.recordable("validation", metrics, self.progress.batches_trained)
        self.context.services.train.report_validation_metrics(
            self.progress.batches_trained, self.with_position(metrics)
        )
        self.display.validated(metrics)
        try:
            self.callbacks.run("on_validation_end", as_numpy(metrics))
        finally:  # a callback may leave the loop, and the checkpoint that follows is one of training
            self.context.reset_reducers()
        return worth_saving

    def validate_if_stale(self) -> None:
        """Validate unless the last validation was at this batch, and save if the result is worth it."""
        if self.progress.last_val != self.progress.batches_trained:
            with self.random_numbers_of(TrainBoundaryType.VALIDATE):
                worth_saving = self.validate()
            if worth_saving:
                self.save_if_stale()

    def save_if_stale(self) -> None:
        """Save a checkpoint unless the last one was at this batch."""
        if self.progress.last_ckpt != self.progress.batches_trained:
            self.saver.wait()
            self.announce_saved()
            self.timings.timed("checkpoint", self.saver.save)()
            self.announce_saved()

    def announce_saved(self) -> None:
        """Show a checkpoint whose write has come to its end."""
        if uuid := self.saver.completed():
            self.display.saved(uuid)

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is being written. All ranks must call this."""
        self.saver.finish()
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
        if self.stops.now():
            raise Stopped

    def pulse(self) -> object:
        """Return something that changes as long as training or validation goes on."""
        return self.progress.batches_trained, self.validation.batches_seen

    def next_stop(self) -> int:
        """Return the number of batches at which to look up next."""
        stop = self.plan.next_stop(self.progress)
        change = self.timings.next_change(self.progress.batches_trained)
        return stop if change is None else min(stop, change)

    def with_position(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return metrics with how far training has come, unless the trial has metrics of such names."""
        position = {"batches": self.progress.batches_trained, "epochs": self.progress.epochs_trained}
        return metrics | position | metrics
