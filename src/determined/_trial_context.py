"""The base of trial contexts: hyperparameters, configuration, batch sizes, stop requests."""

from __future__ import annotations

import copy
import functools
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any, Self

from determined import core
from determined.errors import MisuseError

_RANGES = ("int", "double", "log", "categorical")


class TrialContext:
    """The base of trial contexts: the hyperparameters and the config of a trial, and its ranks."""

    def __init__(
        self,
        *,
        distributed: core.DistributedContext | None = None,
        hparams: Mapping[str, Any] | None = None,
        exp_conf: Mapping[str, Any] | None = None,
    ) -> None:
        self.distributed = distributed or core.DistributedContext.single()
        self._hparams = None if hparams is None else dict(hparams)
        self._exp_conf = None if exp_conf is None else dict(exp_conf)
        self.stop_requested = False
        self.divides_batches = False
        """Whether the program asked for this rank's part of the global batch size."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return a context without a run, for trying out a trial with the constant hyperparameters of a config."""
        return cls(hparams=constant_hparams(config.get("hyperparameters") or {}), exp_conf=config)

    def get_hparams(self) -> dict[str, Any]:
        """Return all hyperparameters of the trial, always the same dict: a change lasts for the whole run.

        Checkpoints save the hyperparameters as they were given.
        """
        if self._hparams is None:
            raise ValueError("This run has no hyperparameters; pass them as pytorch.init(hparams={...}).")
        return self._hparams_of_program

    def get_hparam(self, name: str) -> Any:
        """Return one hyperparameter."""
        hparams = self.get_hparams()
        if name not in hparams:
            raise ValueError(
                f"There is no hyperparameter {name!r}; this run has {sorted(hparams)}. "
                f"Pass it as pytorch.init(hparams={{{name!r}: ...}})."
            )
        return hparams[name]

    @functools.cached_property
    def _hparams_of_program(self) -> dict[str, Any]:
        return copy.deepcopy(self._hparams or {})

    def get_experiment_config(self) -> dict[str, Any]:
        """Return the experiment config."""
        if self._exp_conf is None:
            raise ValueError("This run has no experiment config; pass one as pytorch.init(exp_conf={...}).")
        return copy.deepcopy(self._exp_conf)

    @property
    def config_if_any(self) -> dict[str, Any] | None:
        """The experiment config, or None in a run without one."""
        return self._exp_conf

    @property
    def hparams_if_any(self) -> dict[str, Any] | None:
        """The hyperparameters, or None in a run without any."""
        return self._hparams

    def get_data_config(self) -> dict[str, Any]:
        """Return the free `data` section of the experiment config."""
        return dict(self.get_experiment_config().get("data") or {})

    def get_global_batch_size(self) -> int:
        """Return the hyperparameter `global_batch_size`: samples per batch over all ranks."""
        size = self.get_hparam("global_batch_size")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"The hyperparameter global_batch_size={size!r} must be an int of at least 1.")
        return size

    def get_per_slot_batch_size(self) -> int:
        """Return the samples per batch on this rank: its part of the global batch size."""
        whole, ranks = self.get_global_batch_size(), self.distributed.size
        self.divides_batches = True
        part, rest = divmod(whole, ranks)
        if rest and self.distributed.is_chief:
            warnings.warn(
                f"global_batch_size={whole} does not divide by {ranks} slots: the first {rest} get batches of "
                f"{part + 1}, the others of {part}. Use a multiple of {ranks} for equal batches.",
                stacklevel=2,
            )
        size = part + (self.distributed.rank < rest)
        if size == 0:
            raise ValueError(
                f"global_batch_size={whole} leaves nothing for some of {ranks} slots; use {ranks} or more."
            )
        return size

    def get_stop_requested(self) -> bool:
        """Return whether the trial was asked to stop after the current batch."""
        return self.stop_requested

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Ask the training loop to save and stop after the current batch."""
        if not isinstance(stop_requested, bool):
            raise MisuseError(f"set_stop_requested({stop_requested!r}): pass True or False.")
        self.stop_requested = stop_requested

    def get_tensorboard_path(self) -> pathlib.Path:
        """Return the folder of this trial's TensorBoard files."""
        raise ValueError("This context belongs to no run, so it has no TensorBoard folder; use pytorch.init().")


def constant_hparams(
    hyperparameters: Mapping[str, Any], *, refuse_ranges: bool = False, prefix: str = ""
) -> dict[str, Any]:
    """Return the constant values of a config's `hyperparameters` section.

    Ranges of a search are left out, or refused with a `ValueError`.
    """
    values: dict[str, Any] = {}
    for name, given in hyperparameters.items():
        kind = given.get("type") if isinstance(given, Mapping) else None
        if not isinstance(given, Mapping):
            values[name] = given
        elif kind == "const":
            values[name] = given.get("val")
        elif kind not in _RANGES:  # a mapping of others, one of which may be called `type`
            values[name] = constant_hparams(given, refuse_ranges=refuse_ranges, prefix=f"{prefix}{name}.")
        elif refuse_ranges:
            raise ValueError(
                f"hyperparameters.{prefix}{name} in the experiment config is a range to search in ({kind}), but one "
                f"trial needs one value; write {prefix}{name}: 0.1, for example."
            )
    return values
