"""Reports metrics and times to the record, the terminal and the callbacks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from determined.core import Context
from determined.core.metrics import BatchColumns
from determined.pytorch._callback import Callbacks, as_numpy
from determined.pytorch._loop.plan import NEVER, Plan
from determined.pytorch._loop.progress import Progress
from determined.pytorch._metrics.nonfinite import FiniteWatch
from determined.pytorch._metrics.reducers import ReducerSet
from determined.pytorch._metrics.window import MetricWindow, averaged_over_ranks, averages, plain_data
from determined.pytorch._report.display import Display, continue_command
from determined.pytorch._report.profile import Timings

Timed = Callable[[str, Callable[..., Any]], Callable[..., Any]]


@dataclasses.dataclass(slots=True)
class Reporter:
    """Reports the metrics, the progress and the times of a run. All ranks must report at the same time."""

    services: Context
    progress: Progress
    plan: Plan
    reducers: ReducerSet
    callbacks: Callbacks
    display: Display
    timings: Timings
    compiles: bool
    """Whether the next batch compiles the models."""
    _began: float = 0.0
    _watch: FiniteWatch = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._watch = FiniteWatch(self.services.distributed.is_chief)

    @property
    def timed(self) -> Timed:
        """Wraps a function of a stage so that it is timed while timing is on."""
        return self.timings.timed

    def next_stop(self) -> int:
        """Return the number of batches at which timing starts or stops; the next one if this batch compiles."""
        done = self.progress.batches_trained
        change = done + 1 if self.compiles else self.timings.next_change(done)
        return NEVER if change is None else change

    def begin_stretch(self) -> Timed:
        """Start or stop timing if it is due, and return `timed`. Call it before each stretch of batches."""
        self.timings.check(self.progress.batches_trained)
        if self.compiles:
            self.display.say("The first batch compiles the models, which can take minutes.")
            self._began = time.monotonic()
        return self.timed

    def trained(self, last_batch: Any, count: int) -> None:
        """Show a number of batches that were trained since the last call."""
        if self.compiles:
            self.compiles = False
            self.display.say(f"The first batch took {time.monotonic() - self._began:.1f} s with compiling.")
        self.display.trained(last_batch, count)

    def report_training(self, window: MetricWindow, *, keep: bool = False) -> None:
        """Report the metrics of the batches in a window and empty it; `keep` them for a window that is not complete."""
        batches, averaged = self._over_ranks(window.peek() if keep else window.take())
        done, train = self.progress.batches_trained, self.services.train
        self._watch.check_batches(batches, done)
        averaged = self._watch.recordable("training", averaged, done)
        metrics = self.with_position(averaged)
        self.services.steps_completed = done
        train.report_training_metrics(done, metrics, batches)
        train.report_progress(min(done / self.plan.total_batches, 1.0))
        self._report_times()
        self.display.reported(metrics)
        if self.callbacks.wants("on_training_workload_end"):
            per_batch = [as_numpy(one) for one in batches]
            self.callbacks.run("on_training_workload_end", self.with_position(as_numpy(averaged)), per_batch)
        if not keep:
            self.reducers.reset()

    def report_validation(self, metrics: dict[str, Any]) -> None:
        """Report the metrics of a validation at this batch."""
        done = self.progress.batches_trained
        metrics = self._watch.recordable("validation", metrics, done)
        self.services.train.report_validation_metrics(done, self.with_position(metrics))
        self.display.validated(metrics)
        try:
            self.callbacks.run("on_validation_end", as_numpy(metrics))
        finally:  # a callback may leave the loop, and the checkpoint that follows is one of training
            self.reducers.reset()

    def with_position(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return metrics with the position of training, `batches` and `epochs`, unless the trial has such metrics."""
        position = {"batches": self.progress.batches_trained, "epochs": self.progress.epochs_trained}
        return metrics | position | metrics

    def report_times(self) -> None:
        """Report the times since the last window, and show the share of each stage in the total."""
        self._report_times()
        for line in self.timings.summary():
            self.display.say(line)

    def show_places(self, checkpoint: str | None, is_first_fit: bool) -> None:
        """Show where the results are and how to continue; in a managed run, the runner shows this."""
        services = self.services
        if not services.distributed.is_chief or services.info is not None:
            return
        places = [("checkpoints", services.checkpoint.store.location)]
        if services.scalars.enabled:
            places.append(("TensorBoard", str(services.recorder.tensorboard_path)))
        if services.recorder.is_recorded:
            places.append(("record", f"det experiment describe {services.recorder.experiment_id}"))
        if checkpoint is not None:
            command = continue_command(checkpoint) if is_first_fit else f"fit(latest_checkpoint={checkpoint!r})"
            places.append(("continue", command))
        for label, place in places:
            self.display.say(f"{label:>11}: {place}")

    def _over_ranks(self, own: BatchColumns) -> tuple[BatchColumns, dict[str, Any]]:
        """Return the metrics of each batch and of the window, over all ranks."""
        ranks, reducers = self.services.distributed, self.reducers
        if ranks.size == 1:
            return own, averages(own) | reducers.reduce(for_training=True)
        per_rank = ranks.allgather((plain_data(own), reducers.gathered(for_training=True)))
        parts = [part for part, _ in per_rank]
        reduced = reducers.combined([one for _, one in per_rank], for_training=True)
        return averaged_over_ranks(parts), averages(BatchColumns.interleaved(parts)) | reduced

    def _report_times(self) -> None:
        if times := self.timings.take():
            self.services.train.report_metrics("timing", self.progress.batches_trained, times)
