"""The runner of an experiment: a process that starts its trials, feeds its search and stores what happens.

`decide` makes all decisions and does nothing else; a `Driver` gathers what it decides by, stores and performs what it
decided.
"""

from determined.experiment.runner._process import drive, main, runner_environment, start
from determined.experiment.runner._run_specs import RunSpecs
from determined.experiment.runner._search_replay import SearchReplay
from determined.experiment.runner._state import OpenTrial

__all__ = ["OpenTrial", "RunSpecs", "SearchReplay", "drive", "main", "runner_environment", "start"]
