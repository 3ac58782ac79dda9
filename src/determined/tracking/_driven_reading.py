"""Reading what only driven experiments have: the search and its validations."""

from __future__ import annotations

import sqlalchemy as sa

from . import _schema, _tallies
from ._damage import Damage
from ._reading import Reader
from ._rows import EVENT, REPORT, SNAPSHOT, Row
from ._turns import SearchEvent, Snapshot, Validation

# Made once, since runners ask often.
_LATER_VALIDATIONS = (
    REPORT.select()
    .where(
        _schema.metrics.c.experiment_id == sa.bindparam("experiment"),
        _schema.metrics.c.number > sa.bindparam("after", type_=sa.BigInteger),
    )
    .order_by(_schema.metrics.c.number)
    .limit(sa.bindparam("most", type_=sa.BigInteger))
)


def events(connection: sa.Connection, experiment_id: int, after: int) -> list[SearchEvent]:
    """Return the events of a search with numbers above another, all of them."""
    columns = _schema.events.c
    query = EVENT.select().where(columns.experiment_id == experiment_id, columns.number > after)
    rows = [EVENT.read(row) for row in connection.execute(query.order_by(columns.number))]
    tally = _tally(connection, _tallies.EVENTS, experiment_id)
    _tallies.require_seals([((experiment_id, ""), row) for row in rows], {(experiment_id, ""): tally})
    _require_all(_tallies.EVENTS, experiment_id, rows, range(after + 1, tally.count + 1))
    return [_event(row) for row in rows]


def _tally(connection: sa.Connection, kind: str, experiment_id: int) -> _tallies.Tally:
    return Reader(connection).tallies(kind, [experiment_id])[experiment_id, ""]


def _require_all(kind: str, experiment_id: int, rows: list[Row], numbers: range) -> None:
    """Raise `Damage` unless the rows have just these numbers."""
    if [row.number for row in rows] != list(numbers):
        raise Damage(
            f"it has {len(rows)} {kind} of experiment {experiment_id} from number {numbers.start} on where "
            f"{len(numbers)} were stored"
        )


def _event(row: Row) -> SearchEvent:
    return SearchEvent(number=row.number, kind=row.kind, request_id=row.request_id, payload=row.payload, time=row.time)


def snapshot(connection: sa.Connection, experiment_id: int) -> Snapshot | None:
    """Return the stored state of a search, if there is one."""
    for row in connection.execute(SNAPSHOT.select().where(_schema.snapshots.c.id == experiment_id)):
        found = _tallies.require_seal(connection, _tallies.SNAPSHOTS, SNAPSHOT.read(row))
        return Snapshot(number=found.number, state=found.state)
    return None


def validations(connection: sa.Connection, experiment_id: int, after: int, limit: int) -> list[Validation]:
    """Return the validations of an experiment with numbers above another, the first ones."""
    which = {"experiment": experiment_id, "after": after, "most": limit}
    rows = [REPORT.read(row) for row in connection.execute(_LATER_VALIDATIONS, which)]
    last = _tally(connection, _tallies.VALIDATIONS, experiment_id).count
    _require_all(_tallies.VALIDATIONS, experiment_id, rows, range(after + 1, min(after + limit, last) + 1))
    _require_seals(connection, [row for row in rows if not row.is_sealed])
    return [validation(row) for row in rows]


def _require_seals(connection: sa.Connection, rows: list[Row]) -> None:
    """Raise `Damage` unless rows without a checksum are from before there were any."""
    tallies = _tallies.read(connection, _tallies.METRICS, {row.trial_id for row in rows})
    _tallies.require_seals([((row.trial_id, row.group), row) for row in rows], tallies)


def validation(row: Row) -> Validation:
    """Return a report of a driven experiment as it is told to others."""
    return Validation(
        id=row.number,
        trial_id=row.trial_id,
        run_id=row.run_id,
        steps_completed=row.steps_completed,
        metrics=row.metrics,
        time=row.time,
    )
