"""The experiment config: what a YAML file says about an experiment, checked and with every default filled in.

`load(path)`, `parse(text)` and `from_map(mapping)` return an `ExperimentConfig`, or raise `errors.InvalidConfig` with
all that is wrong. `python -m determined.experiment.config` writes the reference of all keys.
"""

from typing import TYPE_CHECKING

from determined._secrets import mask
from determined.experiment.config._experiment import ExperimentConfig
from determined.experiment.config._hyperparameters import Categorical, Const, Double, Hyperparameter, Int, Log, Space
from determined.experiment.config._load import from_map, load, parse, read
from determined.experiment.config._searcher import Searcher, searchers
from determined.experiment.config._section import Length, SlotRange

if TYPE_CHECKING:
    from determined.experiment.search.methods.asha import AdaptiveAshaSearcher, AsyncHalvingSearcher
    from determined.experiment.search.methods.bayesian import GpSearcher, TpeSearcher
    from determined.experiment.search.methods.custom import CustomSearcher
    from determined.experiment.search.methods.grid import GridSearcher
    from determined.experiment.search.methods.random import RandomSearcher
    from determined.experiment.search.methods.single import SingleSearcher

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
    "SlotRange",
    "Space",
    "TpeSearcher",
    "from_map",
    "load",
    "mask",
    "parse",
    "read",
]


def __getattr__(name: str) -> type[Searcher]:
    # Searchers are defined with their search methods, which import this package.
    found = next((kind for kind in searchers().values() if kind.__name__ == name), None)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
