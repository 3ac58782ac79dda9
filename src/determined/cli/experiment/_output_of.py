"""What the trials of an experiment have written."""

from __future__ import annotations

from determined import _home
from determined.cli import _logs, _output
from determined.cli._arguments import ExperimentId


def logs(
    id: ExperimentId,
    follow: _logs.Follow = False,
    head: _logs.Head = None,
    tail: _logs.Tail = None,
    rank: _logs.Ranks = None,
    since: _logs.Since = None,
) -> None:
    """Show what all trials of an experiment have written, in the order of time."""
    records = _output.open_records()
    wanted = _logs.Wanted.of(head, tail, rank, since, follow)
    _logs.require_logs(records.experiment(id))
    folder = _home.home().experiment(id)
    _logs.show(folder, wanted, is_over=lambda: not _logs.goes_on(records.experiment(id)), with_trial=True)
