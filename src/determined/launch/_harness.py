"""Train a trial class as an experiment config says; what `--trial module:Class` runs in every rank."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from determined import errors, pytorch
from determined._info import ClusterInfo, get_cluster_info
from determined._packages import note_missing_package
from determined._trial_context import constant_hparams
from determined.launch._command import is_class_entrypoint

# What a search would need, and the training of one trial does not.
_ASSUMED = {"searcher": {"name": "single", "metric": "loss"}}


def check(entrypoint: str, path: str | None, info: ClusterInfo | None) -> None:
    """Refuse what cannot be trained, as far as that can be seen without importing it."""
    _split(entrypoint)
    config = _config(path, info)
    _length_of(config, lambda: 1)
    for name in ("min_validation_period", "min_checkpoint_period"):
        _period_of(config, name, lambda: 1)
    if info is None:
        _constants(config)


def train(entrypoint: str, path: str | None = None) -> None:
    """Train the class `module:Class`: as the runner of a managed run says, else as the experiment config at `path`."""
    info = get_cluster_info()
    config = _config(path, info)
    trial_class = load_class(entrypoint)
    # The program is the user's: its runs are named after it, and recorded with its commit.
    program = inspect.getfile(trial_class)
    sys.argv, vars(sys.modules["__main__"])["__file__"] = [program], program
    optimizations = _section(config, "optimizations")
    with pytorch.init(
        hparams=None if info else _constants(config),
        exp_conf=None if info else dict(config),
        aggregation_frequency=optimizations.get("aggregation_frequency") or 1,
    ) as context:
        trainer = pytorch.Trainer(trial_class(context), context)
        trainer.configure_profiler(**_profiling(config))
        trainer.fit(latest_checkpoint=info.latest_checkpoint if info else None, **_fit_arguments(config, context))


def load_class(entrypoint: str) -> type[pytorch.PyTorchTrial]:
    """Return the trial class that `module:Class` names, imported from the working folder first."""
    module_name, class_name = _split(entrypoint)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not _exists(module_name):
        raise ModuleNotFoundError(
            f"--trial {entrypoint}: there is no module {module_name!r} in {os.getcwd()}; start from the folder that "
            "holds it."
        )
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        note_missing_package(error)
        raise
    for part in class_name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, _trial_classes(found), 1) or _trial_classes(found)
            raise AttributeError(f"--trial {entrypoint}: there is no {part!r}; trial classes there: {', '.join(near)}.")
        found = getattr(found, part)
    if not (inspect.isclass(found) and issubclass(found, pytorch.PyTorchTrial)):
        raise TypeError(f"--trial {entrypoint}: {found!r} is not a subclass of pytorch.PyTorchTrial.")
    return found


def _split(entrypoint: str) -> tuple[str, str]:
    if not is_class_entrypoint(entrypoint):
        raise ValueError(f"--trial {entrypoint}: write module:Class, such as model_def:MyTrial for model_def.py.")
    module, _, name = entrypoint.partition(":")
    return module, name


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            return False
        raise


def _trial_classes(holder: Any) -> list[str]:
    members = inspect.getmembers(holder, inspect.isclass)
    return [name for name, kind in members if issubclass(kind, pytorch.PyTorchTrial)]


def _config(path: str | None, info: ClusterInfo | None) -> Mapping[str, Any]:
    if info is not None:
        if path is not None:
            raise ValueError(f"--config {path}: a managed run has a config already; leave --config out.")
        return info.trial._config
    if path is None:
        raise ValueError(
            "--trial needs --config experiment.yaml, which says how long to train, outside of a managed run."
        )
    return _read_config(path)


def _fit_arguments(config: Mapping[str, Any], context: pytorch.PyTorchTrialContext) -> dict[str, Any]:
    batch_size = context.get_global_batch_size
    return {
        "max_length": _length_of(config, batch_size),
        "validation_period": _period_of(config, "min_validation_period", batch_size),
        "checkpoint_period": _period_of(config, "min_checkpoint_period", batch_size),
        "reporting_period": pytorch.Batch(config.get("scheduling_unit") or 100),
        "checkpoint_policy": config.get("checkpoint_policy") or "best",
        "step_zero_validation": bool(config.get("perform_initial_validation")),
    }


def _profiling(config: Mapping[str, Any]) -> dict[str, Any]:
    known = ("enabled", "begin_on_batch", "end_after_batch", "sync_timings")
    return {name: value for name, value in _section(config, "profiling").items() if name in known and value is not None}


def _read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the experiment config in a file of YAML or JSON, as it is written there."""
    from determined.experiment import config

    try:
        return config.read(path, assumed=_ASSUMED)
    except errors.InvalidConfig as error:
        raise errors.InvalidConfig(f"--config {error}", error.problems) from None


def _constants(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a config that leaves none to a search."""
    return constant_hparams(_section(config, "hyperparameters"), refuse_ranges=True)


def _length_of(config: Mapping[str, Any], batch_size: Callable[[], int]) -> pytorch.TrainUnit:
    """Return how long the searcher wants the trial to train; `batch_size` gives the global one if need be."""
    searcher = _section(config, "searcher")
    if searcher.get("max_length") is not None:
        length = pytorch.configured_unit(searcher["max_length"], "searcher.max_length", batch_size)
    elif searcher.get("max_time") is not None and searcher.get("time_metric") in ("batches", "epochs"):
        value = {searcher["time_metric"]: searcher["max_time"]}
        length = pytorch.configured_unit(value, "searcher.max_time", batch_size)
    else:
        raise ValueError(
            "The experiment config does not say how long to train; write, for example, "
            "searcher: {max_length: {epochs: 3}}."
        )
    if length is None:
        raise ValueError("searcher.max_length in the experiment config is 0; write a length of at least 1.")
    return length


def _period_of(config: Mapping[str, Any], name: str, batch_size: Callable[[], int]) -> pytorch.TrainUnit | None:
    """Return a period of the config; None if it is left out or 0, which means at the end only."""
    return None if config.get(name) is None else pytorch.configured_unit(config[name], name, batch_size)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of the config, empty if it is left out."""
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r} in the experiment config is not a mapping of keys and values.")
    return value or {}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m determined.launch._harness")
    parser.add_argument("--trial", required=True)
    parser.add_argument("--config")
    arguments = parser.parse_args()
    train(arguments.trial, arguments.config)


if __name__ == "__main__":
    main()
