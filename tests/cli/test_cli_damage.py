"""What `det` says of a database that was damaged, or that holds names from anywhere."""

from __future__ import annotations

import pathlib
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

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


def assert_said_in_one_line(result: Any) -> None:
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    if result.exit_code:
        assert result.exit_code == 1
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1
        assert result.stderr.strip().isprintable()


@pytest.mark.parametrize("command", COMMANDS[:-2], ids=lambda command: " ".join(map(str, command)))
def test_damage_is_one_line_with_the_file_and_what_to_do(
    command: tuple[Any, ...], det: Det, finished: Any, home: pathlib.Path
) -> None:
    with closing(sqlite3.connect(home / "tracking.db")) as connection, connection:
        connection.execute("UPDATE trials SET state = 'x'")
        connection.execute("UPDATE experiments SET state = 'x'")
    result = det(*command)
    assert_said_in_one_line(result)
    assert (result.exit_code, result.stdout) == (1, "")
    for part in (str(home / "tracking.db"), "is damaged", "det doctor", "Restore a backup", ".recover"):
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
