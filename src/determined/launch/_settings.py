"""What an experiment config says about the training of one trial."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from determined import errors
from determined._trial_context import constant_hparams
from determined.pytorch import TrainUnit, configured_unit

# What a search would need, and the training of one trial does not.
_ASSUMED = {"searcher": {"name": "single", "metric": "loss"}}


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the experiment config in a file of YAML or JSON, as it is written there."""
    from determined.experiment import config

    try:
        return config.read(path, assumed=_ASSUMED)
    except errors.InvalidConfig as error:
        raise errors.InvalidConfig(f"--config {error}", error.problems) from None


def constants(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a config that leaves none to a search."""
    return constant_hparams(section(config, "hyperparameters"), refuse_ranges=True)


def length_of(config: Mapping[str, Any], batch_size: Callable[[], int]) -> TrainUnit:
    """Return how long the searcher wants the trial to train; `batch_size` gives the global one if need be."""
    searcher = section(config, "searcher")
    if searcher.get("max_length") is not None:
        length = configured_unit(searcher["max_length"], "searcher.max_length", batch_size)
    elif searcher.get("max_time") is not None and searcher.get("time_metric") in ("batches", "epochs"):
        value = {searcher["time_metric"]: searcher["max_time"]}
        length = configured_unit(value, "searcher.max_time", batch_size)
    else:
        raise ValueError(
            "The experiment config does not say how long to train; write, for example, "
            "searcher: {max_length: {epochs: 3}}."
        )
    if length is None:
        raise ValueError("searcher.max_length in the experiment config is 0; write a length of at least 1.")
    return length


def period_of(config: Mapping[str, Any], name: str, batch_size: Callable[[], int]) -> TrainUnit | None:
    """Return a period of the config; None if it is left out or 0, which means at the end only."""
    return None if config.get(name) is None else configured_unit(config[name], name, batch_size)


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of the config, empty if it is left out."""
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r} in the experiment config is not a mapping of keys and values.")
    return value or {}
