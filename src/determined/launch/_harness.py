"""Train a trial class as an experiment config says; what `--trial module:Class` runs in every rank."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

from determined import pytorch
from determined._info import ClusterInfo, get_cluster_info
from determined._packages import note_missing_package
from determined.launch._settings import constants, length_of, period_of, read_config, section


def check(entrypoint: str, path: str | None, info: ClusterInfo | None) -> None:
    """Refuse what cannot be trained, as far as that can be seen without importing it."""
    _split(entrypoint)
    config = _config(path, info)
    length_of(config, lambda: 1)
    for name in ("min_validation_period", "min_checkpoint_period"):
        period_of(config, name, lambda: 1)
    if info is None:
        constants(config)


def train(entrypoint: str, path: str | None = None) -> None:
    """Train the class `module:Class`: as the runner of a managed run says, else as the experiment config at `path`."""
    info = get_cluster_info()
    config = _config(path, info)
    trial_class = load_class(entrypoint)
    # The program is the user's: its runs are named after it, and recorded with its commit.
    program = inspect.getfile(trial_class)
    sys.argv, vars(sys.modules["__main__"])["__file__"] = [program], program
    optimizations = section(config, "optimizations")
    with pytorch.init(
        hparams=None if info else constants(config),
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
    module, colon, name = entrypoint.partition(":")
    if not (colon and all(part.isidentifier() for part in (*module.split("."), *name.split(".")))):
        raise ValueError(f"--trial {entrypoint}: write module:Class, such as model_def:MyTrial for model_def.py.")
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
    return read_config(path)


def _fit_arguments(config: Mapping[str, Any], context: pytorch.PyTorchTrialContext) -> dict[str, Any]:
    batch_size = context.get_global_batch_size
    return {
        "max_length": length_of(config, batch_size),
        "validation_period": period_of(config, "min_validation_period", batch_size),
        "checkpoint_period": period_of(config, "min_checkpoint_period", batch_size),
        "reporting_period": pytorch.Batch(config.get("scheduling_unit") or 100),
        "checkpoint_policy": config.get("checkpoint_policy") or "best",
        "step_zero_validation": bool(config.get("perform_initial_validation")),
    }


def _profiling(config: Mapping[str, Any]) -> dict[str, Any]:
    known = ("enabled", "begin_on_batch", "end_after_batch", "sync_timings")
    return {name: value for name, value in section(config, "profiling").items() if name in known and value is not None}


def main() -> None:
    """Train what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m determined.launch._harness")
    parser.add_argument("--trial", required=True)
    parser.add_argument("--config")
    arguments = parser.parse_args()
    train(arguments.trial, arguments.config)


if __name__ == "__main__":
    main()
