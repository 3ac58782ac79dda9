"""Checks for what a CUDA graph cannot capture, done while batches train without a graph."""

from __future__ import annotations

import contextlib
import linecache
import pathlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from determined.pytorch._data import rng
from determined.pytorch._data.batch import digest
from determined.pytorch._data.tree import leaves
from determined.pytorch._metrics.reducers import ReducerSet

_NOT_OF_PROGRAM = (str(pathlib.Path(__file__).parents[3]), str(pathlib.Path(torch.__file__).parent), "<")
"""Beginnings of file names: this library, torch, and generated code."""
_WAITING = "called a synchronizing CUDA operation"


class Inspection:
    """Trains batches without a graph and notes the first thing that a graph could not repeat."""

    def __init__(self, reducers: ReducerSet) -> None:
        self._reducers = reducers
        self.refusal: str | None = None
        """Why batches cannot be captured, and where in the program."""

    def train(self, train_batch: Callable[[], Any], batch: Any) -> Any:
        """Run `train_batch`, check everything it does, and return its metrics."""
        numbers, reduced = _host_numbers(), _contents(self._reducers.state_dict())
        with _noting_waits(self._note), _CopyWatch(self._note):
            metrics = train_batch()
        if _host_numbers() != numbers:
            self._note("train_batch() draws random numbers on the CPU, which a graph would repeat")
        if _contents(self._reducers.state_dict()) != reduced:
            self._note("train_batch() updates a reducer, which only Python can")
        by_name = metrics if isinstance(metrics, dict) else {}
        if plain := [name for name, value in by_name.items() if not isinstance(value, Tensor | None)]:
            self._note(f"the metric {plain[0]!r} is a Python number, which a graph would repeat; return a tensor")
        if not all(leaf.is_cuda for leaf in leaves(batch) if isinstance(leaf, Tensor)):
            self._note("batches hold tensors in host memory, which a graph cannot read")
        return metrics

    def index(self, value: int) -> int:
        """Return a batch index that notes when the program computes with it."""
        return _watched(value, self._note)

    def _note(self, reason: str, place: str | None = None) -> None:
        if self.refusal is None:
            self.refusal = _at(reason, place)


def refusal_of(error: BaseException) -> str:
    """Return why a capture failed: the first error in its chain, at the last line of the program."""
    while error.__context__ is not None:
        error = error.__context__
    first = str(error).strip().partition("\n")[0]
    place = _place_in_program(traceback.extract_tb(error.__traceback__))
    return _at(f"the capture failed ({type(error).__name__}: {first})", place)


def _at(reason: str, place: str | None) -> str:
    return reason + (f", at {place}" if place else "")


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
    """Notes tensors that are copied from the host: a graph would read their memory after it was freed."""

    def __init__(self, note: Callable[[str, str | None], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._note = note

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _COPIES and isinstance(result, Tensor) and result.is_cuda:
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            if source.device.type == "cpu":
                self._note("train_batch() copies a tensor to the GPU", _place_in_program())
        return result


_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


def _host_numbers() -> Any:
    return _contents({name: value for name, value in rng.get_state().items() if "gpu" not in name})


def _contents(value: Any) -> Any:
    """Return a value that is equal for equal structures of tensors and plain values."""
    return digest(value), repr(value)


def _watched(value: int, note: Callable[[str, str | None], None]) -> int:
    """Return an int that notes computations with it: their results would be the same in every replay."""

    def noting(name: str) -> Callable[..., Any]:
        method = getattr(int, name)

        def compute(self: int, *args: Any) -> Any:
            note(
                "train_batch() computes with the index of the batch, which a graph would repeat",
                _place_in_program(),
            )
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


def _place_in_program(frames: traceback.StackSummary | None = None) -> str | None:
    """Return the innermost line of the program in a traceback, by default in the current stack."""
    frames = traceback.extract_stack() if frames is None else frames
    of_program = (frame for frame in reversed(frames) if not frame.filename.startswith(_NOT_OF_PROGRAM))
    return next((_described(frame.filename, frame.lineno) for frame in of_program), None)


def _described(filename: str, line: int | None) -> str:
    text = linecache.getline(filename, line or 0).strip()
    return f"{filename}:{line}" + (f": {text}" if text else "")
