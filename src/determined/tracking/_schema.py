"""The tables of the tracking database."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa


class JsonText(sa.Text):
    """The type of a column that holds a map as JSON."""


class JsonList(sa.Text):
    """The type of a column that holds a list as JSON."""


class Moment(sa.Float[float]):
    """The type of a column that holds a time, in seconds since 1970."""


def _experiments(metadata: sa.MetaData, *later: sa.schema.SchemaItem) -> sa.Table:
    return sa.Table(
        "experiments",
        metadata,
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("config", JsonText),
        sa.Column("is_local", sa.Boolean, nullable=False),  # its one trial's state is its state
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("progress", sa.Float),
        sa.Column("started", Moment, nullable=False),
        sa.Column("ended", Moment),
        *later,
        # Ids name folders of TensorBoard files: one that was deleted must not come back.
        sqlite_autoincrement=True,
    )


def _trials(metadata: sa.MetaData, *later: sa.schema.SchemaItem) -> sa.Table:
    return sa.Table(
        "trials",
        metadata,
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("experiment_id", sa.ForeignKey("experiments.id"), nullable=False, index=True),
        sa.Column("hparams", JsonText, nullable=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("entrypoint", sa.Text, nullable=False),
        sa.Column("torch_version", sa.Text),
        sa.Column("resolute_version", sa.Text, nullable=False),
        sa.Column("git_commit", sa.Text),
        sa.Column("pid", sa.BigInteger, nullable=False),  # 0 where no process is known, as before the first run
        sa.Column("process_started", sa.Float, nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("source_checkpoint", sa.Text),
        sa.Column("source_steps_completed", sa.BigInteger),
        sa.Column("source_reported_steps", sa.BigInteger),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("status", sa.Text),
        sa.Column("progress", sa.Float),
        sa.Column("metadata", JsonText),
        sa.Column("started", Moment, nullable=False),
        sa.Column("ended", Moment),
        *later,
        sqlite_autoincrement=True,
    )


def _metrics(metadata: sa.MetaData, *later: sa.schema.SchemaItem) -> sa.Table:
    return sa.Table(
        "metrics",
        metadata,
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("trial_id", sa.ForeignKey("trials.id"), nullable=False),
        sa.Column("group", sa.Text, nullable=False),
        sa.Column("steps_completed", sa.BigInteger, nullable=False),
        sa.Column("time", Moment, nullable=False),
        sa.Column("metrics", JsonText, nullable=False),
        *later,
        sa.Index("metrics_by_step", "trial_id", "group", "steps_completed"),
    )


def _checkpoints(metadata: sa.MetaData, *later: sa.schema.SchemaItem) -> sa.Table:
    return sa.Table(
        "checkpoints",
        metadata,
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("uuid", sa.Text, nullable=False, unique=True),
        sa.Column("trial_id", sa.ForeignKey("trials.id"), nullable=False, index=True),
        sa.Column("steps_completed", sa.BigInteger, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("metadata", JsonText, nullable=False),
        sa.Column("resources", JsonText, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("time", Moment, nullable=False),
        *later,
    )


def _tallies(metadata: sa.MetaData) -> sa.Table:
    """How many rows there must be: of a kind, of one owner (an experiment or a trial), and of one group of metrics."""
    return sa.Table(
        "tallies",
        metadata,
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("owner", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("group", sa.Text, primary_key=True),
        sa.Column("count", sa.BigInteger, nullable=False),
        sa.Column("unsealed", sa.BigInteger, nullable=False),  # the highest id of the rows that may lack a checksum
        sa.Column("mirror", sa.BigInteger, nullable=False),  # a checksum of the columns above, less the count
    )


def _process_columns() -> tuple[sa.Column[Any], ...]:
    return (
        sa.Column("pid", sa.BigInteger, nullable=False),  # 0 where the process is not known yet
        sa.Column("process_started", sa.Float, nullable=False),
        sa.Column("host", sa.Text, nullable=False),
    )


def _checksum() -> sa.Column[int]:
    return sa.Column("checksum", sa.BigInteger)


_TABLES = (_experiments, _trials, _metrics, _checkpoints)

# What a migration makes must never change, so each version has a description of its own; the queries use the newest.
version_1 = sa.MetaData()
for _table in _TABLES:
    _table(version_1)

version_2 = sa.MetaData()
for _table in _TABLES:
    _table(version_2, _checksum())
_tallies(version_2)


def _new(name: str, kind: Any) -> sa.Column[Any]:
    """Return a column that its table got in a later version; older rows have no value there."""
    return sa.Column(name, kind, info={"is_new": True})


def _index_where(name: str, condition: str, *columns: str) -> sa.Index:
    """Return an index of the rows of a condition only."""
    where = sa.text(condition)
    return sa.Index(name, *columns, sqlite_where=where, postgresql_where=where)


version_3 = sa.MetaData()

_experiments(
    version_3,
    _checksum(),
    *(_new(name, sa.Text) for name in ("description", "project", "workspace", "notes")),
    _new("labels", JsonList),
    _new("archived", sa.Boolean),
    # Of driven ones: what people want.
    _new("desired", sa.Text),
    _new("priority", sa.Integer),
    _new("max_slots", sa.Integer),
)

_trials(
    version_3,
    _checksum(),
    # Of driven experiments: how the search calls it, its latest run, how often that failed, what people want.
    _new("request_id", sa.Text),
    _new("run_id", sa.Integer),
    _new("restarts", sa.Integer),
    _new("wish", sa.Text),
    sa.Index("trials_by_request", "experiment_id", "request_id", unique=True),
    _index_where("trials_by_wish", "wish IS NOT NULL", "experiment_id", "wish"),
)

_metrics(
    version_3,
    _checksum(),
    _new("run_id", sa.Integer),
    # Of validations in driven experiments only: runners look for the newest ones, trials for the best one.
    _new("experiment_id", sa.Integer),
    _new("number", sa.Integer),  # 1, 2, 3, ... in the order in which they were stored
    _new("score", sa.Float),  # the metric that the search goes by, if it is a finite number
    _index_where("validations_by_number", "number IS NOT NULL", "experiment_id", "number"),
    _index_where("validations_by_score", "score IS NOT NULL", "experiment_id", "score"),
)

_checkpoints(version_3, _checksum())

_tallies(version_3)

sa.Table(
    "events",
    version_3,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("experiment_id", sa.ForeignKey("experiments.id"), nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("request_id", sa.Text),
    sa.Column("payload", JsonText, nullable=False),
    sa.Column("time", Moment, nullable=False),
    _checksum(),
    # Whatever else goes wrong, two runners cannot both go on with one search.
    sa.UniqueConstraint("experiment_id", "number"),
)

sa.Table(
    "snapshots",
    version_3,
    sa.Column("id", sa.ForeignKey("experiments.id"), primary_key=True, autoincrement=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("state", JsonText, nullable=False),
    _checksum(),
)

sa.Table(
    "runs",
    version_3,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("trial_id", sa.ForeignKey("trials.id"), nullable=False),
    sa.Column("run_id", sa.Integer, nullable=False),
    *_process_columns(),
    sa.Column("source_checkpoint", sa.Text),
    sa.Column("started_from_step", sa.BigInteger, nullable=False),
    sa.Column("reported_steps", sa.BigInteger, nullable=False),
    sa.Column("started", Moment, nullable=False),
    sa.Column("ended", Moment),
    sa.Column("reason", sa.Text),
    sa.Column("outcome", sa.Text),
    sa.Column("outcome_reason", sa.Text),
    _checksum(),
    sa.UniqueConstraint("trial_id", "run_id"),
)

sa.Table(
    "runners",
    version_3,
    sa.Column("id", sa.ForeignKey("experiments.id"), primary_key=True, autoincrement=False),
    *_process_columns(),
    sa.Column("wanted_slots", sa.Integer, nullable=False),
    sa.Column("since", Moment, nullable=False),
    _checksum(),
)

sa.Table(
    "leases",
    version_3,
    sa.Column("host", sa.Text, primary_key=True),
    sa.Column("slot", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("experiment_id", sa.Integer, nullable=False),
    sa.Column("trial_id", sa.Integer, nullable=False),
    sa.Column("pid", sa.BigInteger, nullable=False),
    sa.Column("process_started", sa.Float, nullable=False),
    sa.Column("since", Moment, nullable=False),
)

sa.Table(
    "models",
    version_3,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("description", sa.Text),
    sa.Column("labels", JsonList, nullable=False),
    sa.Column("metadata", JsonText, nullable=False),
    sa.Column("notes", sa.Text),
    sa.Column("archived", sa.Boolean, nullable=False),
    sa.Column("last_version", sa.Integer, nullable=False),
    sa.Column("created", Moment, nullable=False),
    sa.Column("updated", Moment, nullable=False),
    _checksum(),
    sqlite_autoincrement=True,
)

sa.Table(
    "versions",
    version_3,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("model_id", sa.ForeignKey("models.id"), nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("checkpoint", sa.Text, nullable=False, index=True),
    sa.Column("name", sa.Text),
    sa.Column("comment", sa.Text),
    sa.Column("notes", sa.Text),
    sa.Column("labels", JsonList, nullable=False),
    sa.Column("metadata", JsonText, nullable=False),
    sa.Column("created", Moment, nullable=False),
    _checksum(),
    sa.UniqueConstraint("model_id", "number"),
)

newest = sa.MetaData()
for _each in version_3.sorted_tables:
    _each.to_metadata(newest)

experiments = newest.tables["experiments"]
trials = newest.tables["trials"]
metrics = newest.tables["metrics"]
checkpoints = newest.tables["checkpoints"]
tallies = newest.tables["tallies"]
events = newest.tables["events"]
snapshots = newest.tables["snapshots"]
runs = newest.tables["runs"]
runners = newest.tables["runners"]
leases = newest.tables["leases"]
models = newest.tables["models"]
versions = newest.tables["versions"]

NAMING_PROCESSES = (trials, runs, runners, leases)
for _each in NAMING_PROCESSES:
    # What tells a process from others with the same id.
    _each.append_column(_new("identity", JsonText))

# Until when a runner has promised to be alive, for those who cannot see its process.
runners.append_column(_new("alive_until", Moment))

_versions = sa.MetaData()
schema_version = sa.Table(
    "schema_version",
    _versions,
    sa.Column("id", sa.Integer, sa.CheckConstraint("id = 1"), primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
)
