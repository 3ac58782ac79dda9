"""Search methods: which hyperparameters are tried, and which trials end early.

They are pure: events in, operations out, state to and from JSON. `Search` runs the method of the config's searcher;
`SearchMethod` is the base class of all methods, also of those written by users.
"""

from determined.experiment.search._method import PreviewRow, Rung, SearchMethod, Setup
from determined.experiment.search._preview import Preview, preview
from determined.experiment.search._protocol import (
    Began,
    Create,
    Event,
    Exited,
    ExitReason,
    Operation,
    Shutdown,
    Stop,
    Validated,
)
from determined.experiment.search._search import Search
from determined.experiment.search._trials import Trial, Trials
from determined.experiment.search.methods.custom import load_method

__all__ = [
    "Began",
    "Create",
    "Event",
    "ExitReason",
    "Exited",
    "Operation",
    "Preview",
    "PreviewRow",
    "Rung",
    "Search",
    "SearchMethod",
    "Setup",
    "Shutdown",
    "Stop",
    "Trial",
    "Trials",
    "Validated",
    "load_method",
    "preview",
]
