"""Experiments: many trials of one program, chosen by a search and run on the slots of a machine.

`create` records an experiment and `start` starts the process that runs it; the module `control` pauses, cancels,
continues and deletes experiments. Importing this package costs nothing: each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import config, control, executors, search
    from ._create import create
    from ._download import download_checkpoint, open_checkpoint
    from ._ranking import Scores, best_checkpoints, scores
    from ._test_run import TestRun, first_trial, run_test
    from .runner import SearchReplay, drive, start

__all__ = [
    "Scores",
    "SearchReplay",
    "TestRun",
    "best_checkpoints",
    "config",
    "control",
    "create",
    "download_checkpoint",
    "drive",
    "executors",
    "first_trial",
    "open_checkpoint",
    "run_test",
    "scores",
    "search",
    "start",
]

_LOADED_ON_USE = {
    "_create": ("create",),
    "_download": ("download_checkpoint", "open_checkpoint"),
    "_ranking": ("Scores", "best_checkpoints", "scores"),
    "_test_run": ("TestRun", "first_trial", "run_test"),
    "runner": ("SearchReplay", "drive", "start"),
}
_SUBMODULES = ("config", "control", "executors", "search")
_MODULES = {name: module for module, names in _LOADED_ON_USE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
