"""The context of a trial: wraps models, runs backward, steps optimizers, and knows the progress of training."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from determined import core, errors, tensorboard
from determined._trial_context import TrialContext
from determined.core import Context
from determined.pytorch._backends.base import Backend, SingleProcess
from determined.pytorch._data import batch as batches
from determined.pytorch._data.prefetch import Prefetch
from determined.pytorch._experimental import PyTorchExperimentalContext
from determined.pytorch._loop.progress import Progress
from determined.pytorch._metrics.reducers import ReducerSet
from determined.pytorch._optim import apex
from determined.pytorch._optim.gradients import Gradients
from determined.pytorch._optim.lr_scheduler import LRScheduler, Mode
from determined.pytorch._optim.precision import EditGradients, ManualScaling, Precision, parameters_of


class PyTorchTrialContext(TrialContext):
    """What a `PyTorchTrial` trains with: wraps models, optimizers and schedulers, runs backward and steps.

    `pytorch.init()` gives one for training, `load_trial_from_checkpoint_path()` one for a trial that is only loaded.
    """

    def __init__(
        self,
        *,
        distributed: core.DistributedContext | None = None,
        backend: Backend | None = None,
        hparams: Mapping[str, Any] | None = None,
        exp_conf: Mapping[str, Any] | None = None,
        trial_seed: int = 0,
        aggregation_frequency: int = 1,
        services: Context | None = None,
        seed_is_given: bool = True,
        initial_batch: int = 0,
    ) -> None:
        super().__init__(distributed=distributed, hparams=hparams, exp_conf=exp_conf)
        self.backend = backend or SingleProcess()
        """How this process trains: alone, with DDP or with FSDP."""
        self._services = services
        self.gradients = Gradients(aggregation_frequency)
        """Steps optimizers, with the precision and the aggregation of this run."""
        self.reducers = ReducerSet(self.distributed)
        self.trains = services is not None
        """Whether this is a training run, not a trial that is only loaded."""
        self.compressed: list[nn.Parameter] = []
        """Parameters whose gradients are exchanged in half precision."""
        self.has_own_random_numbers = self.distributed.size == 1
        """Whether this rank is seeded differently from the other ranks."""
        self.progress: Progress | None = None
        """The progress of training; None outside of `fit`."""
        self.initial_batch = initial_batch
        """Batches trained before this run; until `fit` finds its checkpoint, those of the configured checkpoint."""
        self.reported_initial_batch = 0
        """What `get_initial_batch` returned last outside the training loop."""
        self._warned_types: set[type] = set()
        self._summary_writer: Any = None
        self.trial_seed = trial_seed
        self._seed_of_torch = None if seed_is_given else torch.initial_seed()
        self.models: list[nn.Module] = []
        self.lr_schedulers: list[LRScheduler] = []
        self.experimental = PyTorchExperimentalContext(self)
        self.torch_profiler: Callable[[], torch.profiler.profile] | None = None
        """Returns the profiler of a run, which the loop steps after each batch."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return a context without a run, for trying out a trial with the constant hyperparameters of a config.

        Build the trial with it and call `train_batch` on batches of its data loader, for example in a notebook.
        """
        context = super().from_config(config)
        context.trial_seed = (config.get("reproducibility") or {}).get("experiment_seed", 0)
        return context

    # Wrapping

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model on the device of this process. Checkpoints save it."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"wrap_model({model!r}): pass a torch.nn.Module.")
        for known in self.models:
            if model is known or model is self.backend.unwrap(known):
                return known
        if self.experimental.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
        model = self.backend.wrap(model)
        self.precision.prepare(model)
        self.models.append(model)
        return model

    def wrap_optimizer(
        self,
        optimizer: Optimizer,
        backward_passes_per_step: int = 1,
        fp16_compression: bool | None = None,
        average_aggregated_gradients: bool | None = None,
    ) -> Optimizer:
        """Return the optimizer, ready for `step_optimizer`. Checkpoints save it.

        With `aggregation_frequency` above 1, gradients are averaged over the aggregated batches, unless
        `average_aggregated_gradients` is False. With `fp16_compression`, processes exchange gradients in half
        precision. `backward_passes_per_step` has no effect: any number of backward passes is possible.
        """
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"wrap_optimizer({optimizer!r}): pass a torch.optim.Optimizer.")
        if backward_passes_per_step < 1:
            raise ValueError(f"wrap_optimizer(backward_passes_per_step={backward_passes_per_step!r}): use 1 or more.")
        settings = (self._exp_conf or {}).get("optimizations") or {}
        if average_aggregated_gradients is None:
            average_aggregated_gradients = bool(settings.get("average_aggregated_gradients", True))
        if settings.get("gradient_compression", False) if fp16_compression is None else fp16_compression:
            self.compressed += parameters_of(optimizer)
        self.backend.accept(optimizer)
        self.gradients.averages[optimizer] = average_aggregated_gradients
        return optimizer

    def wrap_lr_scheduler(self, lr_scheduler: Any, step_mode: Mode, frequency: int = 1) -> Any:
        """Return the scheduler. The loop steps it according to `step_mode` and `frequency`; checkpoints save it."""
        wrapped = LRScheduler(lr_scheduler, step_mode, frequency)
        optimizer = getattr(lr_scheduler, "optimizer", None)  # a scheduler of the user's own may have none
        if optimizer is not None and optimizer not in self.gradients.averages:
            raise errors.InvalidExperimentException(
                f"{type(lr_scheduler).__name__} schedules an optimizer that is not wrapped; call "
                "context.wrap_optimizer() on it first."
            )
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        if isinstance(lr_scheduler, plateau) and step_mode is not Mode.MANUAL_STEP:
            raise errors.InvalidExperimentException(
                f"ReduceLROnPlateau needs a metric, so the loop cannot step it ({step_mode.name}); wrap it with "
                "LRScheduler.StepMode.MANUAL_STEP, and step it in a pytorch.PyTorchCallback:\n\n"
                "    def on_validation_end(self, metrics):\n"
                "        self.scheduler.step(metrics['validation_loss'])"
            )
        self.lr_schedulers.append(wrapped)
        return lr_scheduler

    def wrap_scaler(self, scaler: Any) -> Any:
        """Return a gradient scaler that the trial uses in `train_batch`. Checkpoints save it.

        Scale losses and update the scaler in `train_batch`, and pass it to `step_optimizer(scaler=...)`.
        """
        if self.models:
            raise errors.InvalidExperimentException(
                "wrap_scaler() came after wrap_model(); call it before any model is wrapped."
            )
        self.set_precision(ManualScaling(scaler))
        return scaler

    def wrap_reducer(
        self, reducer: Any, name: str | None = None, for_training: bool = True, for_validation: bool = True
    ) -> Any:
        """Return the reducer to update with values; for a function, an object with an `update` method.

        The result is reported under `name`; without a name it must be a dict of metrics.
        """
        handle = self.reducers.wrap(reducer, name, for_training, for_validation)
        return handle.to(self.device) if isinstance(handle, nn.Module) else handle

    def reset_reducers(self) -> None:
        """Reset all reducers. The loop does this at the start of each window and validation."""
        self.reducers.reset()

    def reduce_metrics(self, for_training: bool) -> dict[str, Any]:
        """Return the metrics of all reducers for training or for validation. All ranks must call this."""
        return self.reducers.reduce(for_training)

    def configure_apex_amp(
        self,
        models: Any,
        optimizers: Any,
        enabled: bool = True,
        opt_level: str = "O1",
        cast_model_type: torch.dtype | None = None,
        patch_torch_functions: bool | None = None,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | None = None,
        loss_scale: float | str | None = None,
        cast_model_outputs: torch.dtype | None = None,
        num_losses: int | None = 1,
        verbosity: int | None = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
    ) -> tuple[Any, Any]:
        """Set up an optimization level of apex; return (models, optimizers) as given.

        O0 is fp32; O1 autocast; O2 half weights with fp32 copies in the optimizer; O3 all half. Half is fp16 on
        a GPU and bfloat16 on a CPU. apex is not needed. `num_losses` and `verbosity` have no effect.
        """
        level = apex.level_of(
            opt_level,
            autocast=patch_torch_functions,
            fp32_batchnorm=apex.flag("keep_batchnorm_fp32", keep_batchnorm_fp32),
            master_weights=master_weights,
            loss_scale=loss_scale,
        )
        if not enabled:
            return models, optimizers
        given_models = models if isinstance(models, (list, tuple)) else [models]
        given_optimizers = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        known = [*self.models, *self.optimizers]
        for part in (*given_models, *given_optimizers):
            if not any(part is one for one in known):
                raise errors.InvalidExperimentException(
                    f"configure_apex_amp() got a {type(part).__name__} that is not wrapped; call wrap_model() and "
                    "wrap_optimizer() first."
                )
        self.backend.check_apex(level.half_weights)
        bounds = (min_loss_scale, max_loss_scale or 2.0**24)
        precision = apex.precision_of(level, self.device, cast_model_type, cast_model_outputs, bounds)
        self.set_precision(precision, given_models)
        precision.take_over(given_optimizers)
        return models, optimizers

    def set_precision(self, precision: Precision, models: Sequence[nn.Module] | None = None) -> None:
        """Compute in this precision, with `models` or all models wrapped so far, and all wrapped later."""
        if type(self.precision) is not Precision:
            raise errors.InvalidExperimentException(
                f"{precision.title} does not go together with {self.precision.title}: a trial has one kind of mixed "
                "precision, set once. Remove one of the two."
            )
        for model in self.models if models is None else models:
            precision.prepare(model)
        self.gradients.precision = precision

    # Training

    def backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Compute gradients like `loss.backward()`, with the loss scaled if the precision needs it."""
        keep = retain_graph or create_graph  # a second backward goes through the graph of the loss
        self.gradients.precision.scale(loss).backward(gradient, keep, create_graph)  # type: ignore[no-untyped-call]  # of torch

    def step_optimizer(
        self,
        optimizer: Optimizer,
        clip_grads: EditGradients | None = None,
        auto_zero_grads: bool = True,
        scaler: GradScaler | None = None,
    ) -> None:
        """Step an optimizer and zero its gradients; with aggregation, on every k-th batch only.

        `clip_grads` is called with the optimizer's parameters after unscaling and before the step, for example
        `lambda params: torch.nn.utils.clip_grad_norm_(params, 1.0)`.
        """
        self.gradients.step(optimizer, clip_grads, auto_zero_grads, scaler, self.current_train_batch)

    def to_device(self, data: Any) -> Any:
        """Return nested data with its tensors on the device of this process."""
        return batches.to_device(data, self.device, self._warned_types)

    def batch_mover(self) -> Callable[[Any], Any]:
        """Return the function that moves a batch of the loader to the device, as the trial has configured it."""
        if not self.experimental.auto_to_device:
            return lambda batch: batch
        move = batches.mover(self.device, self._warned_types)
        if self.device.type == "cuda" and self.experimental.prefetches:
            move = Prefetch(move, self.device)
        return batches.channels_last(move) if self.experimental.channels_last else move

    def set_profiler(self, *args: Any, **kwargs: Any) -> None:
        """Profile the run with `torch.profiler.profile(*args, **kwargs)`. Traces go to the TensorBoard folder."""

        def write(profiler: torch.profiler.profile) -> None:
            torch.profiler.tensorboard_trace_handler(str(self.get_tensorboard_path()))(profiler)

        self.torch_profiler = functools.partial(torch.profiler.profile, *args, **{"on_trace_ready": write, **kwargs})

    # State of the run

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.backend.device

    @property
    def optimizers(self) -> list[Optimizer]:
        """The wrapped optimizers, in the order in which they were wrapped."""
        return list(self.gradients.averages)

    @property
    def aggregation_frequency(self) -> int:
        """Batches between optimizer steps."""
        return self.gradients.aggregation

    @property
    def precision(self) -> Precision:
        """The precision of weights and computations."""
        return self.gradients.precision

    @property
    def services(self) -> Context:
        """The core context of the run: reporting, checkpoints and preemption."""
        if self._services is None:
            raise errors.InternalException(
                "This context was made to load a trial, not to train it; train within `with pytorch.init():`."
            )
        return self._services

    def get_experiment_id(self) -> int:
        """Return the experiment id of this run, as `det experiment describe` takes it."""
        return self.services.recorder.experiment_id

    def get_trial_id(self) -> int:
        """Return the trial id of this run, as `det trial describe` takes it."""
        return self.services.recorder.trial_id

    def get_trial_seed(self) -> int:
        """Return the seed of the run. The order of the data depends on it."""
        return self.trial_seed

    def get_initial_batch(self) -> int:
        """Return the number of batches that were trained before this run began.

        In the trial's `__init__`, this is the count of the checkpoint that the runner or DET_LATEST_CHECKPOINT names,
        or 0. From the `build_*` methods on, it is the count of the checkpoint that `fit` continues from. If you call
        this before you build a loader that is not a `pytorch.DataLoader`, that loader must start at this batch.
        """
        if self.progress is None:
            self.reported_initial_batch = self.initial_batch
        return self.initial_batch

    def is_epoch_start(self) -> bool:
        """Return whether the current batch is the first of its epoch."""
        return self._at_batch("is_epoch_start").is_epoch_start

    def is_epoch_end(self) -> bool:
        """Return whether the current batch is the last of its epoch."""
        return self._at_batch("is_epoch_end").is_epoch_end

    def current_train_epoch(self) -> int:
        """Return the epoch index of the current batch, counted from the start of training."""
        return self._at_batch("current_train_epoch").epoch_idx

    def current_train_batch(self) -> int:
        """Return the index of the current batch, counted from the start of training.

        In `train_batch` and `on_training_epoch_start` it is the batch in training; in validations and all other hooks,
        the batch trained last. A validation before the first batch gets index 0.
        """
        return self._at_batch("current_train_batch").batch_idx

    @property
    def _epoch_len(self) -> int | None:
        """Batches per epoch on this rank, for old programs; None if the training data has no length."""
        return self._running("_epoch_len").epochs.rank_length

    def get_tensorboard_path(self) -> pathlib.Path:
        """Return the folder of this trial's TensorBoard files."""
        return self.services.train.get_tensorboard_path()

    def get_tensorboard_writer(self) -> Any:
        """Return a `torch.utils.tensorboard.SummaryWriter` on this trial's TensorBoard folder."""
        if self._summary_writer is None:
            self._summary_writer = tensorboard.summary_writer(self.services.scalars.file)
        return self._summary_writer

    def set_enable_tensorboard_logging(self, enable_tensorboard_logging: bool) -> None:
        """Switch the TensorBoard curves of the loop's metrics on or off."""
        if not isinstance(enable_tensorboard_logging, bool):
            raise errors.MisuseError(
                f"set_enable_tensorboard_logging({enable_tensorboard_logging!r}): pass True or False."
            )
        self.services.scalars.enabled = enable_tensorboard_logging

    def get_enable_tensorboard_logging(self) -> bool:
        """Return whether the loop writes TensorBoard curves."""
        return self.services.scalars.enabled

    def seed_of_the_program(self) -> int | None:
        """Return the seed that the program set in torch after `init`; None if it set none or the config has one."""
        if self._seed_of_torch is None or torch.initial_seed() == self._seed_of_torch:
            return None
        return torch.initial_seed() % 2**31

    def _running(self, call: str) -> Progress:
        if self.progress is None:
            raise errors.InternalException(
                f"context.{call}() works only while Trainer.fit() runs; call it from train_batch, "
                "evaluate_batch or a callback."
            )
        return self.progress

    def _at_batch(self, call: str) -> Progress:
        progress = self._running(call)
        if progress.batch_idx < 0:
            raise errors.InternalException(
                f"context.{call}() works only from the first batch on; call it from on_training_epoch_start or later."
            )
        return progress
