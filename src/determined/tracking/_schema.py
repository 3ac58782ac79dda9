"""The tables of the tracking database."""

from __future__ import annotations

import sqlalchemy as sa


class JsonText(sa.Text):
    """The type of a column that holds a map as JSON."""


class Moment(sa.Float[float]):
    """The type of a column that holds a time, in seconds since 1970."""


def _experiments(metadata: sa.MetaData, *later: sa.Column[int]) -> sa.Table:
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


def _trials(metadata: sa.MetaData, *later: sa.Column[int]) -> sa.Table:
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
        sa.Column("pid", sa.BigInteger, nullable=False),
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


def _metrics(metadata: sa.MetaData, *later: sa.Column[int]) -> sa.Table:
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


def _checkpoints(metadata: sa.MetaData, *later: sa.Column[int]) -> sa.Table:
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


_TABLES = (_experiments, _trials, _metrics, _checkpoints)

# What migration 1 creates must never change; the queries use the description of the newest version.
version_1 = sa.MetaData()
for _table in _TABLES:
    _table(version_1)

newest = sa.MetaData()
experiments, trials, metrics, checkpoints = (table(newest, sa.Column("checksum", sa.BigInteger)) for table in _TABLES)

# How many rows there must be: of a kind, of one owner (an experiment or a trial), and of one group of metrics.
tallies = sa.Table(
    "tallies",
    newest,
    sa.Column("kind", sa.Text, primary_key=True),
    sa.Column("owner", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("group", sa.Text, primary_key=True),
    sa.Column("count", sa.BigInteger, nullable=False),
    sa.Column("unsealed", sa.BigInteger, nullable=False),  # the highest id of the rows that may lack a checksum
    sa.Column("mirror", sa.BigInteger, nullable=False),  # a checksum of the columns above, less the count
)

_versions = sa.MetaData()
schema_version = sa.Table(
    "schema_version",
    _versions,
    sa.Column("id", sa.Integer, sa.CheckConstraint("id = 1"), primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
)
