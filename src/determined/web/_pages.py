"""What the pages show, as plain data for their templates and charts."""

from __future__ import annotations

import dataclasses
import functools
import time
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from determined import tracking
from determined._home import Home
from determined.experiment import wording
from determined.experiment._ranking import Scores, judged_by, ranked_trials
from determined.experiment.executors import LogLine, read_logs
from determined.tracking import CheckpointState, ExperimentRecord, Records, TrialRecord
from determined.web import _charts

_PER_PAGE = 100
_CHECKPOINTS = 20
_LOG_LINES = 200
_REMEMBERED = 32
_FRESH = 2.0
"""Seconds for which a page is not made again if nothing was stored; processes may end without a trace in the record."""

Query = Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A template with what it shows; `live` are its blocks that change, `curves` differs when its charts do."""

    template: str
    context: dict[str, Any]
    live: tuple[str, ...]
    curves: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Some of many rows, on pages with numbers."""

    rows: Sequence[Any]
    number: int
    count: int
    query: str = ""
    """What else the address of a page says, to be put before its number."""


class Pages:
    """Makes pages of what is on record in a home folder. What has not changed is not read again."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._records = Records(home.database)
        self._experiment_at = functools.lru_cache(_REMEMBERED)(self._read_experiment)
        self._trial_at = functools.lru_cache(_REMEMBERED)(self._read_trial)

    def experiments(self, query: Query) -> Page:
        """Return the list of experiments, newest first."""
        with_archived = query.get("archived") == "1"
        number = _page_number(query)
        found = self._records.experiments(number * _PER_PAGE + 1, include_archived=with_archived)
        rows = found[(number - 1) * _PER_PAGE : number * _PER_PAGE]
        more = number + 1 if len(found) > number * _PER_PAGE else number
        context = {
            "title": "Experiments",
            "selection": Selection(rows=rows, number=number, count=more, query="archived=1&" * with_archived),
            "with_archived": with_archived,
            "home": str(self._home.path),
        }
        return Page(template="experiments.html", context=context, live=("experiments",))

    def experiment(self, query: Query, id: int) -> Page:
        """Return an experiment with its trials."""
        read = self._experiment(id)
        sort, descending = query.get("sort", "best"), query.get("order") == "desc"
        columns = ["trial", "state", "progress", "steps", "best", "restarts", "duration", *read.varying]
        trials = _sorted(read, sort if sort in columns else "best", descending)
        number = _page_number(query)
        shown = trials[(number - 1) * _PER_PAGE : number * _PER_PAGE]
        order = f"sort={_quoted(sort)}&order={'desc' if descending else 'asc'}&"
        context = {
            "title": f"Experiment {id}: {wording.cell(read.record.name)}",
            "experiment": read.record,
            "search": _searcher(read.record).get("name"),
            "metric": read.metric,
            "best": read.ranked[0] if read.ranked and read.ranked[0].best_validation else None,
            "states": _counted(trial.state.value for trial in read.trials),
            "actions": _actions(read.record),
            "lacks_runner": wording.lacks_runner(read.record),
            "columns": [(name, _quoted(name), sort == name and not descending) for name in columns],
            "varying": read.varying,
            "flat": wording.flat,
            "selection": Selection(
                rows=shown,
                number=number,
                count=-(-len(trials) // _PER_PAGE) or 1,
                query=order if "sort" in query else "",
            ),
            "checkpoints": read.checkpoints[:_CHECKPOINTS],
            "scores": read.scores,
            "config": yaml.safe_dump(
                wording.masked(dict(read.record.config or {})), sort_keys=False, allow_unicode=True
            ),
        }
        live = ("summary", "trials", "checkpoints")
        return Page(template="experiment.html", context=context, live=live, curves=read.version)

    def trial(self, query: Query, id: int) -> Page:
        """Return a trial with its metrics, checkpoints and output."""
        read = self._trial(id)
        record = read.record
        context = {
            "title": f"Trial {id} of experiment {record.experiment_id}",
            "trial": record,
            "experiment": read.experiment,
            "hparams": wording.flat(record.hparams),
            "best": wording.best_text(record.best_validation),
            "can_be_killed": record.request_id is not None and not record.state.is_final,
            "checkpoints": read.checkpoints[:_CHECKPOINTS],
            "runs": read.runs,
            "log": self._log(record),
        }
        live = ("summary", "metrics", "checkpoints", "log")
        return Page(template="trial.html", context=context, live=live, curves=read.version)

    def experiment_curves(self, query: Query, id: int) -> dict[str, Any]:
        """Return the curves of an experiment's best trials, and their scores over a hyperparameter."""
        read = self._experiment(id)
        started = {trial.id: trial.started for trial in read.trials}
        ranked = [(trial.id, read.reports[trial.id]) for trial in read.ranked]
        return _charts.of_experiment(ranked, started, read.metric, query) | _charts.over_hyperparameter(
            [(trial, wording.flat(trial.hparams)) for trial in read.trials], read.varying, read.metric, query
        )

    def trial_curves(self, query: Query, id: int) -> dict[str, Any]:
        """Return the curves of a trial and of those that it continues."""
        read = self._trial(id)
        return _charts.of_trial(self._records.history(id), read.record.started, query)

    def trial_rows(self, id: int) -> list[list[Any]]:
        """Return a header and a row for each trial of an experiment, with all its hyperparameters."""
        read = self._experiment(id)
        hparams = {trial.id: wording.flat(trial.hparams) for trial in read.trials}
        names = list(dict.fromkeys(name for one in hparams.values() for name in one))
        header = ["trial", "state", "steps", f"best {read.metric}", "restarts", "started", "ended", "seed", *names]
        return [header, *([*_facts(trial), *(hparams[trial.id].get(name) for name in names)] for trial in read.trials)]

    def _experiment(self, id: int) -> _Experiment:
        return self._experiment_at(id, self._records.marker(), time.monotonic() // _FRESH)

    def _trial(self, id: int) -> _Trial:
        return self._trial_at(id, self._records.marker(), time.monotonic() // _FRESH)

    def _read_experiment(self, id: int, *_: object) -> _Experiment:
        found = self._records.overview(id)
        metric, smaller_is_better = judged_by(found.experiment, found.trials)
        scores = Scores(found.validations, metric, smaller_is_better)
        return _Experiment(
            record=found.experiment,
            trials=found.trials,
            ranked=ranked_trials(found.experiment, found.trials),
            metric=metric,
            reports=found.validations,
            checkpoints=scores.ranked(found.checkpoints),
            scores=scores,
        )

    def _read_trial(self, id: int, *_: object) -> _Trial:
        record = self._records.trial(id)
        checkpoints = self._records.checkpoints(record.experiment_id, id)
        return _Trial(
            record=record,
            experiment=self._records.experiment(record.experiment_id),
            checkpoints=[one for one in reversed(checkpoints) if one.state is CheckpointState.COMPLETED],
            runs=self._records.runs(id),
        )

    def _log(self, trial: TrialRecord) -> list[LogLine]:
        if trial.request_id is None:
            return []
        return list(read_logs(self._home.trial(trial.experiment_id, trial.id), tail=_LOG_LINES))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Experiment:
    """All that is read of an experiment."""

    record: ExperimentRecord
    trials: Sequence[TrialRecord]
    ranked: list[TrialRecord]
    metric: str
    reports: Mapping[int, Sequence[tracking.MetricReport]]
    checkpoints: list[tracking.CheckpointRecord]
    scores: Scores

    @functools.cached_property
    def varying(self) -> list[str]:
        """The hyperparameters that are not the same in all trials."""
        return wording.varying([wording.flat(trial.hparams) for trial in self.trials])

    @property
    def version(self) -> str:
        """What differs when there is more to draw."""
        return f"{len(self.trials)} {sum(map(len, self.reports.values()))}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Trial:
    """All that is read of a trial but its curves."""

    record: TrialRecord
    experiment: ExperimentRecord
    checkpoints: list[tracking.CheckpointRecord]
    runs: list[tracking.RunRecord]

    @property
    def version(self) -> str:
        """What differs when there is more to draw."""
        counts = (summary.count for group in self.record.summary.values() for summary in group.values())
        return f"{self.record.steps_completed} {sum(counts)}"


def _facts(trial: TrialRecord) -> list[Any]:
    best = None if trial.best_validation is None else trial.best_validation.value
    times = wording.when(trial.started), wording.when(trial.ended)
    return [trial.id, trial.state.value, trial.steps_completed, best, trial.restarts, *times, trial.seed]


def _sorted(read: _Experiment, column: str, descending: bool) -> list[TrialRecord]:
    """Return the trials by a column; those that have nothing there stay at the end."""
    if column == "best":
        scored = [trial for trial in read.ranked if trial.best_validation is not None]
        rest = [trial for trial in read.ranked if trial.best_validation is None]
        return (scored[::-1] if descending else scored) + rest
    keys = {trial.id: _sort_key(trial, column) for trial in read.trials}
    known = [trial for trial in read.trials if keys[trial.id] is not None]
    rest = [trial for trial in read.trials if keys[trial.id] is None]
    return sorted(known, key=lambda trial: _comparable(keys[trial.id]), reverse=descending) + rest


def _sort_key(trial: TrialRecord, column: str) -> Any:
    own: dict[str, Any] = {
        "trial": trial.id,
        "state": trial.state.value,
        "progress": trial.progress,
        "steps": trial.steps_completed,
        "restarts": trial.restarts,
        "duration": None if trial.ended is None else trial.ended - trial.started,
    }
    return own[column] if column in own else wording.flat(trial.hparams).get(column)


def _comparable(value: Any) -> tuple[bool, float, str]:
    """Return numbers before texts, whatever is mixed in a column."""
    is_number = isinstance(value, int | float) and value == value
    return (False, float(value), "") if is_number else (True, 0.0, str(value))


def _actions(experiment: ExperimentRecord) -> list[tuple[str, str]]:
    """Return what can be done with an experiment now, with the question to ask before."""
    if experiment.is_local or experiment.state.is_final:
        return []
    is_paused = experiment.state is tracking.RunState.PAUSED or wording.lacks_runner(experiment)
    first = ("activate", "") if is_paused else ("pause", "")
    return [
        first,
        ("cancel", f"Cancel experiment {experiment.id}? Its trials save a last checkpoint and end."),
        ("kill", f"Kill experiment {experiment.id}? Its trials end at once."),
    ]


def _searcher(experiment: ExperimentRecord) -> Mapping[str, Any]:
    found = (experiment.config or {}).get("searcher")
    return found if isinstance(found, Mapping) and not experiment.is_local else {}


def _counted(states: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for state in states:
        counts[state] = counts.get(state, 0) + 1
    return counts


def _page_number(query: Query) -> int:
    text = query.get("page", "1")
    return min(max(int(text), 1), 10**6) if text.isdecimal() and len(text) < 10 else 1


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="")
