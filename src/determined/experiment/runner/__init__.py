"""The runner of an experiment: a process that starts its trials, feeds its search and stores what happens."""

from determined.experiment.runner._process import drive, runner_environment, start
from determined.experiment.runner._search_replay import SearchReplay

__all__ = ["SearchReplay", "drive", "runner_environment", "start"]
