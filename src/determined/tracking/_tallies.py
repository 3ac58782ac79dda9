"""How many rows there must be, so that lost ones are noticed."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

import sqlalchemy as sa

from . import _schema
from ._damage import Damage
from ._messages import CheckpointState
from ._rows import Layout, Row

EXPERIMENTS, TRIALS, METRICS, CHECKPOINTS, DELETED = "experiments", "trials", "metrics", "checkpoints", "deleted"
EVENTS, VALIDATIONS, RUNNERS, MODELS, VERSIONS = "events", "validations", "runners", "models", "versions"
# Not counted, since what is missing is noticed otherwise or does no harm; their tallies only say which lack a checksum.
RUNS, SNAPSHOTS = "runs", "snapshots"

_tallies = _schema.tallies
_layout = Layout(_tallies)
_MOST_NAMED = 500  # databases limit the number of values in a query

Key: TypeAlias = tuple[int, str]
"""Whose rows, and of which group of metrics; that is empty for other kinds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """How many rows there must be, and up to which id they may lack a checksum."""

    count: int
    unsealed: int = 0


_NONE = Tally(0)


def begin(connection: sa.Connection, kind: str, owner: int, group: str = "", tally: Tally = _NONE) -> None:
    """Start to count the rows of an owner."""
    base = _base(kind, owner, group, tally.unsealed)
    values = {"kind": kind, "owner": owner, "group": group, "mirror": base - tally.count}
    connection.execute(sa.insert(_tallies), values | dataclasses.asdict(tally))


def begin_all(connection: sa.Connection, kinds: Sequence[str], owners: Sequence[int]) -> None:
    """Start to count the rows of several kinds that new owners get."""
    none = {"group": "", "count": 0, "unsealed": 0}
    owned = [(kind, owner) for kind in kinds for owner in owners]
    rows = [{"kind": kind, "owner": owner, "mirror": _base(kind, owner, "", 0), **none} for kind, owner in owned]
    connection.execute(sa.insert(_tallies), rows)


def add(connection: sa.Connection, kind: str, owner: int, by: int, group: str = "") -> None:
    """Count new rows of an owner, or fewer of them."""
    parameters = {"of_kind": kind, "of_owner": owner, "of_group": group, "more": by}
    if connection.execute(_ADD, parameters).rowcount == 0:
        begin(connection, kind, owner, group, Tally(by))


def add_numbered(connection: sa.Connection, kind: str, owner: int, by: int) -> int:
    """Count new rows of an owner and return the number of the last one; others wait until these are stored."""
    parameters = {"of_kind": kind, "of_owner": owner, "of_group": "", "more": by}
    last = connection.execute(_ADD.returning(_tallies.c.count), parameters).scalar_one_or_none()
    if type(last) is not int:
        raise Damage(f"the tally of the {kind} of {owner} is gone")
    return last


def add_after(connection: sa.Connection, kind: str, owner: int, by: int, expected: int) -> bool:
    """Count new rows of an owner if there are as many as expected so far; returns whether that is so."""
    parameters = {"of_kind": kind, "of_owner": owner, "of_group": "", "more": by, "expected": expected}
    return connection.execute(_ADD_AFTER, parameters).rowcount == 1


def replace(connection: sa.Connection, kind: str, owner: int, count: int) -> None:
    """Count the rows of an owner anew, whatever was counted before."""
    forget(connection, (kind,), [owner])
    begin(connection, kind, owner, tally=Tally(count))


def forget(connection: sa.Connection, kinds: Sequence[str], owners: Collection[int]) -> None:
    """Remove the tallies of owners that are deleted."""
    for condition in among(_tallies.c.owner, owners):
        connection.execute(sa.delete(_tallies).where(_tallies.c.kind.in_(kinds), condition))


_ADD = (
    sa.update(_tallies)
    .where(_tallies.c.kind == sa.bindparam("of_kind"))
    .where(_tallies.c.owner == sa.bindparam("of_owner"))
    .where(_tallies.c.group == sa.bindparam("of_group"))
    .values(
        count=_tallies.c.count + sa.bindparam("more", type_=sa.BigInteger),
        mirror=_tallies.c.mirror - sa.bindparam("more", type_=sa.BigInteger),
    )
)
_ADD_AFTER = _ADD.where(_tallies.c.count == sa.bindparam("expected", type_=sa.BigInteger))


def read(
    connection: sa.Connection, kind: str, owners: Collection[int], *conditions: sa.ColumnElement[bool]
) -> dict[Key, Tally]:
    """Return the tallies of a kind that owners have."""
    found: dict[Key, Tally] = {}
    for condition in among(_tallies.c.owner, owners):
        rows = connection.execute(_layout.select().where(_tallies.c.kind == kind, condition, *conditions))
        found |= {(row.owner, row.group): _checked(row) for row in map(_layout.read, rows)}
    return found


def among(column: sa.Column[Any], values: Collection[Any]) -> Iterator[sa.ColumnElement[bool]]:
    """Yield conditions that together take the rows in whose column is one of the values, each row once."""
    ordered = sorted(set(values))
    for start in range(0, len(ordered), _MOST_NAMED):
        yield column.in_(ordered[start : start + _MOST_NAMED])


def _checked(row: Row) -> Tally:
    if row.mirror + row.count != _base(row.kind, row.owner, row.group, row.unsealed):
        raise Damage(f"the tally of the {row.kind} of {row.owner} does not match its checksum")
    return Tally(row.count, row.unsealed)


def _base(kind: str, owner: int, group: str, unsealed: int) -> int:
    return zlib.crc32(ascii((kind, owner, group, unsealed)).encode())


def verify(kind: str, rows: Sequence[tuple[Key, Row]], tallies: dict[Key, Tally]) -> None:
    """Raise `Damage` unless the rows, each given with its key, are as many as they must be."""
    require_seals(rows, tallies)
    ids: dict[Key, set[int]] = {key: set() for key in tallies}
    for key, row in rows:
        ids[key].add(row.stored["id"])
    for (owner, group), tally in tallies.items():
        if (found := len(ids[owner, group])) != tally.count:
            where = f"{owner}, group {group!r}," if group else f"{owner}"
            raise Damage(f"it has {found} {kind} of {where} where {tally.count} were stored")


def require_seals(rows: Sequence[tuple[Key, Row]], tallies: dict[Key, Tally]) -> None:
    """Raise `Damage` if a row is not counted, or has no checksum although it is not from before there were any."""
    for key, row in rows:
        if key not in tallies or (not row.is_sealed and row.stored["id"] > tallies[key].unsealed):
            raise row.damage("checksum", None) if key in tallies else Damage(f"the tally of {row} is gone")


def require_seal(connection: sa.Connection, kind: str, row: Row) -> Row:
    """Return a row of a kind that is not counted; `Damage` if it has no checksum although it must have one."""
    if not row.is_sealed:
        require_seals([((0, ""), row)], read(connection, kind, [0]))
    return row


def count_all(connection: sa.Connection) -> None:
    """Begin all tallies with the rows that there are, none of which has a checksum."""
    experiments, trials = _schema.experiments, _schema.trials
    begin(connection, EXPERIMENTS, 0, tally=_tally(connection.execute(_counting(experiments)).one()))
    for (experiment_id,) in connection.execute(sa.select(experiments.c.id)).all():
        _count(connection, TRIALS, trials, trials.c.experiment_id, experiment_id)
    for (trial_id,) in connection.execute(sa.select(trials.c.id)).all():
        _count_trial(connection, trial_id)


def count_new(connection: sa.Connection) -> None:
    """Begin the tallies that came with version 3 with the rows that there are, none of which has a checksum."""
    new = (EVENTS, VALIDATIONS, RUNNERS, MODELS, VERSIONS, *_UNCOUNTED)
    connection.execute(sa.delete(_tallies).where(_tallies.c.kind.in_(new)))
    for kind, table in _UNCOUNTED.items():
        last = connection.execute(sa.select(sa.func.max(table.c.id))).scalar() or 0
        begin(connection, kind, 0, tally=Tally(0, last))
    models, versions, events, metrics = _schema.models, _schema.versions, _schema.events, _schema.metrics
    begin(connection, MODELS, 0, tally=_tally(connection.execute(_counting(models)).one()))
    for (model_id,) in connection.execute(sa.select(models.c.id)).all():
        _count(connection, VERSIONS, versions, versions.c.model_id, model_id)
    driven = sa.select(_schema.experiments.c.id).where(_schema.experiments.c.is_local.is_(False))
    for (experiment_id,) in connection.execute(driven).all():
        _count(connection, EVENTS, events, events.c.experiment_id, experiment_id)
        _count(connection, VALIDATIONS, metrics, metrics.c.experiment_id, experiment_id)
        _count(connection, RUNNERS, _schema.runners, _schema.runners.c.id, experiment_id)


_UNCOUNTED = {RUNS: _schema.runs, SNAPSHOTS: _schema.snapshots}


def _count_trial(connection: sa.Connection, trial_id: int) -> None:
    checkpoints, metrics = _schema.checkpoints, _schema.metrics
    _count(connection, CHECKPOINTS, checkpoints, checkpoints.c.trial_id, trial_id)
    is_deleted = checkpoints.c.state == CheckpointState.DELETED.value
    _count(connection, DELETED, checkpoints, checkpoints.c.trial_id, trial_id, is_deleted)
    by_group = _counting(metrics, metrics.c.group).where(metrics.c.trial_id == trial_id).group_by(metrics.c.group)
    for row in connection.execute(by_group).all():
        begin(connection, METRICS, trial_id, row.group, _tally(row))


def _counting(table: sa.Table, *columns: sa.ColumnElement[Any]) -> sa.Select[Any]:
    return sa.select(sa.func.count().label("rows"), sa.func.max(table.c.id).label("last"), *columns)


def _count(
    connection: sa.Connection,
    kind: str,
    table: sa.Table,
    column: sa.ColumnElement[int],
    owner: int,
    *conditions: sa.ColumnElement[bool],
) -> None:
    found = connection.execute(_counting(table).where(column == owner, *conditions)).one()
    begin(connection, kind, owner, tally=_tally(found))


def _tally(row: sa.Row[Any]) -> Tally:
    return Tally(row.rows, row.last or 0)
