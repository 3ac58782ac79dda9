"""The tables of the tracking database. The types of the columns convert Python's values to stored ones and back."""

from __future__ import annotations

import enum
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy import Dialect, TypeDecorator

from determined._text import bounded
from determined.tracking._data import (
    CheckpointState,
    Desired,
    RunState,
    TrialRequest,
    decode_document,
    encode_document,
)

MAX_GROUP_LENGTH = 400  # characters; databases cannot index names of any length


class Damage(Exception):
    """A stored value cannot be what was written."""


class Text(TypeDecorator[str]):
    """A string from anywhere: lone surrogates and NUL, which databases refuse, are stored as escapes."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """Return what is stored."""
        if value is None:
            return None
        text = str(value)
        if text.isascii() and "\0" not in text:
            return text
        return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


class GroupName(Text):
    """The name of a group of metrics: the end of a very long one is replaced by its checksum."""

    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """Return what is stored."""
        return bounded(cast(str, super().process_bind_param(value, dialect)), MAX_GROUP_LENGTH)


class Integer(TypeDecorator[int]):
    """An integer, also one of numpy's."""

    impl = sa.BigInteger
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> int | None:
        """Return what is stored."""
        return None if value is None else int(value)


class Float(TypeDecorator[float]):
    """A float, also one of numpy's. The negative zero is stored as 0: not all databases know it."""

    impl = sa.Float
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> float | None:
        """Return what is stored."""
        return None if value is None else float(value) + 0.0


class Document(TypeDecorator[Any]):
    """A mapping as JSON, or a list where that is the kind."""

    impl = sa.Text
    cache_ok = True

    def __init__(self, kind: type = dict) -> None:
        super().__init__()
        self.kind = kind

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """Return what is stored."""
        return None if value is None else encode_document(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        """Return the mapping or list; `Damage` if it is neither."""
        if value is None:
            return None
        try:
            found = decode_document(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise Damage(f"{_shortened(value)} is not JSON") from error
        if not isinstance(found, self.kind):
            raise Damage(f"{_shortened(value)} is not JSON of a {self.kind.__name__}")
        return found


class Choice(TypeDecorator[Any]):
    """A member of an enumeration, stored as its value."""

    impl = sa.Text
    cache_ok = True

    def __init__(self, kind: type[enum.StrEnum]) -> None:
        super().__init__()
        self.kind = kind

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """Return what is stored."""
        return None if value is None else self.kind(value).value

    def process_result_value(self, value: Any, dialect: Dialect) -> enum.StrEnum | None:
        """Return the member; `Damage` if there is none of that value."""
        try:
            return None if value is None else self.kind(value)
        except ValueError as error:
            raise Damage(f"{_shortened(value)} is not a {self.kind.__name__}") from error


def _shortened(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


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
    sa.Column("state", Choice(RunState), nullable=False),
    sa.Column("progress", Float),
    sa.Column("started", Float, nullable=False),
    sa.Column("ended", Float),
    sa.Column("description", Text),
    sa.Column("project", Text),
    sa.Column("workspace", Text),
    sa.Column("notes", Text),
    sa.Column("labels", Document(list)),
    sa.Column("archived", sa.Boolean),
    # Of managed experiments: what people want.
    sa.Column("desired", Choice(Desired)),
    sa.Column("priority", sa.Integer),
    sa.Column("max_slots", sa.Integer),
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
    sa.Column("state", Choice(RunState), nullable=False),
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
    sa.Column("requested", Choice(TrialRequest)),
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
    sa.Column("state", Choice(CheckpointState), nullable=False),
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
    sa.Column("outcome", Choice(RunState)),
    sa.Column("outcome_reason", Text),
    _identity(),
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
    sa.Column("alive_until", Float),
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
)

models = sa.Table(
    "models",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", Text, nullable=False, unique=True),
    sa.Column("description", Text),
    sa.Column("labels", Document(list), nullable=False),
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
    sa.Column("labels", Document(list), nullable=False),
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
