"""Assembles a training run from its parts and runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator

import torch

from determined import tracking
from determined.pytorch._accelerate.compile import compile_models
from determined.pytorch._accelerate.cuda_graphs.graphs import step_functions
from determined.pytorch._accelerate.options import apply_level
from determined.pytorch._callback import Callbacks
from determined.pytorch._checkpoint import parts, resume
from determined.pytorch._checkpoint.format import Saved
from determined.pytorch._checkpoint.saver import Saver
from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._data.workers import explained_lack_of_shared_memory
from determined.pytorch._loop.data import build_data, length_of_batch
from determined.pytorch._loop.loop import Loop
from determined.pytorch._loop.micro_batches import in_micro_batches
from determined.pytorch._loop.plan import Batch, Plan, TrainBoundaryType, TrainUnit
from determined.pytorch._loop.policy import CheckpointPolicy, policy_of
from determined.pytorch._loop.progress import Epochs, Progress
from determined.pytorch._loop.stop import stops_of
from determined.pytorch._loop.validation import Validation
from determined.pytorch._metrics.window import MetricWindow
from determined.pytorch._optim import free_parameters
from determined.pytorch._optim.fused import fuse
from determined.pytorch._optim.lr_scheduler import auto_steps
from determined.pytorch._optim.precision import Scaled
from determined.pytorch._report.display import display_for
from determined.pytorch._report.profile import ProfilerSettings, Timings
from determined.pytorch._report.reporter import Reporter
from determined.pytorch._trial import PyTorchTrial

_TEST_NOTE = "Test mode trains and validates one batch only: code that needs more than one batch fails here."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """The checked arguments of `Trainer.fit`."""

    length: TrainUnit
    reporting_period: TrainUnit
    validation_period: TrainUnit | None
    checkpoint_period: TrainUnit | None
    checkpoint_policy: str
    best_metric: str | None
    smaller_is_better: bool | None
    latest_checkpoint: str | os.PathLike[str] | None
    step_zero_validation: bool
    test_mode: bool
    profiler: ProfilerSettings
    is_first_fit: bool
    """Whether `DET_LATEST_CHECKPOINT` would be for this fit, were the program started again."""

    def plan(self, epochs: Epochs, batches_trained: int) -> Plan:
        """Return when to act, for training data with these epochs."""
        if self.test_mode:
            return Plan(length=Batch(batches_trained + 1), every={}, epochs=epochs)
        # In the order in which actions that fall on one batch must run.
        periods = {
            TrainBoundaryType.REPORT: self.reporting_period,
            TrainBoundaryType.VALIDATE: self.validation_period,
            TrainBoundaryType.CHECKPOINT: self.checkpoint_period,
        }
        every = {action: unit for action, unit in periods.items() if unit is not None}
        return Plan(length=self.length, every=every, epochs=epochs)


def run(trial: PyTorchTrial, context: PyTorchTrialContext, settings: FitSettings) -> None:
    """Train a trial as the settings say."""
    apply_level(context)
    free_parameters.check(context)
    if context.distributed.is_chief:
        context.services.checkpoint.store.check()  # before the work that would be lost
        context.services.checkpoint.store.clear_leftovers()
    with contextlib.ExitStack() as opened:
        saved = resume.find(context, type(trial), settings.latest_checkpoint, opened)
        if saved is not None and resume.is_of_another_trial(context.services, saved):
            resume.load_weights(context, type(trial), saved)
            saved = None
        context.initial_batch = saved.batches_trained if saved else 0
        callbacks = Callbacks(trial.build_callbacks())
        _choose_seed(context, saved)
        progress = Progress(context.initial_batch)
        with (
            _run_scope(context, settings, progress),
            callbacks.trial(context.initial_batch, saved.uuid if saved else None),
            explained_lack_of_shared_memory(),
        ):
            _train(trial, context, settings, callbacks, progress, saved)


def _train(
    trial: PyTorchTrial,
    context: PyTorchTrialContext,
    settings: FitSettings,
    callbacks: Callbacks,
    progress: Progress,
    saved: Saved | None,
) -> None:
    (stream, validation_data), window = build_data(trial, context), MetricWindow()
    fuses = context.experimental.fuses_optimizers and not context.backend.forward_is_collective
    note = fuse(context.optimizers, context.models) if fuses else None
    policy = policy_of(settings, context, lambda line: display.say(line))
    state = parts.run_state(context, callbacks, progress, stream, policy, window)
    rules = resume.rules_for(type(trial), context, state)
    context.reset_reducers()
    fetch = resume.start(context, callbacks, state, rules, saved)
    for model in context.models:
        model.train()
    plan = settings.plan(progress.epochs, progress.batches_trained)
    micro_batches = context.gradients.micro_batches
    display = display_for(context.distributed, progress, plan, length_of_batch(trial), micro_batches)
    saver = Saver(type(trial), context, callbacks, progress, state, rules, display.saved, saved.uuid if saved else None)
    context.progress = progress
    stops = stops_of(context, progress)
    max_batches = 1 if settings.test_mode else None
    validation = Validation(trial, context, callbacks, validation_data, max_batches, stops, display, saver)
    with (
        torch.enable_grad(),  # restored after the block, whatever the last validation leaves
        display,
        saver,
        _averaging_gradients(context, progress),
        step_functions(context, trial.train_batch, context.batch_mover(), display.say) as steps,
        _steps_after_batch(context, progress, with_precision=not steps.ends_batches) as after_batch,
        Timings(settings.profiler, context.services.profiler, context.device) as timings,
    ):
        if note is not None:
            display.say(note)
        compiles = compile_models(context)
        reporter = Reporter(context.services, progress, plan, context.reducers, callbacks, display, timings, compiles)
        loop = Loop(
            plan=plan,
            progress=progress,
            fetch=fetch,
            to_device=steps.to_device,
            train_batch=in_micro_batches(context.gradients, fetch, steps.to_device, steps.train_batch),
            after_batch=after_batch,
            window=window,
            reducers=context.reducers,
            validation=validation,
            worth_saving=lambda metrics: context.distributed.broadcast(policy.wants(reporter.with_position(metrics))),
            saver=saver,
            callbacks=callbacks,
            reporter=reporter,
            stops=stops,
            validate_first=settings.step_zero_validation and progress.batches_trained == 0,
        )
        with stops.following(lambda: (progress.batches_trained, validation.batches_seen)):
            loop.run()
        reporter.report_times()
    deleted = _collect_checkpoints(context, policy, saver)
    reporter.show_places(None if saver.latest in deleted else saver.latest, settings.is_first_fit)


@contextlib.contextmanager
def _averaging_gradients(context: PyTorchTrialContext, progress: Progress) -> Iterator[None]:
    """Average gradients over all ranks inside the block. All ranks must enter it."""

    gradients = context.gradients

    def steps_now() -> bool:
        return gradients.steps_at(progress.batch_idx)

    check = context.backend.start(context.models, steps_now if gradients.accumulates else None, context.compressed)
    context.gradients.before_first_step = check
    context.gradients.exchanges = free_parameters.share(context)
    try:
        yield
    finally:
        context.gradients.before_first_step = None
        context.gradients.exchanges = {}
        context.backend.stop()


@contextlib.contextmanager
def _steps_after_batch(
    context: PyTorchTrialContext, progress: Progress, *, with_precision: bool
) -> Iterator[list[Callable[[], None]]]:
    """Yield the functions to call after each batch; often none."""
    steps: list[Callable[[], None]] = []
    if with_precision and isinstance(context.precision, Scaled):
        steps.append(context.precision.after_batch)
    steps += auto_steps(context.lr_schedulers, progress, context.aggregation_frequency)
    with context.torch_profiler() if context.torch_profiler else contextlib.nullcontext() as profiler:
        yield steps if profiler is None else [*steps, profiler.step]


def _choose_seed(context: PyTorchTrialContext, saved: Saved | None) -> None:
    """Use the seed of the checkpoint, else the seed that the program gave torch after `init`, if any."""
    seed = context.distributed.broadcast(context.seed_of_the_program())
    if saved is not None:  # the order of the data depends on the seed that it started with
        seed = saved.state["loop"].get("seed", seed)
    if seed is not None:
        context.trial_seed = seed
        context.services.recorder.put(tracking.SeedChanged(seed=seed))


def _collect_checkpoints(context: PyTorchTrialContext, policy: CheckpointPolicy, saver: Saver) -> list[str]:
    """Delete checkpoints by the retention settings; keep the one to continue from if a signal stopped the run."""
    services = context.services
    if not context.distributed.is_chief:
        return []
    return services.collect_checkpoints(policy.metric, saver.latest if services.preempt.signum is not None else None)


@contextlib.contextmanager
def _run_scope(context: PyTorchTrialContext, settings: FitSettings, progress: Progress) -> Iterator[None]:
    """Reset the context after all callbacks; in test mode, note in an error that only one batch was trained."""
    before = progress.batches_trained
    try:
        yield
    except Exception as error:
        if settings.test_mode and (progress.batches_trained > before or settings.step_zero_validation):
            error.add_note(_TEST_NOTE)
        raise
    finally:
        context.progress = None
        context.gradients.micro_batches, context.gradients.ends_batch = 1, True
        context.set_stop_requested(False)  # it was meant for this fit() only
