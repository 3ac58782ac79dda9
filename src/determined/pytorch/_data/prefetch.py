"""Copies the next batch to a GPU while the one before is trained."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from determined.pytorch._data.batch import host_bytes, map_tensors

MIN_BYTES = 2**20
"""The smallest batch to prefetch; for fewer bytes, pinning takes longer than copying."""

MAX_BATCHES_AHEAD = 2
"""How far the host may be ahead of the GPU; each batch takes memory there."""


class Prefetch:
    """Moves batches to a GPU from pinned memory, on a stream of their own.

    The host issues the copy of a batch while the GPU still trains on the one before, so both happen at once. Small
    batches, and those that hold more than tensors, arrays and plain values, are moved by `move`.
    """

    def __init__(self, move: Callable[[Any], Any], device: torch.device) -> None:
        self._move = move
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # of torch
        self._issued: collections.deque[torch.cuda.Event] = collections.deque()

    def __call__(self, batch: Any) -> Any:
        """Return the batch on the device, to be used on the current stream."""
        size = host_bytes(batch)
        if size is None or size < MIN_BYTES:
            return self._move(batch)
        current = torch.cuda.current_stream(self._device)
        self._keep_pace(current)

        def send(tensor: Tensor) -> Tensor:
            if tensor.device == self._device:
                return tensor
            ready = tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()
            sent = ready.to(self._device, non_blocking=True)
            # Otherwise the allocator could reuse its memory while the current stream still reads it.
            sent.record_stream(current)
            return sent

        with torch.cuda.stream(self._stream):
            sent = map_tensors(send, batch)
        current.wait_stream(self._stream)
        return sent

    def _keep_pace(self, current: torch.cuda.Stream) -> None:
        """Wait if the GPU is too far behind; it has enough queued work to stay busy."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of torch
        done.record(current)
        self._issued.append(done)
        if len(self._issued) > MAX_BATCHES_AHEAD:
            self._issued.popleft().synchronize()
