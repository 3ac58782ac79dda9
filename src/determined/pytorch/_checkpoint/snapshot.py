"""A copy of the training state in host memory, taken while training waits and written while it continues."""

from __future__ import annotations

import copy
import ctypes
from typing import Any

import torch
from torch import Tensor

from determined.pytorch._data.tree import PLAIN_CONTAINERS, map_entries

Key = tuple[Any, ...]


class HostCopier:
    """Copies states into buffers that are reused for the next copy, so the host holds one copy of the state.

    On a GPU the buffers are pinned and filled on a stream of their own. The training stream waits for the copies; the
    host does not. Call `ready` before reading a copy, and do not read it any more when the next one is taken.
    """

    def __init__(self) -> None:
        self._buffers: dict[Key, Tensor] = {}
        self._fresh: dict[Key, Tensor] = {}
        self._copied: dict[Key, Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._done: list[torch.cuda.Event] = []

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state that shares no memory with it."""
        self._fresh, self._copied = {}, {}
        try:
            copied: dict[str, Any] = self._copy(state, ())
            self._end_streams()
        finally:
            # Buffers that this copy did not use are freed.
            self._buffers, self._fresh, self._copied = self._fresh, {}, {}
        return copied

    def ready(self) -> None:
        """Wait until the last copy is complete."""
        for event in self._done:
            event.synchronize()

    def _copy(self, value: Any, place: Key) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value, place)
        if type(value) not in PLAIN_CONTAINERS:
            return copy.deepcopy(value)
        copied = map_entries(lambda key, one: self._copy(one, (*place, key)), value)
        if attributes := getattr(value, "__dict__", None):  # of torch's state dicts: the versions of modules
            vars(copied).update(copy.deepcopy(attributes))
        return copied

    def _copy_tensor(self, tensor: Tensor, place: Key) -> Tensor:
        tensor = tensor.detach()
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor.clone().cpu()
        # Tied weights stay one tensor, in memory and in the file.
        form = (tensor.dtype, tensor.shape, tensor.stride())
        same = (tensor.device, tensor.data_ptr(), tensor.is_conj(), tensor.is_neg(), *form)
        if tensor.numel() and same in self._copied:
            return self._copied[same]
        buffer = self._buffers.get((*place, form))
        if buffer is None:
            # With the tensor's strides: an optimizer steps faster if its state has the strides of the weights.
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self._fill(buffer, tensor)
        self._fresh[*place, form] = self._copied[same] = buffer
        return buffer

    def _fill(self, buffer: Tensor, tensor: Tensor) -> None:
        if not tensor.is_cuda:
            _copy_on_host(buffer, tensor)
            return
        if tensor.device not in self._streams:
            self._streams[tensor.device] = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]  # of torch
        stream = self._streams[tensor.device]
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            buffer.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)

    def _end_streams(self) -> None:
        self._done = [stream.record_event() for stream in self._streams.values()]
        for device, stream in self._streams.items():
            # Training must not change what is still being copied.
            torch.cuda.current_stream(device).wait_stream(stream)


def _copy_on_host(buffer: Tensor, tensor: Tensor) -> None:
    is_plain = tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()
    if is_plain and tensor.stride() == buffer.stride():
        # In one thread: torch's copy waits for all of its threads, also for those without a free core.
        ctypes.memmove(buffer.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    else:
        buffer.copy_(tensor)
