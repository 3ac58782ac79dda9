"""The best validation of a driven experiment, by the metric that its search goes by."""

from __future__ import annotations

import itertools

import sqlalchemy as sa

from . import _schema
from ._assembly import trial_of
from ._reading import Reader
from ._rows import REPORT, Row

_METRICS = _schema.metrics.c
_AT_ONCE = 20


def best_validation(connection: sa.Connection, experiment_id: int, smaller_is_better: bool) -> Row | None:
    """Return the report with the best score that no later run of its trial has replaced, the oldest of equals.

    The reports are looked through from the best one on, so it does not matter how many there are.
    """
    score = _METRICS.score if smaller_is_better else _METRICS.score.desc()
    query = REPORT.select().where(_METRICS.experiment_id == experiment_id, _METRICS.score.is_not(None))
    standing = _Standing(Reader(connection))
    for start in itertools.count(0, _AT_ONCE):
        rows = connection.execute(query.order_by(score, _METRICS.id).limit(_AT_ONCE).offset(start)).all()
        for report in map(REPORT.read, rows):
            if report in standing:
                return report
        if len(rows) < _AT_ONCE:
            break
    return None


class _Standing:
    """The reports that no later run of their trial has replaced; a trial's are read when one of them is asked for."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._ids: dict[int, set[int]] = {}  # by trial, of those that had several runs

    def __contains__(self, report: Row) -> bool:
        if report.trial_id not in self._ids:
            trial = trial_of(self._reader, report)
            if (trial.run_id or 0) <= (report.run_id or 0) and report.is_sealed:
                return True
            rows = self._reader.standing([trial], report.group)[trial.id]
            self._ids[trial.id] = {row.id for row in rows}
        return report.id in self._ids[report.trial_id]
