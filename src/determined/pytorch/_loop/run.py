"""Put a training together from its parts, and run it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from determined import tracking
from determined.pytorch._accelerate.compile import compile_models
from determined.pytorch._accelerate.cuda_graphs.graphs import step_functions
from determined.pytorch._accelerate.options import apply_level
from determined.pytorch._callback import Callbacks
from determined.pytorch._checkpoint import format as checkpoint_format
from determined.pytorch._checkpoint import objects, run_state
from determined.pytorch._checkpoint.saver import Saveable, Saved, Saver, Stateful, find, is_of_another_trial
from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._data.batch import data_length
from determined.pytorch._data.loader import DataLoader
from determined.pytorch._data.stream import Stream, length_of, stream_of, validation_loader
from determined.pytorch._data.workers import explained_lack_of_shared_memory, prepare_workers
from determined.pytorch._loop.loop import Loop
from determined.pytorch._loop.plan import Batch, Plan, TrainBoundaryType, TrainUnit
from determined.pytorch._loop.policy import CheckpointPolicy, compared_metric, policy_of
from determined.pytorch._loop.progress import Clock, Epochs, Progress
from determined.pytorch._loop.stop import stops_of
from determined.pytorch._loop.together import seed_rank, training_together
from determined.pytorch._loop.validation import Validation
from determined.pytorch._metrics.nonfinite import FiniteWatch
from determined.pytorch._metrics.window import MetricWindow
from determined.pytorch._optim import free_parameters
from determined.pytorch._optim.fused import fuse
from determined.pytorch._optim.lr_scheduler import auto_steps
from determined.pytorch._report.display import Display, continue_command, display_for
from determined.pytorch._report.profile import ProfilerSettings, Timings
from determined.pytorch._trial import PyTorchTrial, overrides

_TEST_NOTE = "Test mode trains and validates one batch only: code that needs more than one batch fails here."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """What `Trainer.fit` was told, checked."""

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
        """Return when to act, with training data of such epochs."""
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
    saved = _find_saved(context, type(trial), settings.latest_checkpoint)
    progress = Progress()
    if saved is not None and is_of_another_trial(context.services, saved):
        rules = checkpoint_format.rules_of(type(trial), checkpoint_format.models_state(context))
        with checkpoint_format.reading(saved.path):
            checkpoint_format.load_models(context, saved.state, rules)
        saved = None
    if saved is not None:
        with checkpoint_format.reading(saved.path):
            rules = checkpoint_format.rules_of(type(trial), {"loop": None})
            saved.state["loop"] = objects.decode(saved.state["loop"], rules, ("loop",))
            progress.load_state_dict(saved.state["loop"]["progress"])
    context.initial_batch = progress.batches_trained
    callbacks = Callbacks(trial.build_callbacks())
    _take_over_seed(context, saved)
    scope = _trial_scope(callbacks, progress.batches_trained, saved.uuid if saved else None)
    with _run_scope(context), _test_noted(settings, progress), scope, explained_lack_of_shared_memory():
        _train(trial, context, settings, callbacks, progress, saved)


def _train(
    trial: PyTorchTrial,
    context: PyTorchTrialContext,
    settings: FitSettings,
    callbacks: Callbacks,
    progress: Progress,
    saved: Saved | None,
) -> None:
    stream, validation_data = _build_data(trial, context)
    share = _share_of(context, stream, progress, saved)
    plan = settings.plan(stream.epochs, progress.batches_trained)
    display = display_for(context.distributed, progress, plan, _length_of(trial))
    if context.experimental.fuses_optimizers and not context.backend.forward_is_collective:
        fuse(context.optimizers, context.models, display.say)
    policy = _policy(context, settings, display)
    window = MetricWindow()
    common: dict[str, Stateful] = {"progress": progress, "policy": policy}
    own: dict[str, Saveable] = {"data": stream, "window": window, "reducers": context.reducers}
    saver = Saver(type(trial), context, callbacks, progress, common, own)
    saver.check()
    fetch = _go_to_position(context, saver, stream, progress, window, saved, share)
    clock = Clock(progress, stream.epochs)
    context.follow(clock)
    stops = stops_of(context, progress)
    most_batches = 1 if settings.test_mode else None
    validation = Validation(trial, context, callbacks, validation_data, most_batches, stops.wanted)
    with (
        torch.enable_grad(),  # and back to what it was before, whatever the last validation leaves
        display,
        saver,
        training_together(context, clock),
        step_functions(context, trial.train_batch, context.batch_mover(), display.say) as steps,
        _after_batch(context, clock, with_precision=not steps.ends_batches) as after_batch,
        Timings(settings.profiler, context.services.profiler, context.device) as timings,
    ):
        loop = Loop(
            plan=plan,
            progress=progress,
            clock=clock,
            fetch=fetch,
            to_device=steps.to_device,
            train_batch=steps.train_batch,
            after_batch=after_batch,
            validation=validation,
            saver=saver,
            policy=policy,
            callbacks=callbacks,
            context=context,
            timings=timings,
            display=display,
            stops=stops,
            compiles=compile_models(context),
            window=window,
            watch=FiniteWatch(context.distributed.is_chief),
            validate_first=settings.step_zero_validation and progress.batches_trained == 0,
        )
        with stops.following(loop.pulse):
            loop.run()
        _report_times(context, timings, progress, display)
    deleted = _collect_checkpoints(context, policy, saver)
    _say_where(display, context, None if saver.latest in deleted else saver.latest, settings.is_first_fit)


def _share_of(context: PyTorchTrialContext, stream: Stream, progress: Progress, saved: Saved | None) -> dict[str, Any]:
    """Return what this rank has for itself in a checkpoint; the data goes to its position."""
    if saved is None:
        return {}
    with checkpoint_format.reading(saved.path):
        share = run_state.share_of(context, saved.state)
        stream.load_state_dict(share.get("data", {}), progress.batches_trained)
    return share


def _take_over_seed(context: PyTorchTrialContext, saved: Saved | None) -> None:
    """Follow the seed of a checkpoint, else a program that seeded torch after `init` and asked for no other seed."""
    seed = context.distributed.broadcast(context.seed_of_the_program())
    if saved is not None:  # the order of the data goes on by the seed that it began with
        seed = saved.state["loop"].get("seed", seed)
    if seed is not None:
        context.trial_seed = seed
        context.services.recorder.put(tracking.SeedChanged(seed=seed))


def _report_times(context: PyTorchTrialContext, timings: Timings, progress: Progress, display: Display) -> None:
    """Report the times of what came after the last window, the last validation and checkpoint, and sum all up."""
    if times := timings.take():
        context.services.train.report_metrics("timing", progress.batches_trained, times)
    for line in timings.summary():
        display.say(line)


def _collect_checkpoints(context: PyTorchTrialContext, policy: CheckpointPolicy, saver: Saver) -> list[str]:
    """Delete what need not stay; a run that a signal stopped keeps the checkpoint to go on from."""
    services = context.services
    if not context.distributed.is_chief:
        return []
    return services.collect_checkpoints(policy.metric, saver.latest if services.preempt.signum is not None else None)


def _policy(context: PyTorchTrialContext, settings: FitSettings, display: Display) -> CheckpointPolicy:
    services = context.services
    searcher = (
        (context.config_if_any or {}).get("searcher") if tracking.searcher_metric(context.config_if_any) else None
    )
    return policy_of(
        settings.checkpoint_policy,
        compared_metric(searcher, settings.best_metric, settings.smaller_is_better),
        # In an experiment of many trials, best means best of all of them.
        services.train.get_experiment_best_validation if services.info else lambda: None,
        display.say,
        warns=context.distributed.is_chief,
    )


def _find_saved(
    context: PyTorchTrialContext, trial_class: type, checkpoint: str | os.PathLike[str] | None
) -> Saved | None:
    if checkpoint is None:
        return None
    # A managed trial has one program and one set of hyperparameters; one that starts from another's may change them.
    described = checkpoint_format.run_description(context, trial_class) if context.services.info is None else None
    saved = find(context.services, checkpoint, described) if context.distributed.is_chief else None
    place = context.distributed.broadcast(None if saved is None else (saved.uuid, saved.path))
    if place is None:
        return None
    if saved is None:  # found and verified by the chief
        saved = Saved(*place, checkpoint_format.read(place[1]))
    loop, record = saved.state["loop"], context.services.recorder.put
    if is_of_another_trial(context.services, saved):
        record(tracking.Continued(checkpoint=saved.uuid, steps_completed=0, reported_steps=0))
        return saved
    steps = loop["progress"]["batches_trained"]
    unreported = loop.get("window", {}).get("count", 0)
    record(tracking.Continued(checkpoint=saved.uuid, steps_completed=steps, reported_steps=steps - unreported))
    _say_what_changed(loop)
    return saved


def _say_what_changed(loop: Mapping[str, Any]) -> None:
    """Warn of what makes the numbers of a resumed run differ in the last bits."""
    now = checkpoint_format.circumstances()
    for name, before in loop.get("circumstances", {}).items():
        if before != now.get(name):
            warnings.warn(
                f"The checkpoint was saved with {name} {before}; training goes on with {now.get(name)}: the results "
                "can differ in their last bits from those of a run without a break.",
                stacklevel=2,
            )


@contextlib.contextmanager
def _trial_scope(callbacks: Callbacks, first_batch_idx: int, checkpoint_uuid: str | None) -> Iterator[None]:
    """Tell the callbacks of the beginning and the end of a trial; each hears of the end, whatever happens."""
    try:
        callbacks.run("on_trial_startup", first_batch_idx, checkpoint_uuid)
        yield
    except BaseException as error:
        _note_failures(error, _shut_down(callbacks))
        raise
    if failures := _shut_down(callbacks):
        _note_failures(failures[0], failures[1:])
        raise failures[0]


def _shut_down(callbacks: Callbacks) -> list[Exception]:
    failures = []
    for shutdown in callbacks.hooks("on_trial_shutdown"):
        try:
            shutdown()
        except Exception as failure:
            failures.append(failure)
    return failures


@contextlib.contextmanager
def _test_noted(settings: FitSettings, progress: Progress) -> Iterator[None]:
    """Add to an error after the only batch of a test that there was only one: reducers and assertions may need more."""
    before = progress.batches_trained
    try:
        yield
    except Exception as error:
        if settings.test_mode and (progress.batches_trained > before or settings.step_zero_validation):
            error.add_note(_TEST_NOTE)
        raise


def _note_failures(error: BaseException, failures: list[Exception]) -> None:
    for failure in failures:
        error.add_note(f"on_trial_shutdown() failed too: {type(failure).__name__}: {failure}")


def _go_to_position(
    context: PyTorchTrialContext,
    saver: Saver,
    stream: Stream,
    progress: Progress,
    window: MetricWindow,
    saved: Saved | None,
    share: Mapping[str, Any],
) -> Callable[[], Any]:
    """Put everything where training left off, and return the function that gets the next batch."""
    context.reset_reducers()
    if saved is not None:
        saver.restore(saved)
        _match_epochs(progress, stream.epochs, saved.state["loop"]["progress"].get("epochs_trained"))
        with checkpoint_format.reading(saved.path):
            _take_share(context, window, share)
    fetch = stream.open(progress.batches_trained, context.trial_seed)
    if saved is None:
        seed_rank(context)
    else:
        with checkpoint_format.reading(saved.path):
            checkpoint_format.restore_rng(context, saved.state)  # last: opening the data may have drawn random numbers
        saved.state.clear()
    for model in context.models:
        model.train()
    return fetch


def _take_share(context: PyTorchTrialContext, window: MetricWindow, share: Mapping[str, Any]) -> None:
    if "window" in share:
        window.load_state_dict(share["window"])
    if "reducers" in share:
        context.reducers.load_state_dict(share["reducers"])
    checkpoint_format.restore_gradients(context, share["gradients"])


def _match_epochs(progress: Progress, epochs: Epochs, saved: int | None) -> None:
    """Count epochs by the batches trained; warn if the checkpoint counted others. None: it counted none."""
    progress.epochs_trained = epochs.of(progress.batches_trained)
    if saved not in (None, progress.epochs_trained):
        warnings.warn(
            f"The checkpoint holds {saved} epochs in {progress.batches_trained} batches, but with {epochs.length} "
            f"batches an epoch there are {progress.epochs_trained}: the training data has another length now, so it "
            "goes on at another place. Use the same data and batch size to continue exactly.",
            stacklevel=2,
        )


def _build_data(trial: PyTorchTrial, context: PyTorchTrialContext) -> tuple[Stream, Any]:
    training = _checked_loader(trial.build_training_data_loader(), "build_training_data_loader", context)
    begins_at = context.initial_batch_told
    validation = _checked_loader(trial.build_validation_data_loader(), "build_validation_data_loader", context)
    if any(getattr(loader, "num_workers", 0) for loader in (training, validation)):
        # Workers are forked, and must not be while the other thread imports: they would inherit a held lock.
        context.services.recorder.wait()
    stream = stream_of(training, context.distributed, context.trial_seed, begins_at)
    if isinstance(validation, DataLoader):
        # A whole data set is evaluated by the chief alone.
        together = overrides(trial, "evaluate_batch")
        validation = validation_loader(validation, context.distributed if together else None, context.trial_seed)
    if length_of(validation) == 0 and context.distributed.size == 1:
        raise RuntimeError(
            "The validation data loader has no batches; check its data set, and batch_size with drop_last."
        )
    return stream, validation


def _checked_loader(loader: Any, method: str, context: PyTorchTrialContext) -> Any:
    if isinstance(loader, DataLoader) or not context.experimental.dataset_checks:
        return prepare_workers(loader)
    raise RuntimeError(
        f"{method}() returned a {type(loader).__module__}.{type(loader).__name__}; return a "
        "determined.pytorch.DataLoader, which takes the same arguments and continues exactly after a resume. To use "
        "another loader all the same, call context.experimental.disable_dataset_reproducibility_checks() in the "
        "trial's __init__."
    )


def _length_of(trial: PyTorchTrial) -> Callable[[Any], int | None]:
    """Return the function that counts samples; None for batches that only an override could count."""
    if overrides(trial, "get_batch_length"):
        return trial.get_batch_length

    def count(batch: Any) -> int | None:
        try:
            return data_length(batch)
        except (TypeError, ValueError):
            return None

    return count


@contextlib.contextmanager
def _run_scope(context: PyTorchTrialContext) -> Iterator[None]:
    """Let go of the run's clock and stop requests at its end, after all callbacks."""
    try:
        yield
    finally:
        context.follow(None)
        context.set_stop_requested(False)  # answered; another fit() is not meant by it


@contextlib.contextmanager
def _after_batch(
    context: PyTorchTrialContext, clock: Clock, *, with_precision: bool
) -> Iterator[list[Callable[[], None]]]:
    """Give what must follow each batch: nothing, in the plainest case."""
    steps: list[Callable[[], None]] = []
    if with_precision and context.precision.has_work_after_batch:
        steps.append(context.precision.after_batch)
    for stepper in auto_steps(context.lr_schedulers, clock, context.aggregation_frequency):
        steps.append(stepper.after_batch)
    with context.torch_profiler.running() if context.torch_profiler else contextlib.nullcontext() as step:
        yield steps if step is None else [*steps, step]


def _say_where(display: Display, context: PyTorchTrialContext, checkpoint: str | None, is_first_fit: bool) -> None:
    """Say where everything is, and how to go on; of a managed run its runner knows."""
    services = context.services
    if not context.distributed.is_chief or services.info is not None:
        return
    places = [("checkpoints", str(services.checkpoint.store.root))]
    if services.scalars.enabled:
        places.append(("TensorBoard", str(services.recorder.tensorboard_path)))
    if services.recorder.is_recorded:
        places.append(("record", f"det experiment describe {services.recorder.experiment_id}"))
    if checkpoint is not None:
        command = continue_command(checkpoint) if is_first_fit else f"fit(latest_checkpoint={checkpoint!r})"
        places.append(("continue", command))
    for label, text in places:
        display.say(f"{label:>11}: {text}")
