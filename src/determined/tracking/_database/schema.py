"""The tables of the tracking database. The types of the columns convert Python's values to stored ones and back."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeAlias

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

from determined._text import bounded
from determined.tracking._data.changesets import Desired, TrialRequest
from determined.tracking._data.json import decode_document, encode_document
from determined.tracking._data.messages import CheckpointState, RunState
from determined.tracking._data.process import CLAIMED_FOR_S

_Conversion: TypeAlias = Callable[[Any], Any]
MAX_GROUP_LENGTH = 400  # characters; databases cannot index names of any length


class Damage(Exception):
    """A stored value cannot be what was written."""


class Converted(TypeDecorator[Any]):
    """A column of a type whose values, but for NULL, are converted when they are stored and when they are read."""

    impl: TypeEngine[Any] | type[TypeEngine[Any]] = sa.Text
    cache_ok = True

    def __init__(
        self, impl: TypeEngine[Any], store: _Conversion, read: _Conversion | None = None, expected: str = ""
    ) -> None:
        super().__init__()
        self.impl, self.store, self.read, self.expected = impl, store, read, expected

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:
        """Return what is stored."""
        return None if value is None else self.store(value)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:
        """Return what is read; `Damage` if it cannot be what was stored."""
        if value is None or self.read is None:
            return value
        try:
            return self.read(value)
        except (TypeError, ValueError, RecursionError) as error:
            text = ascii(value)
            raise Damage(f"{text if len(text) <= 60 else f'{text[:60]}...'} is not {self.expected}") from error


def _storable_text(value: Any) -> str:
    """Return a string from anywhere: lone surrogates and NUL, which databases refuse, become escapes."""
    text = str(value)
    if text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def _storable_group(value: Any) -> str:
    """Return the name of a group of metrics: the end of a very long one is replaced by its checksum."""
    return bounded(_storable_text(value), MAX_GROUP_LENGTH)


def _storable_float(value: Any) -> float:
    return float(value) + 0.0  # not all databases know the negative zero


def _document(kind: type, store: _Conversion) -> Converted:
    """Return the type of a mapping or a list as JSON."""

    def read(value: str) -> Any:
        found = decode_document(value)
        if not isinstance(found, kind):
            raise TypeError
        return found

    return Converted(sa.Text(), store, read, f"JSON of a {kind.__name__}")


def _choice(kind: type[enum.StrEnum]) -> Converted:
    """Return the type of a member of an enumeration, stored as its value."""
    return Converted(sa.Text(), lambda value: kind(value).value, kind, f"a {kind.__name__}")


Text = Converted(sa.Text(), _storable_text)
GroupName = Converted(sa.Text(), _storable_group)
Integer = Converted(sa.BigInteger(), int)  # also of numpy's
Float = Converted(sa.Float(), _storable_float)
Document, DocumentList = _document(dict, encode_document), _document(list, lambda value: encode_document(list(value)))


class _Renewable(TypeDecorator[float]):
    """A time until which a process has promised to be alive, in seconds since 1970.

    While a server is away nobody can renew a promise: what is read is a while after its start, at least.
    """

    impl = sa.Float
    cache_ok = True

    def column_expression(self, column: sa.ColumnElement[float]) -> sa.ColumnElement[float]:
        """Return what is read instead of the column."""
        return _Renewed(column)


class _Renewed(FunctionElement[float]):
    inherit_cache = True
    type = sa.Float()


@compiles(_Renewed)
def _as_stored(element: _Renewed, compiler: Any, **options: Any) -> str:
    return str(compiler.process(element.clauses, **options))


@compiles(_Renewed, "postgresql")
def _since_start(element: _Renewed, compiler: Any, **options: Any) -> str:
    column = compiler.process(element.clauses, **options)
    start = f"extract(epoch FROM pg_postmaster_start_time()) + {CLAIMED_FOR_S}"
    return f"CASE WHEN {column} IS NOT NULL THEN greatest({column}, {start}) END"


def _process() -> tuple[sa.Column[Any], ...]:
    return (
        sa.Column("pid", sa.BigInteger, nullable=False),  # 0 where the process is not known yet
        sa.Column("process_started", Float, nullable=False),
        sa.Column("host", Text, nullable=False),
    )


def _identity() -> sa.Column[Any]:
    return sa.Column("identity", Document)  # tells a process from others with the same id


def _partial_index(name: str, condition: str, *columns: str) -> sa.Index:
    """Return an index of the rows that meet a condition."""
    return sa.Index(name, *columns, sqlite_where=sa.text(condition))


metadata = sa.MetaData()

experiments = sa.Table(
    "experiments",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", Text, nullable=False),
    sa.Column("config", Document),
    sa.Column("is_local", sa.Boolean, nullable=False),  # its one trial's state is its state
    sa.Column("state", _choice(RunState), nullable=False),
    sa.Column("progress", Float),
    sa.Column("started", Float, nullable=False),
    sa.Column("ended", Float),
    sa.Column("description", Text),
    sa.Column("project", Text),
    sa.Column("workspace", Text),
    sa.Column("notes", Text),
    sa.Column("labels", DocumentList),
    sa.Column("archived", sa.Boolean),
    # Of managed experiments: what people want.
    sa.Column("desired", _choice(Desired)),
    sa.Column("priority", sa.Integer),
    sa.Column("max_slots", sa.Integer),
    sa.Column("cluster", Text),
    # Ids name folders of TensorBoard files: one that was deleted must not come back.
    sqlite_autoincrement=True,
)

trials = sa.Table(
    "trials",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("experiment_id", sa.ForeignKey("experiments.id"), nullable=False, index=True),
    sa.Column("hparams", Document, nullable=False),
    sa.Column("seed", Integer, nullable=False),
    sa.Column("entrypoint", Text, nullable=False),
    sa.Column("torch_version", Text),
    sa.Column("resolute_version", Text, nullable=False),
    sa.Column("git_commit", Text),
    *_process(),
    sa.Column("source_checkpoint", Text),
    sa.Column("source_steps_completed", Integer),
    sa.Column("source_reported_steps", Integer),
    sa.Column("state", _choice(RunState), nullable=False),
    sa.Column("reason", Text),
    sa.Column("status", Text),
    sa.Column("progress", Float),
    sa.Column("metadata", Document),
    sa.Column("started", Float, nullable=False),
    sa.Column("ended", Float),
    # Of managed experiments: how the search calls it, its latest run, how often that failed, what people want.
    sa.Column("request_id", Text),
    sa.Column("run_id", sa.Integer),
    sa.Column("restarts", sa.Integer),
    sa.Column("requested", _choice(TrialRequest)),
    _identity(),
    sa.Index("trials_by_request", "experiment_id", "request_id", unique=True),
    _partial_index("trials_by_requested", "requested IS NOT NULL", "experiment_id", "requested"),
    sqlite_autoincrement=True,
)

metrics = sa.Table(
    "metrics",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("trial_id", sa.ForeignKey("trials.id"), nullable=False),
    sa.Column("group", GroupName, nullable=False),
    sa.Column("steps_completed", Integer, nullable=False),
    sa.Column("time", Float, nullable=False),
    sa.Column("metrics", Document, nullable=False),
    sa.Column("run_id", sa.Integer),
    # Of validations only.
    sa.Column("experiment_id", sa.Integer),
    sa.Column("number", sa.Integer),  # in managed experiments: 1, 2, 3, ... in the order in which they were stored
    sa.Column("score", Float),  # the metric that trials are ranked by, if it is a finite number
    sa.Index("metrics_by_run", "trial_id", "group", "run_id", "steps_completed"),
    _partial_index("validations_by_number", "number IS NOT NULL", "experiment_id", "number"),
    _partial_index("validations_by_score", "score IS NOT NULL", "experiment_id", "score"),
)

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("uuid", Text, nullable=False, unique=True),
    sa.Column("trial_id", sa.ForeignKey("trials.id"), nullable=False, index=True),
    sa.Column("steps_completed", Integer, nullable=False),
    sa.Column("path", Text, nullable=False),
    sa.Column("metadata", Document, nullable=False),
    sa.Column("resources", Document, nullable=False),
    sa.Column("size", Integer, nullable=False),
    sa.Column("state", _choice(CheckpointState), nullable=False),
    sa.Column("time", Float, nullable=False),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("experiment_id", sa.ForeignKey("experiments.id"), nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("kind", Text, nullable=False),
    sa.Column("request_id", Text),
    sa.Column("payload", Document, nullable=False),
    sa.Column("time", Float, nullable=False),
    # Whatever else goes wrong, two runners cannot both go on with one search.
    sa.UniqueConstraint("experiment_id", "number"),
)

snapshots = sa.Table(
    "snapshots",
    metadata,
    sa.Column("id", sa.ForeignKey("experiments.id"), primary_key=True, autoincrement=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("state", Document, nullable=False),
)

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("trial_id", sa.ForeignKey("trials.id"), nullable=False),
    sa.Column("run_id", sa.Integer, nullable=False),
    *_process(),
    sa.Column("source_checkpoint", Text),
    sa.Column("started_from_step", Integer, nullable=False),
    sa.Column("reported_steps", Integer, nullable=False),
    sa.Column("started", Float, nullable=False),
    sa.Column("ended", Float),
    sa.Column("reason", Text),
    sa.Column("outcome", _choice(RunState)),
    sa.Column("outcome_reason", Text),
    _identity(),
    sa.Column("handle", Document),
    sa.UniqueConstraint("trial_id", "run_id"),
)

runners = sa.Table(
    "runners",
    metadata,
    sa.Column("id", sa.ForeignKey("experiments.id"), primary_key=True, autoincrement=False),
    *_process(),
    sa.Column("wanted_slots", sa.Integer, nullable=False),
    sa.Column("since", Float, nullable=False),
    _identity(),
    # Until when a runner has promised to be alive, for those who cannot see its process.
    sa.Column("alive_until", _Renewable),
)

leases = sa.Table(
    "leases",
    metadata,
    sa.Column("host", Text, primary_key=True),
    sa.Column("slot", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("experiment_id", sa.Integer, nullable=False),
    sa.Column("trial_id", sa.Integer, nullable=False),
    sa.Column("pid", sa.BigInteger, nullable=False),
    sa.Column("process_started", Float, nullable=False),
    sa.Column("since", Float, nullable=False),
    _identity(),
    sa.Column("alive_until", _Renewable),
)

models = sa.Table(
    "models",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", Text, nullable=False, unique=True),
    sa.Column("description", Text),
    sa.Column("labels", DocumentList, nullable=False),
    sa.Column("metadata", Document, nullable=False),
    sa.Column("notes", Text),
    sa.Column("archived", sa.Boolean, nullable=False),
    sa.Column("last_version", sa.Integer, nullable=False),
    sa.Column("created", Float, nullable=False),
    sa.Column("updated", Float, nullable=False),
    sqlite_autoincrement=True,
)

versions = sa.Table(
    "versions",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("model_id", sa.ForeignKey("models.id"), nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("checkpoint", Text, nullable=False, index=True),
    sa.Column("name", Text),
    sa.Column("comment", Text),
    sa.Column("notes", Text),
    sa.Column("labels", DocumentList, nullable=False),
    sa.Column("metadata", Document, nullable=False),
    sa.Column("created", Float, nullable=False),
    sa.UniqueConstraint("model_id", "number"),
)

schema_version = sa.Table(
    "schema_version",
    sa.MetaData(),
    sa.Column("id", sa.Integer, sa.CheckConstraint("id = 1"), primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
)
