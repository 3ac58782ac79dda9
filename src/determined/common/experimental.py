"""The client under its older name; see `determined.experimental`."""

from determined.experimental import Checkpoint, Determined, Experiment, Model, ModelVersion, Trial, client
from determined.experimental.client import ModelSortBy, OrderBy

__all__ = [
    "Checkpoint",
    "Determined",
    "Experiment",
    "Model",
    "ModelSortBy",
    "ModelVersion",
    "OrderBy",
    "Trial",
    "client",
]
