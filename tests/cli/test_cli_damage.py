"""What `det` says of a database that was damaged, or that holds names from anywhere."""

from __future__ import annotations

import pathlib
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from determined import tracking

Det = Callable[..., Any]

COMMANDS = (
    ("experiment", "list"),
    ("experiment", "list", "--json"),
    ("experiment", "describe", 1),
    ("trial", "describe", 1),
    ("trial", "describe", 1, "--metrics"),
    ("trial", "describe", 1, "--metrics", "--csv"),
    ("checkpoint", "list"),
    ("checkpoint", "describe", "abcd"),
)
TABLES = ("experiments", "trials", "metrics", "checkpoints")
values = (
    st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
    | st.binary(max_size=5)
    | st.sampled_from(
        ["{}", "[]", '{"searcher": 5}', '{"searcher": {"metric": []}}', '{"data": {"secrets": 1}}', "null"]
    )
    | st.sampled_from(['{"val_loss": {"a": []}}', '{"val_loss": "x"}', '{"loss": 1e999}', "[" * 100_000, "9" * 5000])
)


def unsealed(database: pathlib.Path) -> list[tuple[str, str]]:
    """Make a database one from before rows had checksums; return its columns."""
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE schema_version SET version = 1")
    tracking.TrackingReader(database).experiments()
    with closing(sqlite3.connect(database)) as connection:
        return [(table, row[1]) for table in TABLES for row in connection.execute(f"PRAGMA table_info({table})")]


def assert_said_in_one_line(result: Any) -> None:
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    if result.exit_code:
        assert result.exit_code == 1
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1
        assert result.stderr.strip().isprintable()


# A fifth of the examples: each runs all commands, and what the rows may hold is tested below `tests/tracking` as well.
@settings(max_examples=settings.default.max_examples // 5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), value=values)
def test_rows_that_hold_anything_are_shown_or_refused_in_one_line(
    data: st.DataObject, value: Any, det: Det, finished: Any, home: pathlib.Path
) -> None:
    database, kept = home / "tracking.db", home / "kept.db"
    if not kept.exists():
        unsealed(database)
        shutil.copy(database, kept)
    shutil.copy(kept, database)
    with closing(sqlite3.connect(database)) as connection, connection:
        columns = [(table, row[1]) for table in TABLES for row in connection.execute(f"PRAGMA table_info({table})")]
        table, column = data.draw(st.sampled_from([one for one in columns if one[1] != "id"]))
        connection.execute(f'UPDATE {table} SET "{column}" = ?', (value,))
    for command in COMMANDS:
        assert_said_in_one_line(det(*command))


@pytest.mark.parametrize("command", COMMANDS[:-2], ids=lambda command: " ".join(map(str, command)))
def test_damage_is_one_line_with_file_row_and_what_to_do(
    command: tuple[Any, ...], det: Det, finished: Any, home: pathlib.Path
) -> None:
    with closing(sqlite3.connect(home / "tracking.db")) as connection, connection:
        connection.execute("UPDATE trials SET state = 'ACTIVE'")
    result = det(*command)
    assert_said_in_one_line(result)
    assert (result.exit_code, result.stdout) == (1, "")
    for part in (str(home / "tracking.db"), "row 1 of table 'trials'", "restore a copy", ".recover"):
        assert part in result.stderr


NAMES = (
    "<b>x</b>",
    "'; DROP TABLE metrics; --",
    "[red]x[/red]",
    "\x1b[2J\x1b[31mx",
    "\x07\r\x9b5m",
    "\ud800",
    "\u202eabc",
)


@pytest.mark.parametrize("command", COMMANDS[:-2], ids=lambda command: " ".join(map(str, command)))
def test_names_from_anywhere_neither_style_nor_move_anything(
    command: tuple[Any, ...], det: Det, start: Callable[..., tracking.TrialWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal: then markup would be seen
    for name in NAMES:
        with start(name=name, hparams={name: name}, config={name: name}) as recorder:
            metrics = {name: 1.0, "text": name}
            recorder.write([tracking.MetricReport(group=name, steps_completed=1, metrics=metrics, time=1.0)])
    for number in range(1, len(NAMES) + 1):
        shown = det(*(number if part == 1 else part for part in command)).output
        styles = {"\x1b[1m", "\x1b[0m", "\x1b[3m", "\x1b[1;3m"}  # of our own headings
        for style in sorted(styles, key=len, reverse=True):
            shown = shown.replace(style, "")
        assert shown.replace("\n", "").isprintable()
