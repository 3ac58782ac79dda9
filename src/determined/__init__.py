"""Resolute: train PyTorch models with exact resume, local records and little overhead.

The import name is `determined`, so that programs written against `determined.pytorch` run unchanged.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from determined import errors
from determined._import import import_from_path
from determined._info import ClusterInfo, TrialInfo, get_cluster_info
from determined._text import LOG_FORMAT
from determined._version import VERSION
from determined.errors import InvalidHP

if TYPE_CHECKING:
    from determined._trial_context import TrialContext as TrialContext

__version__ = VERSION

__all__ = [
    "LOG_FORMAT",
    "ClusterInfo",
    "InvalidHP",
    "TrialContext",
    "TrialInfo",
    "__version__",
    "errors",
    "get_cluster_info",
    "import_from_path",
]

_LAZY = {"TrialContext": "determined._trial_context"}
_PACKAGES = {"common", "core", "experimental", "horovod", "launch", "pytorch", "tensorboard", "util"}
"""What programs use as `det.core.init()` without having imported it."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"determined.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'determined' has no attribute {name!r}")
