"""Read an experiment from the database again and again, at little cost."""

from __future__ import annotations

import contextlib
import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from determined import tracking
from determined._home import Home
from determined.experiment.wording import flat, varying

from ._view import TrialView, View

if TYPE_CHECKING:
    from determined.experiment import SearchReplay
    from determined.experiment.executors import LogLine
    from determined.experiment.search import Rung

T = TypeVar("T")

_LOG_LINES = 6
_MAX_LOGS = 16
"""The most trials whose output is read."""
_GRACE = 1.0
"""Seconds that another runner may take to follow one."""


class Watch:
    """Follows one experiment. What others have not changed is not read again."""

    def __init__(self, experiment_id: int, home: Home, gives_up: Callable[[], bool]) -> None:
        """`gives_up` says whether to raise when the database is away, rather than wait for it."""
        from determined.experiment import config as configs

        self._home = home
        self._gives_up = gives_up
        self._id = experiment_id
        record = tracking.TrackingReader(home.database).experiment(experiment_id)
        with contextlib.ExitStack() as stack:
            self._store = stack.enter_context(tracking.ExperimentStore.open(home.database, experiment_id))
            self._slots = stack.enter_context(tracking.Slots(home.database))
            self._opened = stack.pop_all()
        self._name = record.name
        self._config = configs.from_map(record.config or {})
        self._search = self._open_search()
        self._last_report = 0
        self._latest: dict[int, tuple[int, float | None]] = {}
        self._best: dict[int, float | None] = {}
        self._rungs: tuple[Rung, ...] = ()
        self._top: tracking.Validation | None = None
        self._entries: list[tracking.TrialEntry] = []
        self._alone_since: float | None = None

    def _open_search(self) -> SearchReplay | None:
        """Return the search if it has rungs; others would cost more than they tell."""
        from determined.experiment import SearchReplay

        if getattr(self._config.searcher, "time_metric", None) is None:
            return None
        return SearchReplay(self._config, self._store, self._home.code(self._id))

    def _ask(self, call: Callable[[], T]) -> T:
        return tracking.when_available(call, self._gives_up)

    def look(self) -> View:
        """Return how the experiment stands."""
        has_runner = self._has_runner()  # first: what one that is gone has left does not change any more
        news: Sequence[tracking.Validation] = ()
        if self._ask(self._store.changed):
            news = self._read()
        control, leases = self._ask(self._store.control), self._ask(self._slots.held)
        own = {lease.trial_id for lease in leases if lease.experiment_id == self._id}
        searcher = self._config.searcher
        return View(
            id=self._id,
            name=self._name,
            searcher=searcher.name,
            metric=searcher.metric,
            smaller_is_better=searcher.smaller_is_better,
            time_metric=getattr(searcher, "time_metric", None),
            state=control.state,
            desired=control.desired,
            progress=control.progress or 0.0,
            seconds=time.time() - control.started,
            has_runner=has_runner,
            trials=(trials := self._trials(own, control.state)),
            varying=varying([trial.hparams for trial in trials]),
            best=self._top,
            rungs=self._rungs,
            own_slots=sum(lease.experiment_id == self._id for lease in leases),
            other_slots=sum(lease.experiment_id != self._id for lease in leases),
            news=news,
            log=self._log(sorted(own)),
        )

    def _has_runner(self) -> bool:
        runner = self._ask(self._store.runner)
        if runner is not None and not runner.is_gone:
            self._alone_since = None
            return True
        if self._ask(self._store.control).state.is_final:
            return False
        self._alone_since = self._alone_since or time.monotonic()
        return time.monotonic() - self._alone_since < _GRACE

    def _read(self) -> list[tracking.Validation]:
        """Read what has changed, and return the validations that are new."""
        news = self._ask(lambda: list(self._store.new_validations(self._last_report)))
        for report in news:
            self._last_report = report.id
            self._note(report)
        before, self._entries = self._entries, self._ask(self._store.trials)
        begun = set(_runs(self._entries)) - set(_runs(before))  # what earlier runs reported may count no more
        self._read_best({report.trial_id for report in news} | {trial_id for trial_id, _ in begun})
        if (search := self._search) is not None:
            self._ask(lambda: search.catch_up(self._store))
            self._rungs = search.rungs()
        return news

    def _note(self, report: tracking.Validation) -> None:
        value = report.metrics.get(self._config.searcher.metric)
        number = float(value) if value is not None and tracking.is_comparable(value) else None
        self._latest[report.trial_id] = report.steps_completed, number

    def _read_best(self, trial_ids: Iterable[int]) -> None:
        best = self._ask(lambda: {id: self._store.best(id) for id in trial_ids})
        if best:
            self._top = self._ask(self._store.best)
        metric = self._config.searcher.metric
        self._best |= {id: None if one is None else float(one.metrics[metric]) for id, one in best.items()}

    def _trials(self, running: set[int], state: tracking.RunState) -> list[TrialView]:
        goals = _goals(self._rungs)
        return [
            TrialView(
                id=entry.id,
                request_id=entry.request_id,
                state=entry.state,
                label=_label(entry, entry.id in running, state),
                progress=entry.progress,
                hparams=flat(entry.hparams),
                restarts=entry.restarts,
                reason=entry.reason,
                steps=self._latest.get(entry.id, (0, None))[0],
                latest=self._latest.get(entry.id, (0, None))[1],
                best=self._best.get(entry.id),
                next_rung=goals.get(entry.request_id),
            )
            for entry in self._entries
        ]

    def _log(self, running: Iterable[int]) -> list[tuple[int, LogLine]]:
        from determined.experiment.executors import read_logs

        found: list[tuple[int, LogLine]] = []
        for id in list(running)[:_MAX_LOGS]:
            with contextlib.suppress(OSError):  # they may be deleted meanwhile
                folder = self._home.trial(self._id, id)
                found += [(id, line) for line in read_logs(folder, tail=_LOG_LINES)]
        return heapq.nlargest(_LOG_LINES, found, key=lambda pair: pair[1].time)[::-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._opened.close()


def _label(entry: tracking.TrialEntry, is_running: bool, experiment: tracking.RunState) -> str:
    if entry.state is tracking.RunState.ACTIVE and is_running:
        return "running"
    is_to_run = entry.state in (tracking.RunState.ACTIVE, tracking.RunState.PAUSED)
    return "waiting" if is_to_run and experiment is tracking.RunState.ACTIVE else entry.state.value


def _runs(entries: Iterable[tracking.TrialEntry]) -> list[tuple[int, int]]:
    """Return the latest run of each trial that has one."""
    return [(entry.id, entry.run_id) for entry in entries if entry.run_id]


def _goals(rungs: Iterable[Rung]) -> dict[str, int]:
    """Return at which time each trial reaches its next rung, by request id."""
    return {request_id: rung.time for rung in rungs for request_id in rung.climbing}
