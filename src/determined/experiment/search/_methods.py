"""Which search method belongs to which searcher of the config."""

from __future__ import annotations

import os

from determined.experiment.config import (
    AdaptiveAshaSearcher,
    AsyncHalvingSearcher,
    CustomSearcher,
    GpSearcher,
    GridSearcher,
    RandomSearcher,
    SingleSearcher,
    TpeSearcher,
)
from determined.experiment.search._adaptive_asha import adaptive_plans
from determined.experiment.search._async_halving import Halving, halving_plans
from determined.experiment.search._custom import load_method
from determined.experiment.search._gp import Gp
from determined.experiment.search._grid import Grid
from determined.experiment.search._method import SearchMethod, Setup
from determined.experiment.search._random import Random
from determined.experiment.search._single import Single
from determined.experiment.search._tpe import Tpe


def make_method(setup: Setup, folder: str | os.PathLike[str]) -> SearchMethod:
    """Return the search method of the setup's searcher; a custom one is imported from the folder."""
    match setup.searcher:
        case SingleSearcher():
            return Single(setup)
        case RandomSearcher() as searcher:
            return Random(setup, searcher)
        case GridSearcher():
            return Grid(setup)
        case AsyncHalvingSearcher() as searcher:
            return Halving(setup, searcher, halving_plans(searcher))
        case AdaptiveAshaSearcher() as searcher:
            return Halving(setup, searcher, adaptive_plans(searcher))
        case TpeSearcher() as searcher:
            return Tpe(setup, searcher)
        case GpSearcher() as searcher:
            return Gp(setup, searcher)
        case CustomSearcher() as searcher:
            return load_method(searcher.method, folder)(setup)
