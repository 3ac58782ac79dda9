"""What a trial talks to: wrapping, stepping, and questions about where training is."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from determined import core, errors, tensorboard
from determined._trial_context import TrialContext, constant_hparams
from determined.core import Context
from determined.pytorch._backends.base import Backend
from determined.pytorch._backends.single import SingleProcess
from determined.pytorch._data import batch as batches
from determined.pytorch._data.prefetch import Prefetch
from determined.pytorch._experimental import PyTorchExperimentalContext
from determined.pytorch._loop.progress import Clock
from determined.pytorch._metrics.reducers import ReducerSet
from determined.pytorch._optim import apex
from determined.pytorch._optim.gradients import Gradients
from determined.pytorch._optim.lr_scheduler import LRScheduler, Mode
from determined.pytorch._optim.precision import EditGradients, ManualScaling, Precision, Scaler, parameters_of
from determined.pytorch._report.profile import TorchProfiler


class PyTorchTrialContext(TrialContext):
    """What a `PyTorchTrial` uses to train: wrap models, optimizers and schedulers; run backward and step.

    Made by `pytorch.init()`, or by `load_trial_from_checkpoint_path()` for a trial that is only looked at.
    """

    def __init__(
        self,
        *,
        distributed: core.DistributedContext,
        backend: Backend,
        hparams: Mapping[str, Any] | None = None,
        exp_conf: Mapping[str, Any] | None = None,
        trial_seed: int = 0,
        aggregation_frequency: int = 1,
        services: Context | None = None,
        seed_is_given: bool = True,
        initial_batch: int = 0,
    ) -> None:
        super().__init__(distributed=distributed, hparams=hparams, exp_conf=exp_conf)
        self.backend = backend
        """How this process trains, alone or with others."""
        self._services = services
        self.gradients = Gradients(aggregation_frequency)
        """How optimizers step."""
        self._reducers = ReducerSet(distributed)
        self.trains = services is not None
        """Whether this is a run, not a trial that is only looked at."""
        self.compressed: list[nn.Parameter] = []
        """Parameters whose gradients are exchanged in half precision."""
        self.has_own_random_numbers = distributed.size == 1
        """Whether this rank draws other random numbers than the rest."""
        self._clock: Clock | None = None
        self.initial_batch = initial_batch
        """Batches trained before this run; until `fit` has found its checkpoint, those of the one it was told of."""
        self.initial_batch_told = 0
        """The answer of `get_initial_batch` that the program got last outside the training loop."""
        self._warned_types: set[type] = set()
        self._summary_writer: Any = None
        self.trial_seed = trial_seed
        self._seed_of_torch = None if seed_is_given else torch.initial_seed()
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.lr_schedulers: list[LRScheduler] = []
        self.experimental = PyTorchExperimentalContext(self)
        self.torch_profiler: TorchProfiler | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return a context for trying a trial out without a run, with the constant hyperparameters of a config.

        Build the trial with it and call `train_batch` on batches of its data loader, as in a notebook.
        """
        return cls(
            distributed=core.DistributedContext.single(),
            backend=SingleProcess(),
            hparams=constant_hparams(config.get("hyperparameters") or {}),
            exp_conf=config,
            trial_seed=(config.get("reproducibility") or {}).get("experiment_seed", 0),
        )

    # Wrapping

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model, on the device of this process and part of every checkpoint."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"wrap_model({model!r}): pass a torch.nn.Module.")
        for known in self.models:
            if model is known or model is self.backend.unwrap(known):
                return known
        if self.experimental.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
        model = self.backend.wrap(model)
        self.gradients.precision.prepare(model)
        self.models.append(model)
        return model

    def wrap_optimizer(
        self,
        optimizer: Optimizer,
        backward_passes_per_step: int = 1,
        fp16_compression: bool | None = None,
        average_aggregated_gradients: bool | None = None,
    ) -> Optimizer:
        """Return the optimizer, known to `step_optimizer` and part of every checkpoint.

        With `aggregation_frequency` above 1 its gradients are averaged over the batches, unless
        `average_aggregated_gradients` is False. With `fp16_compression` several processes exchange gradients in half
        precision. `backward_passes_per_step` is for programs that name it; any number of passes is possible.
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
        self.gradients.register(optimizer, average_aggregated_gradients)
        if not any(known is optimizer for known in self.optimizers):
            self.optimizers.append(optimizer)
        return optimizer

    def wrap_lr_scheduler(self, lr_scheduler: Any, step_mode: Mode, frequency: int = 1) -> Any:
        """Return the scheduler, which the loop steps as `step_mode` says and every checkpoint holds."""
        wrapped = LRScheduler(lr_scheduler, step_mode, frequency)
        optimizer = getattr(lr_scheduler, "optimizer", None)  # a scheduler of the user's own may have none
        if optimizer is not None and not any(known is optimizer for known in self.optimizers):
            raise errors.InvalidExperimentException(
                f"{type(lr_scheduler).__name__} schedules an optimizer that is not wrapped; call "
                "context.wrap_optimizer() on it first."
            )
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        if isinstance(lr_scheduler, plateau) and step_mode is not Mode.MANUAL_STEP:
            raise errors.InvalidExperimentException(_PLATEAU_REMEDY.format(mode=step_mode.name))
        self.lr_schedulers.append(wrapped)
        return lr_scheduler

    def wrap_scaler(self, scaler: Any) -> Any:
        """Return a gradient scaler that the trial uses by itself, as part of every checkpoint.

        Pass it to `step_optimizer(scaler=...)`, and scale losses and update it in `train_batch`.
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
        """Return what to update with values: the reducer, or an object with `update` for a function.

        Its result is reported under `name`; without a name it must be a dict of metrics.
        """
        handle = self._reducers.wrap(reducer, name, for_training, for_validation)
        return handle.to(self.device) if isinstance(handle, nn.Module) else handle

    def reset_reducers(self) -> None:
        """Reset all reducers; the loop does so at the start of each window and validation."""
        self._reducers.reset()

    def reduce_metrics(self, for_training: bool) -> dict[str, Any]:
        """Return the metrics of all reducers for training, or for validation. All ranks must call this."""
        return self._reducers.reduce(for_training)

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
        """Return (models, optimizers), as they were given, set up for an optimization level of apex.

        O0 is fp32; O1 autocast; O2 half weights with fp32 copies in the optimizer; O3 all half. Half is fp16 on
        a GPU and bfloat16 on a CPU. Needs no apex; `num_losses` and `verbosity` have no effect.
        """
        level = apex.level_of(opt_level).override(
            autocast=patch_torch_functions,
            fp32_batchnorm=_flag("keep_batchnorm_fp32", keep_batchnorm_fp32),
            master_weights=master_weights,
            loss_scale=loss_scale,
        )
        if not enabled:
            return models, optimizers
        chosen_models, chosen_optimizers = _as_list(models), _as_list(optimizers)
        self._check_wrapped(chosen_models, chosen_optimizers)
        self._check_only_precision("configure_apex_amp")
        self.backend.check_apex(level.half_weights)
        self.gradients.precision = apex.choose(
            models=chosen_models,
            optimizers=chosen_optimizers,
            device=self.device,
            level=level,
            cast_model_type=cast_model_type,
            cast_model_outputs=cast_model_outputs,
            bounds=(min_loss_scale, max_loss_scale or 2.0**24),
        )
        return models, optimizers

    def set_precision(self, precision: Precision) -> None:
        """Compute in this precision from now on, with the models that are wrapped already too; once a trial."""
        self._check_only_precision(precision.title)
        for model in self.models:
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
        """Compute gradients of the loss, as `loss.backward()` does, scaled where the precision needs it."""
        keep = retain_graph or create_graph  # a graph of gradients goes through that of the loss
        self.gradients.precision.scale(loss).backward(gradient, keep, create_graph)  # type: ignore[no-untyped-call]  # of torch

    def step_optimizer(
        self,
        optimizer: Optimizer,
        clip_grads: EditGradients | None = None,
        auto_zero_grads: bool = True,
        scaler: Scaler | None = None,
    ) -> None:
        """Step an optimizer and zero its gradients; with aggregation, on every k-th batch only.

        `clip_grads` is called with the optimizer's parameters after unscaling and before the step:
        `lambda params: torch.nn.utils.clip_grad_norm_(params, 1.0)`.
        """
        self.gradients.step(optimizer, clip_grads, auto_zero_grads, scaler, self.current_train_batch)

    def to_device(self, data: Any) -> Any:
        """Return nested data with its tensors on the device of this process."""
        return batches.to_device(data, self.device, self._warned_types)

    def batch_mover(self) -> Callable[[Any], Any]:
        """Return what takes a batch from the loader to where the trial wants it."""
        if not self.experimental.auto_to_device:
            return lambda batch: batch
        move = batches.mover(self.device, self._warned_types)
        if self.device.type == "cuda" and self.experimental.prefetches:
            move = Prefetch(move, self.device)
        return batches.channels_last(move) if self.experimental.channels_last else move

    def set_profiler(self, *args: Any, **kwargs: Any) -> None:
        """Profile the run with `torch.profiler.profile(*args, **kwargs)`; traces go to the TensorBoard folder."""
        self.torch_profiler = TorchProfiler(args, kwargs, self.get_tensorboard_path)

    # Where and what

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.backend.device

    @property
    def aggregation_frequency(self) -> int:
        """Batches between optimizer steps."""
        return self.gradients.aggregation

    @property
    def precision(self) -> Precision:
        """How numbers are kept."""
        return self.gradients.precision

    @property
    def reducers(self) -> ReducerSet:
        """All reducers that were wrapped."""
        return self._reducers

    @property
    def services(self) -> Context:
        """Reporting, checkpoints and preemption of the run."""
        if self._services is None:
            raise errors.InternalException(
                "This context was made to load a trial, not to train it; train within `with pytorch.init():`."
            )
        return self._services

    def get_experiment_id(self) -> int:
        """Return the id under which `det experiment describe` shows this run."""
        return self.services.recorder.experiment_id

    def get_trial_id(self) -> int:
        """Return the id under which `det trial describe` shows this run."""
        return self.services.recorder.trial_id

    def get_trial_seed(self) -> int:
        """Return the seed of the run, on which the order of its data depends."""
        return self.trial_seed

    def get_initial_batch(self) -> int:
        """Return the number of batches that were trained before this run began.

        In the trial's `__init__` those of the checkpoint that the runner or DET_LATEST_CHECKPOINT names, else 0; from
        the `build_*` methods on those of the checkpoint that `fit` continues from. A loader that is no
        `pytorch.DataLoader` and is built after asking is taken to begin there by itself.
        """
        if self._clock is None:
            self.initial_batch_told = self.initial_batch
        return self.initial_batch

    def is_epoch_start(self) -> bool:
        """Say whether the current batch is the first of its epoch."""
        return self._at_batch("is_epoch_start").is_epoch_start

    def is_epoch_end(self) -> bool:
        """Say whether the current batch is the last of its epoch."""
        return self._at_batch("is_epoch_end").is_epoch_end

    def current_train_epoch(self) -> int:
        """Return the index of the current batch's epoch, counted from the start of training."""
        return self._at_batch("current_train_epoch").epoch_idx

    def current_train_batch(self) -> int:
        """Return the index of the current batch, counted from the start of training.

        In `train_batch` and `on_training_epoch_start` that is the batch in training, in validations and all other hooks
        the batch trained last. A validation before the first batch is told index 0.
        """
        return self._at_batch("current_train_batch").batch_idx

    @property
    def _epoch_len(self) -> int | None:
        """Batches an epoch on this rank, as old programs ask for it; None for training data without a length."""
        return self._running("_epoch_len").epoch_len

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
        """Say whether the loop writes TensorBoard curves."""
        return self.services.scalars.enabled

    def seed_of_the_program(self) -> int | None:
        """Return the seed that the program gave torch since this context was made, if no other was asked for."""
        if self._seed_of_torch is None or torch.initial_seed() == self._seed_of_torch:
            return None
        return torch.initial_seed() % 2**31

    def follow(self, clock: Clock | None) -> None:
        """Answer questions about the current batch by this clock; None when no loop runs."""
        self._clock = clock

    def _running(self, call: str) -> Clock:
        if self._clock is None:
            raise errors.InternalException(
                f"context.{call}() has an answer only while Trainer.fit() runs; call it from train_batch, "
                "evaluate_batch or a callback."
            )
        return self._clock

    def _at_batch(self, call: str) -> Clock:
        clock = self._running(call)
        if clock.batch_idx < 0:
            raise errors.InternalException(
                f"context.{call}() has no answer before the first batch; call it from on_training_epoch_start or later."
            )
        return clock

    def _check_wrapped(self, models: list[Any], optimizers: list[Any]) -> None:
        known = [*self.models, *self.optimizers]
        for part in (*models, *optimizers):
            if not any(part is one for one in known):
                raise errors.InvalidExperimentException(
                    f"configure_apex_amp() got a {type(part).__name__} that is not wrapped; call wrap_model() and "
                    "wrap_optimizer() first."
                )

    def _check_only_precision(self, asked: str) -> None:
        present = self.gradients.precision
        if type(present) is not Precision:
            raise errors.InvalidExperimentException(
                f"{asked} does not go together with {present.title}: a trial has one kind of mixed precision, set "
                "once. Remove one of the two."
            )


_PLATEAU_REMEDY = """ReduceLROnPlateau cannot be stepped by the loop ({mode}), since it needs a metric; \
wrap it with LRScheduler.StepMode.MANUAL_STEP and step it from a callback:

    class StepOnPlateau(pytorch.PyTorchCallback):
        def __init__(self, scheduler):
            self.scheduler = scheduler

        def on_validation_end(self, metrics):
            self.scheduler.step(metrics["validation_loss"])
"""


def _as_list(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _flag(name: str, value: bool | str | None) -> bool | None:
    """Read a flag that apex takes as a word too."""
    words: dict[Any, bool] = {"True": True, "False": False}
    flag = words.get(value, value)
    if flag is None or isinstance(flag, bool):
        return flag
    raise errors.InvalidExperimentException(f"configure_apex_amp({name}={value!r}): pass True or False.")
