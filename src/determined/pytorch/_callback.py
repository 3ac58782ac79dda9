"""Callbacks: hooks into a training run, and the callbacks of a trial."""

from __future__ import annotations

import contextlib
import inspect
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np


class PyTorchCallback:
    """Base class of callbacks. Override the hooks that you need; by default they do nothing.

    Hooks run on every rank, except where noted. Numbers in the metrics that they get are NumPy scalars. Random numbers
    drawn in `on_training_start` and in the checkpoint hooks do not affect the training.
    """

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Run first, before the data loaders are built and a checkpoint is loaded."""

    def on_trial_shutdown(self) -> None:
        """Run last, also after an exception."""

    def on_training_start(self) -> None:
        """Run once, after a checkpoint has been loaded and before the first batch."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Run before the first batch of an epoch."""

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """Run after the last batch of an epoch."""

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        """Run at the end of a reporting period, with the averages of its batches and the metrics of each batch.

        The averages include `batches` and `epochs`, unless the trial has metrics of those names.
        """

    def on_validation_start(self) -> None:
        """Run before a validation.

        From here to the end of the checkpoint that follows, models are in evaluation mode and gradients off.
        """

    def on_validation_epoch_start(self) -> None:
        """Run before the first batch of a validation by `evaluate_batch`."""

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        """Run after the last batch of a validation, with what `evaluate_batch` returned for each."""

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """Run after a validation, with the trial's metrics; `batches` and `epochs` are in the record only."""

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        """Run before a checkpoint is loaded; may change what is loaded."""

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """Run before a checkpoint is written; may change what is written."""

    def on_checkpoint_write_end(self, checkpoint_dir: pathlib.Path) -> None:
        """Run on the chief when a checkpoint's files are written; may add files to the folder."""

    def on_checkpoint_end(self, checkpoint_dir: str) -> None:
        """Deprecated: override `on_checkpoint_write_end`, which runs at the same time."""

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """Run when a checkpoint is complete in its storage. Training waits for this hook."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to restore after a resume: plain values and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


def as_numpy(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of metrics with NumPy scalars in place of plain numbers."""
    return {name: np.asarray(v)[()] if type(v) in (float, int, bool) else v for name, v in metrics.items()}


_HOOKS = [name for name in vars(PyTorchCallback) if name.startswith("on_")]


class Callbacks:
    """All callbacks of a trial: `callbacks.run("on_validation_end", metrics)` calls those that override it."""

    def __init__(self, callbacks: Mapping[str, PyTorchCallback]) -> None:
        self._callbacks = _checked(callbacks)
        self._hooks = {hook: self._overriding(hook) for hook in _HOOKS}
        if self._hooks["on_checkpoint_end"]:
            warnings.warn(
                "PyTorchCallback.on_checkpoint_end is deprecated; override on_checkpoint_write_end.",
                DeprecationWarning,
                stacklevel=4,  # where the program calls fit()
            )

    def run(self, hook: str, *args: Any) -> None:
        """Call a hook of every callback that overrides it, in the order of the dict."""
        for method in self._hooks[hook]:
            method(*args)

    @contextlib.contextmanager
    def trial(self, first_batch_idx: int, checkpoint_uuid: str | None) -> Iterator[None]:
        """Run the hooks of a trial's start and end; on_trial_shutdown also runs if the block raises."""
        try:
            self.run("on_trial_startup", first_batch_idx, checkpoint_uuid)
            yield
        except BaseException as error:
            _add_notes(error, self._shut_down())
            raise
        if failures := self._shut_down():
            _add_notes(failures[0], failures[1:])
            raise failures[0]

    def _shut_down(self) -> list[Exception]:
        failures = []
        for shutdown in self._hooks["on_trial_shutdown"]:
            try:
                shutdown()
            except Exception as failure:
                failures.append(failure)
        return failures

    def wants(self, hook: str) -> bool:
        """Return whether any callback overrides a hook."""
        return bool(self._hooks[hook])

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all callbacks by name."""
        return {name: callback.state_dict() for name, callback in self._callbacks.items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore each callback whose name is in `states`."""
        for name, callback in self._callbacks.items():
            if name in states:
                callback.load_state_dict(states[name])

    def _overriding(self, hook: str) -> list[Callable[..., None]]:
        methods = [getattr(callback, hook) for callback in self._callbacks.values()]
        own = [m for m in methods if getattr(m, "__func__", m) is not getattr(PyTorchCallback, hook)]
        takes_epoch = hook in ("on_training_epoch_start", "on_training_epoch_end")
        return [with_index(method, 1) for method in own] if takes_epoch else own


def _add_notes(error: BaseException, failures: list[Exception]) -> None:
    for failure in failures:
        error.add_note(f"on_trial_shutdown() failed too: {type(failure).__name__}: {failure}")


def with_index(method: Callable[..., Any], arguments: int) -> Callable[..., Any]:
    """Return a function of this number of arguments, the last one an index; old methods are called without it."""
    try:
        inspect.signature(method).bind(*range(arguments))
    except TypeError:
        return lambda *given: method(*given[:-1])
    return method


def _checked(callbacks: Any) -> dict[str, PyTorchCallback]:
    if not isinstance(callbacks, Mapping):
        raise TypeError(
            f"build_callbacks() returned {callbacks!r}; it must return a dict from names to callbacks, "
            'such as {"early_stopping": EarlyStopping()}.'
        )
    for name, callback in callbacks.items():
        if not isinstance(name, str) or not isinstance(callback, PyTorchCallback):
            raise TypeError(
                f"build_callbacks() holds {name!r}: {callback!r}; names are str and callbacks are instances "
                "of pytorch.PyTorchCallback."
            )
    return dict(callbacks)
