"""What the pages show, as plain data for their templates and charts."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
import time
import urllib.parse
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import yaml

from determined import _text, tracking
from determined._home import Home
from determined.experiment import Scores, wording
from determined.experiment.executors import LogLine, read_logs
from determined.tracking import CheckpointState, Desired, ExperimentRecord, TrackingReader, TrialRecord
from determined.web import _charts
from determined.web._cache import Cache

_PER_PAGE = 100
_CHECKPOINTS = 20
_LOG_LINES = 200
_MAX_LINE = 2000
_MAX_NAME = 200
_FRESH = 10.0
"""Seconds after which the record is read again in any case: two changes at the same moment could look like one."""

_OWN_COLUMNS = ("trial", "state", "progress", "validated at", "best", "restarts", "duration")

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
    before: str | None
    after: str | None
    """The addresses of the pages around it."""


class Pages:
    """Makes pages of what is on record in a home folder. What has not changed is not read again."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._records = TrackingReader(home.database)
        self._experiments = Cache(self._read_experiment)
        self._trials = Cache(self._read_trial)

    def experiments(self, query: Query) -> Page:
        """Return the list of experiments, newest first."""
        with_archived = query.get("archived") == "1"
        found = self._records.experiments(_page_number(query) * _PER_PAGE + 1, include_archived=with_archived)
        context = {
            "title": "Experiments",
            "selection": _selected(found, query),
            "with_archived": with_archived,
            "home": str(self._home.path),
        }
        return Page(template="experiments.html", context=context, live=("experiments",))

    def experiment(self, query: Query, id: int) -> Page:
        """Return an experiment with its trials."""
        read = self._experiment(id)
        columns = [*_OWN_COLUMNS, *map(_hparam_column, read.varying)]
        sort = query.get("sort", "")
        column, descending = sort if sort in columns else "best", query.get("order") == "desc"
        links = [
            _link(query, sort=name, order="desc" if name == column and not descending else "asc") for name in columns
        ]
        context = {
            "title": f"Experiment {id}: {wording.cell(read.overview.experiment.name)}",
            "experiment": read.overview.experiment,
            "metric": read.overview.metric,
            "best": read.overview.best,
            "states": collections.Counter(trial.state.value for trial in read.trials),
            "actions": _actions(read.overview.experiment),
            "lacks_runner": wording.lacks_runner(read.overview.experiment),
            "columns": list(zip([*_OWN_COLUMNS, *read.varying], links, strict=True)),
            "varying": read.varying,
            "flat": wording.flat,
            "selection": _selected(_sorted(read, column, descending), query),
            "checkpoints": read.checkpoints[:_CHECKPOINTS],
            "scores": read.scores,
            "config": yaml.safe_dump(
                wording.masked(dict(read.overview.experiment.config or {})), sort_keys=False, allow_unicode=True
            ),
        }
        live = ("summary", "actions", "trials", "checkpoints")
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
        live = ("summary", "actions", "metrics", "checkpoints", "log")
        return Page(template="trial.html", context=context, live=live, curves=read.version)

    def experiment_curves(self, query: Query, id: int) -> dict[str, Any]:
        """Return the curves of an experiment's best trials, and their scores over a hyperparameter.

        Of an only trial, all there is.
        """
        read = self._experiment(id)
        if len(read.trials) == 1:
            return self.trial_curves(query, read.trials[0].id)
        started = {trial.id: trial.started for trial in read.trials}
        ranked = [(trial.id, read.overview.validations[trial.id]) for trial in read.overview.ranked]
        return _charts.of_experiment(ranked, started, read.overview.metric, query) | _charts.over_hyperparameter(
            [(trial, wording.flat(trial.hparams)) for trial in read.trials], read.varying, read.overview.metric, query
        )

    def trial_curves(self, query: Query, id: int) -> dict[str, Any]:
        """Return the curves of a trial and of those that it continues."""
        read = self._trial(id)
        return _charts.of_trial(read.history, read.record.started, query)

    def trial_rows(self, id: int) -> list[list[Any]]:
        """Return a header and a row for each trial of an experiment, with all its hyperparameters."""
        read = self._experiment(id)
        hparams = {trial.id: wording.flat(trial.hparams) for trial in read.trials}
        names = list(dict.fromkeys(name for one in hparams.values() for name in one))
        facts = (
            "trial",
            "state",
            "validated at step",
            f"best {read.overview.metric}",
            "restarts",
            "started",
            "ended",
            "seed",
        )
        rows = [[*_facts(trial), *(hparams[trial.id].get(name) for name in names)] for trial in read.trials]
        return [[*facts, *names], *rows]

    def _experiment(self, id: int) -> _Experiment:
        return self._experiments.get(id, self._version())

    def _trial(self, id: int) -> _Trial:
        return self._trials.get(id, self._version())

    def _version(self) -> Hashable:
        return self._records.marker(), time.monotonic() // _FRESH

    def _read_experiment(self, id: int) -> _Experiment:
        found = self._records.overview(id)
        scores = Scores(found.validations, found.metric, found.smaller_is_better)
        return _Experiment(overview=found, checkpoints=scores.ranked(found.checkpoints), scores=scores)

    def _read_trial(self, id: int) -> _Trial:
        found = self._records.trial_overview(id)
        return _Trial(
            record=found.trial,
            experiment=found.experiment,
            checkpoints=[one for one in reversed(found.checkpoints) if one.state is CheckpointState.COMPLETED],
            runs=found.runs,
            history=found.history,
        )

    def _log(self, trial: TrialRecord) -> list[LogLine]:
        if trial.request_id is None:
            return []
        lines = read_logs(self._home.trial(trial.experiment_id, trial.id), tail=_LOG_LINES)
        return [line._replace(text=_text.plain(wording.clean(line.text), _MAX_LINE)) for line in lines]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Experiment:
    """All that is read of an experiment."""

    overview: tracking.Overview
    checkpoints: list[tracking.CheckpointRecord]
    scores: Scores

    @property
    def trials(self) -> Sequence[TrialRecord]:
        """Its trials in the order of their creation."""
        return self.overview.trials

    @functools.cached_property
    def varying(self) -> list[str]:
        """The hyperparameters that are not the same in all trials."""
        return wording.varying([wording.flat(trial.hparams) for trial in self.trials])

    @property
    def version(self) -> str:
        """What differs when there is more to draw; of an only trial, that is also what it reports of training."""
        progress = self.trials[0].progress if len(self.trials) == 1 else None
        return f"{len(self.trials)} {sum(map(len, self.overview.validations.values()))} {progress}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Trial:
    """All that is read of a trial."""

    record: TrialRecord
    experiment: ExperimentRecord
    checkpoints: list[tracking.CheckpointRecord]
    runs: Sequence[tracking.RunRecord]
    history: Sequence[tracking.MetricReport]

    @property
    def version(self) -> str:
        """What differs when there is more to draw."""
        return f"{len(self.history)}"


def _facts(trial: TrialRecord) -> list[Any]:
    best = None if trial.best_validation is None else trial.best_validation.value
    times = wording.when(trial.started), wording.when(trial.ended)
    return [trial.id, trial.state.value, trial.steps_completed or None, best, trial.restarts, *times, trial.seed]


def _sorted(read: _Experiment, column: str, descending: bool) -> list[TrialRecord]:
    """Return the trials by a column; those that have nothing there stay at the end."""
    if column == "best":
        scored = [trial for trial in read.overview.ranked if trial.best_validation is not None]
        rest = [trial for trial in read.overview.ranked if trial.best_validation is None]
        return (scored[::-1] if descending else scored) + rest
    keys = {trial.id: _sort_key(trial, column, read.varying) for trial in read.trials}
    known = [trial for trial in read.trials if keys[trial.id] is not None]
    rest = [trial for trial in read.trials if keys[trial.id] is None]
    return sorted(known, key=lambda trial: _comparable(keys[trial.id]), reverse=descending) + rest


def _sort_key(trial: TrialRecord, column: str, varying: Sequence[str]) -> Any:
    own: dict[str, Any] = {
        "trial": trial.id,
        "state": trial.state.value,
        "progress": trial.progress,
        "validated at": trial.steps_completed,
        "restarts": trial.restarts,
        "duration": None if trial.ended is None else trial.ended - trial.started,
    }
    if column in own:
        return own[column]
    hparams = wording.flat(trial.hparams)
    return next(hparams.get(name) for name in varying if _hparam_column(name) == column)


def _comparable(value: Any) -> tuple[bool, float, str]:
    """Return numbers before texts, whatever is mixed in a column."""
    if isinstance(value, int | float) and value == value:
        try:
            return False, float(value), ""
        except OverflowError:  # an integer beyond the range of floats
            return False, math.inf if value > 0 else -math.inf, ""
    return True, 0.0, str(value)


def _hparam_column(name: str) -> str:
    """Return how the address of a page calls a hyperparameter, which may have the name of another column."""
    return f"hparam {_text.bounded(name, _MAX_NAME)}"


def _actions(experiment: ExperimentRecord) -> list[tuple[str, str]]:
    """Return what can be done with an experiment now, with the question to ask before."""
    if experiment.is_local or experiment.state.is_final:
        return []
    ending = [
        ("cancel", f"Cancel experiment {experiment.id}? Its trials save a last checkpoint and end."),
        ("kill", f"Kill experiment {experiment.id}? Its trials end at once."),
    ]
    if experiment.desired in (Desired.CANCELED, Desired.KILLED):
        return ending[1:] if experiment.desired is Desired.CANCELED else []
    is_wanted = experiment.desired is Desired.ACTIVE and not wording.lacks_runner(experiment)
    return [("pause", "") if is_wanted else ("activate", ""), *ending]


def _selected(rows: Sequence[Any], query: Query) -> Selection:
    count = -(-len(rows) // _PER_PAGE) or 1
    number = min(_page_number(query), count)
    links = {page: _link(query, page=str(page)) for page in (number - 1, number + 1) if 1 <= page <= count}
    return Selection(
        rows=rows[(number - 1) * _PER_PAGE : number * _PER_PAGE],
        number=number,
        before=links.get(number - 1),
        after=links.get(number + 1),
    )


def _page_number(query: Query) -> int:
    text = query.get("page", "1")
    return max(int(text), 1) if re.fullmatch(r"[0-9]{1,6}", text) else 1


def _link(query: Query, **changes: str) -> str:
    """Return the address of the same page with some things changed; another order starts at its first page."""
    kept = {name: value for name, value in query.items() if name not in ("page", "token")}
    return "?" + urllib.parse.urlencode(kept | changes, errors="backslashreplace")
