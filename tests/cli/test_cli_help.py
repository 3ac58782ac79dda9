"""Every command explains itself, and a shell can complete it."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import forking
from det_command import root

Det = Callable[..., Any]

ROOT = pathlib.Path(__file__).parents[2]


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command that is shown."""
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


COMMANDS = list(commands(root()))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_an_example_of_that_very_command(det: Det, command: tuple[str, ...]) -> None:
    result = det(*command, "--help")
    assert result.exit_code == 0
    assert f"Example: det {' '.join(command)}" in " ".join(result.stdout.split())


EXPERIMENT = """
    create list describe logs list-trials list-checkpoints pause activate cancel kill wait continue archive unarchive
    delete download plot label set config download-model-def
"""
VERBS = {
    "experiment": EXPERIMENT,
    "trial": "list describe logs download kill plot",
    "checkpoint": "list describe download delete consolidate",
    "model": "create list describe register-version list-versions",
    "tensorboard": "start",
}


@pytest.mark.parametrize("noun", VERBS)
def test_a_noun_has_these_verbs(noun: str) -> None:
    assert {command[1] for command in COMMANDS if command[0] == noun} == set(VERBS[noun].split())


def test_commands_without_a_noun() -> None:
    assert {command[0] for command in COMMANDS if len(command) == 1} == {
        "backup",
        "doctor",
        "gc",
        "preview-search",
        "ui",
        "version",
    }


def shown_commands() -> set[tuple[str, str]]:
    """Return the nouns and verbs of all commands on pages and in hints of the program."""
    sources = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    pattern = re.compile(rf"(?:`|\$ )det ({'|'.join(VERBS)}) ([a-z-]+)")
    return {found for path in sources for found in pattern.findall(path.read_text(encoding="utf-8"))}


def test_all_commands_that_are_shown_to_people_exist() -> None:
    shown = shown_commands()
    assert len(shown) > 20
    assert shown <= {(noun, verb) for noun, verbs in VERBS.items() for verb in verbs.split()}


def test_a_noun_without_a_verb_shows_its_verbs(det: Det) -> None:
    assert "register-version" in det("m").output


def completions(words: str, home: pathlib.Path) -> list[str]:
    """Return what a shell would offer for a line that ends in an unfinished word."""
    count = len(words.split(" ")) - 1
    variables = {"_DET_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count), "DET_HOME": str(home)}
    command, environment = ["-m", "determined.cli"], {**os.environ, **variables}
    result = forking.run(command, env=environment, capture_output=True, timeout=120, check=True)
    return result.stdout.split()


def test_a_shell_completes_nouns(home: pathlib.Path) -> None:
    assert completions("det ch", home) == ["checkpoint"]


def test_a_shell_completes_ids_of_what_there_is(finished: Any, home: pathlib.Path) -> None:
    assert completions("det experiment describe ", home) == ["1"]
    assert completions("det checkpoint download ab", home) == ["abcd-1"]


def test_a_shell_completes_nothing_from_a_damaged_database(home: pathlib.Path) -> None:
    home.mkdir()
    (home / "tracking.db").write_text("notes, longer than the header of a database file " * 10)
    assert completions("det experiment describe ", home) == []


def test_the_completion_of_a_shell_can_be_shown(home: pathlib.Path) -> None:
    variables = {**os.environ, "_DET_COMPLETE": "source_bash"}
    command = [sys.executable, "-m", "determined.cli"]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=True)
    assert "_DET_COMPLETE" in result.stdout
