"""What keeps a batch from being captured in a CUDA graph, found out while batches train as ever."""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import pathlib
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from determined.pytorch._data import rng
from determined.pytorch._data.batch import digest
from determined.pytorch._metrics.reducers import ReducerSet

_OURS = (str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(torch.__file__).parent))
_WAITING = "called a synchronizing CUDA operation"


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why batches are not captured, and where in the program."""

    reason: str
    place: str | None = None

    def __str__(self) -> str:
        return self.reason + (f", at {self.place}" if self.place else "")


class Inspection:
    """Trains batches without a graph and notes what a graph could not repeat."""

    def __init__(self, reducers: ReducerSet) -> None:
        self._reducers = reducers
        self.refusal: Refusal | None = None

    def train(self, train_batch: Callable[[], Any], batch: Any) -> Any:
        """Return what `train_batch` returns, having looked at everything it does."""
        numbers, reduced = _host_numbers(), _contents(self._reducers.state_dict())
        with _noting_waits(self._note), _CopyWatch(self._note):
            metrics = train_batch()
        if _host_numbers() != numbers:
            self._note("train_batch() draws random numbers on the CPU, which a graph would repeat")
        if _contents(self._reducers.state_dict()) != reduced:
            self._note("train_batch() updates a reducer, which only Python can")
        if (name := _plain_metric(metrics)) is not None:
            self._note(f"the metric {name!r} is a number of Python, which a graph would repeat; return a tensor")
        if not _is_on_device(batch):
            self._note("batches hold tensors in host memory, which a graph does not reach")
        return metrics

    def index(self, value: int) -> int:
        """Return an index of a batch that tells when the program computes with it."""
        return _watched(value, self._note)

    def _note(self, reason: str, place: str | None = None) -> None:
        if self.refusal is None:
            self.refusal = Refusal(reason, place)


def refusal_of(error: BaseException) -> Refusal:
    """Return why a capture failed: the first error in its chain, at the last line that is the program's."""
    while error.__context__ is not None:
        error = error.__context__
    frames = traceback.extract_tb(error.__traceback__)
    place = next((_described(f.filename, f.lineno) for f in reversed(frames) if _is_of_program(f.filename)), None)
    first = str(error).strip().partition("\n")[0]
    return Refusal(f"the capture failed ({type(error).__name__}: {first})", place)


@contextlib.contextmanager
def _noting_waits(note: Callable[[str, str | None], None]) -> Iterator[None]:
    """Note where the program waits for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        if _WAITING in str(warning.message):
            note("train_batch() waits for the GPU", _described(warning.filename, warning.lineno))
        elif "debug mode" not in str(warning.message):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


class _CopyWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Notes tensors that are sent from the host, whose memory a graph would read again when it has long been freed."""

    def __init__(self, note: Callable[[str, str | None], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._note = note

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _COPIES and isinstance(result, Tensor) and result.is_cuda:
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            if source.device.type == "cpu":
                self._note("train_batch() sends a tensor to the GPU by itself", _calling_place())
        return result


_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


def _host_numbers() -> Any:
    return _contents({name: value for name, value in rng.get_state().items() if "gpu" not in name})


def _contents(value: Any) -> Any:
    """Return something that is equal for equal structures of tensors and plain values."""
    return digest(value), repr(value)


def _plain_metric(metrics: Any) -> str | None:
    if isinstance(metrics, dict):
        return next((name for name, value in metrics.items() if not isinstance(value, Tensor | None)), None)
    return None


def _is_on_device(data: Any) -> bool:
    if isinstance(data, Tensor):
        return data.is_cuda
    if isinstance(data, dict):
        return all(map(_is_on_device, data.values()))
    if isinstance(data, (list, tuple)):
        return all(map(_is_on_device, data))
    return True


def _watched(value: int, note: Callable[[str, str | None], None]) -> int:
    """Return a number that notes the first computation with it: its result would be the same in every replay."""

    def noting(name: str) -> Callable[..., Any]:
        method = getattr(int, name)

        def compute(self: int, *args: Any) -> Any:
            note("train_batch() computes with the index of the batch, which a graph would repeat", _calling_place())
            return method(int(self), *args)

        return compute

    methods: dict[str, Any] = {name: noting(name) for name in _COMPUTATIONS}
    kind: type[int] = type("BatchIndex", (int,), methods | {"__hash__": int.__hash__})
    return kind(value)


# fmt: off
_COMPUTATIONS = (
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__mod__", "__floordiv__", "__truediv__",
    "__pow__", "__bool__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__and__", "__or__",
)
# fmt: on


def _calling_place() -> str | None:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_of_program(frame.f_code.co_filename):
            return _described(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def _is_of_program(filename: str) -> bool:
    return not filename.startswith((*_OURS, "<"))


def _described(filename: str, line: int | None) -> str:
    text = linecache.getline(filename, line or 0).strip()
    return f"{filename}:{line}" + (f": {text}" if text else "")
