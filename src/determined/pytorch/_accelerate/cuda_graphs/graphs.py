"""Training by CUDA graphs: the first batches train without a graph, the others as replays of what was captured."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from determined.pytorch._accelerate.cuda_graphs.capture import CapturedBatch, form_of
from determined.pytorch._accelerate.cuda_graphs.checks import Inspection, refusal_of
from determined.pytorch._accelerate.cuda_graphs.optimizers import CapturableOptimizers
from determined.pytorch._accelerate.cuda_graphs.verify import Verification
from determined.pytorch._context import PyTorchTrialContext
from determined.pytorch._data.batch import host_bytes
from determined.pytorch._data.prefetch import MIN_BYTES
from determined.pytorch._experimental import GraphOptions
from determined.pytorch._optim.precision import parameters_of

TrainBatch = Callable[[Any, int, int], Any]
Move = Callable[[Any], Any]

_LATER_WARMUP = 2
"""Batches of a further form that train without a graph before one is captured."""
_MAX_FORMS = 1000
_MIN_REPLAYS = 50
"""Replays that make up for the time of a capture."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepFunctions:
    """The functions that train a batch and move it to the device."""

    train_batch: TrainBatch
    to_device: Move
    ends_batches: bool
    """Whether `train_batch` includes the precision's `after_batch`."""


@contextlib.contextmanager
def step_functions(
    context: PyTorchTrialContext, train_batch: TrainBatch, move: Move, say: Callable[[str], None]
) -> Iterator[StepFunctions]:
    """Give the functions of a training step: with CUDA graphs if the trial uses them, else those passed in."""
    options = context.experimental.graph_options
    if options is not None and (reason := _obstacle(context)) is not None:
        say(f"Training continues without CUDA graphs: {reason}.")
        options = None
    if options is None:
        yield StepFunctions(train_batch, move, ends_batches=False)
        return
    own = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call]  # of torch
    outer = torch.cuda.current_stream(context.device)
    own.wait_stream(outer)
    # All training runs on the stream on which batches are captured.
    with torch.cuda.stream(own):
        training = GraphedTraining(context, train_batch, options, say)
        context.gradients.zeroes_in_place = context.aggregation_frequency > 1  # all graphs add to the same gradients
        try:
            yield StepFunctions(training.train, training.mover(move), ends_batches=True)
        finally:
            context.gradients.zeroes_in_place = False
    outer.wait_stream(own)


def _obstacle(context: PyTorchTrialContext) -> str | None:
    if context.device.type != "cuda":
        return "they need a CUDA GPU"
    if context.distributed.size > 1 or context.backend.forward_is_collective:
        return "they are for training in one process"
    for parameter in itertools.chain.from_iterable(map(parameters_of, context.optimizers)):
        if not parameter.is_cuda:
            return f"an optimizer has a parameter of shape {tuple(parameter.shape)} in host memory"
    if context.gradients.micro_batches > 1:
        return "each batch is trained in several parts, because the number of processes has changed"
    if not context.experimental.auto_to_device:
        return "batches stay in host memory (disable_auto_to_device), which a graph cannot read"
    return None


class GraphedTraining:
    """Trains batches in place of `train_batch`: captures each form of batches after a warm-up, and replays it.

    Batches that cannot be captured train without a graph, with one message that gives the reason.
    """

    def __init__(
        self,
        context: PyTorchTrialContext,
        train_batch: TrainBatch,
        options: GraphOptions,
        say: Callable[[str], None],
    ) -> None:
        self._context = context
        self._train_batch = train_batch
        self._options = options
        self._say = say
        self._optimizers = CapturableOptimizers(context.optimizers)
        of_models = itertools.chain.from_iterable(model.parameters() for model in context.models)
        of_optimizers = itertools.chain.from_iterable(map(parameters_of, context.optimizers))
        self._parameters = list(dict.fromkeys(itertools.chain(of_models, of_optimizers)))
        self._constants = self._settings()
        self._graphs: dict[Any, CapturedBatch] = {}
        self._seen: dict[Any, int] = {}
        self._replays = 0
        self._wasted_captures = 0
        self._form: Any = None
        self._pool = torch.cuda.graph_pool_handle()
        self._inspection = Inspection(context.reducers)
        self._verification = Verification(context) if options.verify else None
        self._captures_more = True
        if (reason := self._optimizers.refusal()) is not None:
            self._give_up(reason)

    def mover(self, move: Move) -> Move:
        """Return the function that moves a batch to the device, except small ones, which a replay moves itself."""

        def moved(batch: Any) -> Any:
            self._form = form_of(batch)
            size = host_bytes(batch)
            if self._graphs and size is not None and size < MIN_BYTES and self._key() in self._graphs:
                return batch
            return move(batch)

        return moved

    def train(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        """Train one batch, and return its metrics."""
        self._optimizers.update()
        if not (self._graphs or self._captures_more):
            return self._eagerly(batch, epoch_idx, batch_idx)
        self._check_settings()
        graph = self._graphs.get(self._key())
        if graph is None and self._is_captured_now():
            graph = self._capture(batch, epoch_idx, batch_idx)
        if graph is None:
            return self._eagerly(self._context.to_device(batch), epoch_idx, batch_idx)
        if self._verification is not None and self._verification.is_due():
            return self._verified(graph, self._context.to_device(batch), epoch_idx, batch_idx)
        self._replays += 1
        return graph.replay(batch)

    def _key(self) -> Any:
        """Return the key of a graph: the form of its batches, and whether optimizers step."""
        every = self._context.aggregation_frequency
        return self._form, every == 1 or (self._context.current_train_batch() + 1) % every == 0

    # Without a graph

    def _eagerly(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        """Train a batch without a graph; one of the first is inspected for what a graph could not repeat."""
        if not (self._captures_more and self._is_inspected_now()):
            return self._step(batch, epoch_idx, batch_idx)
        inspection = self._inspection
        epoch, index = inspection.index(epoch_idx), inspection.index(batch_idx)
        metrics = inspection.train(lambda: self._step(batch, epoch, index), batch)
        if inspection.refusal is not None:
            self._give_up(inspection.refusal)
        return metrics

    def _step(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        """Do everything that belongs to a batch: this is what a graph captures."""
        with self._optimizers.ready():
            metrics = self._train_batch(batch, epoch_idx, batch_idx)
            self._context.precision.after_batch()
        return metrics

    # Capturing

    def _warmup(self) -> int:
        return self._options.warmup if len(self._seen) == 1 else _LATER_WARMUP

    def _is_inspected_now(self) -> bool:
        """Return whether this is the second to last batch before a capture: the first and the last initialize state."""
        return self._seen.get(self._key()) == self._warmup() - 1

    def _is_captured_now(self) -> bool:
        """Count this batch, and return whether enough batches of its form have been trained."""
        if not self._captures_more:
            return False
        key = self._key()
        seen = self._seen.get(key, 0)
        self._seen[key] = seen + 1
        if len(self._seen) > _MAX_FORMS or (seen and len(self._graphs) >= self._options.max_graphs):
            limit = f"max_graphs={self._options.max_graphs}"
            self._give_up(f"batches come in more forms (sizes, types, values besides tensors) than {limit}")
            return False
        return seen >= self._warmup()

    def _capture(self, batch: Any, epoch_idx: int, batch_idx: int) -> CapturedBatch | None:
        """Capture a batch without training it; return the graph, or None if that fails."""
        began = time.monotonic()

        def step(own: Any) -> Any:
            return self._step(own, epoch_idx, batch_idx)

        try:
            graph = CapturedBatch(self._context.to_device(batch), step, self._parameters, self._pool)
        except Exception as error:
            self._context.precision.forget_batch()
            self._give_up(refusal_of(error))
            return None
        self._graphs[self._key()] = graph
        if len(self._graphs) == 1 and not self._wasted_captures:
            self._say(f"Batches are replayed as a CUDA graph, captured in {time.monotonic() - began:.1f} s.")
        return graph

    def _check_settings(self) -> None:
        """Drop all graphs if a setting changed that they hold as a constant."""
        before, self._constants = self._constants, self._settings()
        if before == self._constants or not self._graphs:
            return
        self._graphs.clear()
        self._seen.clear()
        self._wasted_captures += self._replays < _MIN_REPLAYS
        self._replays = 0
        if self._wasted_captures > 1:
            name = self._optimizers.changed_setting(before) or "which parameters require gradients"
            self._give_up(f"{name} changes again and again, which a graph holds as a constant")

    def _settings(self) -> tuple[Any, ...]:
        return *self._optimizers.settings(), *(parameter.requires_grad for parameter in self._parameters)

    def _give_up(self, refusal: str) -> None:
        """Capture no more graphs; those captured stay in use."""
        self._captures_more = False
        what = "Other batches train" if self._graphs else "Training continues"
        self._say(f"{what} without CUDA graphs: {refusal}.")

    # Verifying

    def _verified(self, graph: CapturedBatch, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        assert self._verification is not None
        metrics, difference = self._verification.run(
            lambda: self._step(batch, epoch_idx, batch_idx), lambda: graph.replay(batch)
        )
        if difference is not None:
            self._graphs.clear()
            self._give_up(f"the replay of batch {batch_idx} and train_batch() differ in {difference}")
        return metrics
