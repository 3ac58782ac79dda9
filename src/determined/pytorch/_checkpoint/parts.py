"""What the state of a run consists of, in the order in which it is restored."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from determined import errors
from determined.pytorch._backends.base import StateCodec
from determined.pytorch._callback import Callbacks
from determined.pytorch._checkpoint import objects
from determined.pytorch._checkpoint.run_state import ABSENT, Part, RunState, Stateful
from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._data import rng
from determined.pytorch._data.stream import Stream
from determined.pytorch._loop.progress import Progress
from determined.pytorch._metrics.window import MetricWindow, averaged_over_ranks
from determined.pytorch._optim import free_parameters
from determined.pytorch._optim.fused import kept_settings
from determined.pytorch._optim.lr_scheduler import LRScheduler

MODELS, OPTIMIZERS, SCHEDULERS = "models_state_dict", "optimizers_state_dict", "lr_schedulers_state_dict"
_DDP_PREFIX = "module."


def run_state(
    context: PyTorchTrialContext,
    callbacks: Callbacks,
    progress: Progress,
    stream: Stream,
    policy: Stateful,
    window: MetricWindow,
) -> RunState:
    """Return the state of a run."""
    data, generators = _Data(context, stream, progress), _Generators(context, progress)
    gradients = _Gradients(context, stream)
    optimizers = _Each(OPTIMIZERS, context.optimizers, functools.partial(_load_optimizer, context.backend.codec))
    schedulers = _Each(SCHEDULERS, context.lr_schedulers, LRScheduler.load_state_dict)
    free = _Functions(
        functools.partial(free_parameters.state, context), functools.partial(free_parameters.restore, context)
    )
    seed = _Functions(lambda: context.trial_seed, functools.partial(setattr, context, "trial_seed"))
    parts = [
        Part("progress", progress, place=("loop", "progress")),
        Part("data", data, "per_rank", missing={}),
        Part("epochs", _Epochs(progress, stream), place=("loop", "progress", "epochs_trained")),
        Part("policy", policy, place=("loop", "policy")),
        Part("seed", seed, place=("loop", "seed")),
        Part("environment", _Environment(), place=("loop", "circumstances")),
        Part("models", _models(context), place=(MODELS,), missing=None),
        Part("free_parameters", free),
        Part("optimizers", optimizers, place=(OPTIMIZERS,), missing=None),
        Part("schedulers", schedulers, place=(SCHEDULERS,), missing=None),
        Part("scaler", context.precision),
        Part("callbacks", callbacks, place=("callbacks",), missing={}, runs_program=True),
        Part("window", window, "per_rank", merge=_averaged_window),
        Part("reducers", context.reducers, "per_rank", merge=lambda _: ABSENT),
        Part("gradients", gradients, "per_rank", merge=gradients.mean, sharded=True),
        Part("rng", generators, "per_rank", merge=generators.own, missing=None),
    ]
    return RunState(parts, context.distributed, data.open, generators.seed)


class _Functions(NamedTuple):
    """A part whose state two functions get and set."""

    state_dict: Callable[[], Any]
    load_state_dict: Callable[[Any], None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Data:
    """The position in the training data, from which epochs are counted."""

    context: PyTorchTrialContext
    stream: Stream
    progress: Progress

    def state_dict(self) -> dict[str, Any]:
        return self.stream.state_dict()

    def load_state_dict(self, position: dict[str, Any]) -> None:
        self.stream.load_state_dict(position, self.progress.batches_trained)
        self.progress.epochs = self.stream.epochs

    def open(self) -> Callable[[], Any]:
        self.progress.epochs = self.stream.epochs
        self.context.gradients.micro_batches = self.stream.micro_batches
        return self.stream.open(self.progress.batches_trained, self.context.trial_seed)


@dataclasses.dataclass(frozen=True, slots=True)
class _Epochs:
    """The epochs trained: derived from the batches, and saved to notice when the data has another length."""

    progress: Progress
    stream: Stream

    def state_dict(self) -> int:
        return self.progress.epochs_trained

    def load_state_dict(self, saved: int) -> None:
        progress = self.progress
        if saved != progress.epochs_trained and not self.stream.drops_rest:
            warnings.warn(
                f"The checkpoint holds {saved} epochs in {progress.batches_trained} batches, but with "
                f"{progress.epochs.length} batches an epoch there are {progress.epochs_trained}: the training data has "
                "another length now, so training continues at another position. Use the same data and batch size to "
                "continue exactly.",
                stacklevel=2,
            )


class _Environment:
    """What the last bits of results depend on, apart from the state."""

    def state_dict(self) -> dict[str, Any]:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        return {"threads": torch.get_num_threads(), "torch": str(torch.__version__), "device": device}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        now = self.state_dict()
        for name, before in saved.items():
            if before != now.get(name):
                warnings.warn(
                    f"The checkpoint was saved with {name} {before}; training continues with {now.get(name)}, "
                    "so results can differ in their last bits from an uninterrupted run.",
                    stacklevel=2,
                )


@dataclasses.dataclass(frozen=True, slots=True)
class _Each:
    """The states of models, optimizers or schedulers, in the order in which the trial wrapped them."""

    key: str
    owners: Sequence[Any]
    load: Callable[[Any, Any], None]

    def state_dict(self) -> list[Any]:
        return [owner.state_dict() for owner in self.owners]

    def load_state_dict(self, states: Any) -> None:
        if not isinstance(states, list) or len(states) != len(self.owners):
            held = len(states) if isinstance(states, list) else "no"
            raise errors.StateMismatchException(
                f"The checkpoint holds {held} entries of {self.key}, but the trial wraps {len(self.owners)}; "
                "load it with the program that saved it."
            )
        for index, (owner, state) in enumerate(zip(self.owners, states, strict=True)):
            try:
                self.load(owner, state)
            except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
                raise errors.StateMismatchException(
                    f"{self.key}[{index}] of the checkpoint does not fit the trial: {error}"
                ) from error


@dataclasses.dataclass(frozen=True, slots=True)
class _Gradients:
    """Gradients that are kept after a batch, as between aggregated steps."""

    context: PyTorchTrialContext
    stream: Stream

    def state_dict(self) -> dict[str, Tensor]:
        return self.context.backend.codec.gradients(self.context.models) | free_parameters.gradients(self.context)

    def load_state_dict(self, saved: Any) -> None:
        codec = self.context.backend.codec
        gradients = codec.attach(saved)
        if (scale := self.stream.gradient_scale) != 1.0:  # they will be divided by another number of micro-batches
            gradients = {name: gradient * scale for name, gradient in gradients.items()}
        codec.restore_gradients(self.context.models, gradients, unreduced=self.context.aggregation_frequency > 1)
        free_parameters.restore_gradients(self.context, gradients)

    def mean(self, per_rank: Sequence[Any]) -> dict[str, Tensor]:
        first, *others = self.context.backend.codec.attach(list(per_rank))
        shared = sorted(set(first).intersection(*others))
        return {name: _mean([one[name] for one in (first, *others)]) for name in shared}


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    # Ranks that share a gradient hold the same tensor object.
    return tensors[0] if all(one is tensors[0] for one in tensors) else torch.stack(list(tensors)).mean(0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Generators:
    """The random number generators of this rank."""

    context: PyTorchTrialContext
    progress: Progress

    def state_dict(self) -> dict[str, Any]:
        return rng.get_state()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            rng.set_state(state)
        else:  # the checkpoint was saved without this rank
            rank, batches = self.context.distributed.rank, self.progress.batches_trained
            rng.seed_all(rng.derive(self.context.trial_seed, rank, batches))

    def own(self, per_rank: Sequence[Any]) -> Any:
        rank = self.context.distributed.rank
        return per_rank[rank] if rank < len(per_rank) else None

    def seed(self) -> None:
        """Seed each rank differently, once. Until now all ranks draw the same numbers, for example to split data.

        Does nothing if the program has seeded its ranks differently. All ranks must call this.
        """
        context = self.context
        if context.has_own_random_numbers:
            return
        context.has_own_random_numbers = True
        seeds = context.distributed.allgather(torch.initial_seed())
        if not context.distributed.is_chief and len(set(seeds)) == 1:
            rng.seed_all(rng.derive(context.trial_seed, context.distributed.rank))


def _averaged_window(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    windows = [MetricWindow() for _ in states]
    for window, state in zip(windows, states, strict=True):
        window.load_state_dict(state)
    merged = MetricWindow()
    for batch in averaged_over_ranks([window.take() for window in windows]):
        merged.add(dict(batch))
    return merged.state_dict()


# What is wrapped


def load_models(context: PyTorchTrialContext, checkpoint: dict[str, Any], rules: objects.Rules) -> None:
    """Put the weights of a checkpoint that was just read into the models. All ranks must call this."""
    models = objects.decode(context.backend.codec.attach(checkpoint[MODELS]), rules, (MODELS,))
    _models(context).load_state_dict(models)
    free_parameters.restore(context, checkpoint)


def _models(context: PyTorchTrialContext) -> _Each:
    return _Each(MODELS, context.models, functools.partial(_load_model, context.backend.codec))


def _load_model(codec: StateCodec, model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load weights into a model, whether or not they were saved from one wrapped for several processes."""
    is_known = weights.keys() <= model.state_dict().keys()  # a model may have a child that is called `module` itself
    if not is_known and all(name.startswith(_DDP_PREFIX) for name in weights):
        weights = {name.removeprefix(_DDP_PREFIX): value for name, value in weights.items()}
    model.load_state_dict(codec.fit_model(model, weights))


def _load_optimizer(codec: StateCodec, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state of an optimizer, also if its parameters were sharded differently when it was saved."""
    fitting = dict(codec.fit_optimizer(optimizer, state))
    if isinstance(saved := fitting.get("param_groups"), list) and len(saved) == len(optimizer.param_groups):
        # This run decides how its optimizers step, not the run that saved them.
        pairs = zip(saved, optimizer.param_groups, strict=True)
        fitting["param_groups"] = [group | kept_settings(own) for group, own in pairs]
    optimizer.load_state_dict(fitting)
