"""Search methods: which hyperparameters are tried, and which trials end early.

They are pure: events in, operations out, state to and from JSON. `Search` runs the method that a searcher of the config
names; `SearchMethod` is what methods inherit from, also those written by users.
"""

from determined.experiment.search._bracket import Rung
from determined.experiment.search._custom import load_method
from determined.experiment.search._events import Began, Event, Exited, ExitReason, Validated
from determined.experiment.search._method import SearchMethod, Setup
from determined.experiment.search._operations import Create, Operation, Shutdown, Stop
from determined.experiment.search._preview import Preview, PreviewRow, preview
from determined.experiment.search._search import Search
from determined.experiment.search._trials import Trial, Trials

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
