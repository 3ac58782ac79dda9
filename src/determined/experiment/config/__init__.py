"""The experiment config: what a YAML file says about an experiment, checked and with every default filled in.

`load(path)`, `parse(text)` and `from_map(mapping)` return an `ExperimentConfig`, or raise `errors.InvalidConfig` with
all that is wrong. `python -m determined.experiment.config` writes the reference of all keys.
"""

from determined._secrets import mask
from determined.experiment.config._experiment import ExperimentConfig
from determined.experiment.config._hyperparameters import (
    Categorical,
    Const,
    Double,
    Hyperparameter,
    Int,
    Log,
    Space,
)
from determined.experiment.config._length import Length
from determined.experiment.config._load import from_map, load, parse, read
from determined.experiment.config._searcher import (
    AdaptiveAshaSearcher,
    AsyncHalvingSearcher,
    CustomSearcher,
    GpSearcher,
    GridSearcher,
    RandomSearcher,
    Searcher,
    SingleSearcher,
    TpeSearcher,
)

__all__ = [
    "AdaptiveAshaSearcher",
    "AsyncHalvingSearcher",
    "Categorical",
    "Const",
    "CustomSearcher",
    "Double",
    "ExperimentConfig",
    "GpSearcher",
    "GridSearcher",
    "Hyperparameter",
    "Int",
    "Length",
    "Log",
    "RandomSearcher",
    "Searcher",
    "SingleSearcher",
    "Space",
    "TpeSearcher",
    "from_map",
    "load",
    "mask",
    "parse",
    "read",
]
