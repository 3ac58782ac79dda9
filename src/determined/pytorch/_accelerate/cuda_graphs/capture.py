"""One batch of training as a CUDA graph: captured once, replayed with other inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from determined.pytorch._data.batch import map_tensors
from determined.pytorch._data.tree import leaves

_PLAIN = (str, bytes, int, float, complex, type(None))


class CapturedBatch:
    """What `train_batch` does with one batch, captured to be replayed with others of the same form."""

    def __init__(
        self, batch: Any, train_batch: Callable[[Any], Any], parameters: Sequence[nn.Parameter], pool: Any
    ) -> None:
        """Capture, without running anything on the GPU. A failure leaves everything as it was before."""
        self._inputs: list[Tensor] = []
        own = map_tensors(self._own_input, batch)
        self._graph = torch.cuda.CUDAGraph()
        self._parameters = parameters
        before = [parameter.grad for parameter in parameters]
        with (
            _undone_on_failure(parameters, before, pool),
            torch.cuda.graph(
                self._graph,
                pool=pool,
                stream=torch.cuda.current_stream(),
                capture_error_mode="thread_local",  # other threads, which write checkpoints, continue
            ),
        ):
            metrics = train_batch(own)
        self._metrics = {"loss": metrics} if isinstance(metrics, Tensor) else dict(metrics)
        after = [parameter.grad for parameter in parameters]
        has_own = any(a is not b and a is not None for a, b in zip(after, before, strict=True))
        self._gradients = after if has_own else None

    def replay(self, batch: Any) -> dict[str, Any]:
        """Train with a batch, in host memory or on the device, and return its metrics. Does not wait for the GPU."""
        for own, given in zip(self._inputs, tensors_in(batch), strict=True):
            own.copy_(given, non_blocking=True)
        self._graph.replay()
        if self._gradients is not None:  # the program keeps gradients between batches, and this graph has its own
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = gradient
        # The next replay overwrites the outputs of this one.
        return {name: None if value is None else value.clone() for name, value in self._metrics.items()}

    def _own_input(self, tensor: Tensor) -> Tensor:
        own = tensor.detach().clone()
        self._inputs.append(own)
        return own


def form_of(data: Any) -> Any:
    """Return what must be equal for a graph to be replayed: structure, shapes, types, and all values but tensors."""
    if isinstance(data, (Tensor, np.ndarray)):
        return tuple(data.shape), data.dtype
    if isinstance(data, Mapping):
        return type(data), tuple((key, form_of(value)) for key, value in data.items())
    if isinstance(data, (list, tuple)):
        return type(data), *map(form_of, data)
    return data if isinstance(data, _PLAIN) else object()  # other values never compare equal


def tensors_in(data: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch in the order of `map_tensors`."""
    return (torch.as_tensor(leaf) for leaf in leaves(data) if isinstance(leaf, (Tensor, np.ndarray)))


@contextlib.contextmanager
def _undone_on_failure(
    parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], pool: Any
) -> Iterator[None]:
    """Restore what a failed capture has changed: gradients, random numbers, the memory pool."""
    device = torch.cuda.current_device()
    generator = torch.cuda.default_generators[device]
    numbers = generator.clone_state()
    try:
        yield
    except BaseException:
        generator.graphsafe_set_state(numbers)  # the current state still waits for its capture to end
        with contextlib.suppress(RuntimeError, AttributeError):  # torch does this itself, unless it failed too
            torch._C._cuda_endAllocateToPool(device, pool)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        raise
