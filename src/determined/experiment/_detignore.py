"""Which files `.detignore` leaves out; the syntax and its meaning are those of `.gitignore`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

# fmt: off
_CLASSES = {
    "alnum": "a-zA-Z0-9", "alpha": "a-zA-Z", "blank": r" \t", "cntrl": r"\x00-\x1f\x7f", "digit": "0-9",
    "graph": r"\x21-\x7e", "lower": "a-z", "print": r"\x20-\x7e", "punct": r"!-/:-@\[-`{-~", "space": r"\s",
    "upper": "A-Z", "xdigit": "0-9A-Fa-f",
}
# fmt: on
_ANY = "(?:.*/)?"


@dataclasses.dataclass(frozen=True, slots=True)
class _Rule:
    """One line of the file."""

    pattern: re.Pattern[str]
    excludes: bool
    folders_only: bool


class Ignore:
    """The rules of a file, of which the last match decides."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._rules = [rule for line in lines if (rule := _rule(line)) is not None][::-1]

    def excludes(self, path: str, *, is_folder: bool) -> bool:
        """Return whether an entry is left out whose folder is not; `path` is relative, with slashes."""
        for rule in self._rules:
            if (is_folder or not rule.folders_only) and rule.pattern.fullmatch(path):
                return rule.excludes
        return False


def _rule(line: str) -> _Rule | None:
    line = _without_trailing_spaces(line)
    if not line or line.startswith("#"):
        return None
    excludes = not line.startswith("!")
    text = line if excludes else line[1:]
    folders_only = text.endswith("/")
    text = text[:-1] if folders_only else text
    if not text:
        return None
    try:
        return _Rule(re.compile(_expression(text), re.DOTALL), excludes, folders_only)
    except (_Nothing, re.error):
        return None


def _without_trailing_spaces(line: str) -> str:
    """Return a line without the spaces at its end, unless a backslash keeps them."""
    stripped = line.rstrip(" ")
    if len(stripped) == len(line):
        return line
    backslashes = len(stripped) - len(stripped.rstrip("\\"))
    return stripped + " " if backslashes % 2 else stripped


class _Nothing(Exception):
    """A pattern that no name fits."""


def _expression(text: str) -> str:
    """Return a pattern as a regular expression for paths."""
    # One with a slash within is of a path from the top, any other of a name at any depth.
    anchored = "/" in text
    expression = "" if anchored else _ANY
    text = text.removeprefix("/")
    position = 0
    while position < len(text):
        part, position = _part(text, position)
        expression += part
    return expression


def _part(text: str, position: int) -> tuple[str, int]:
    """Return the expression for what stands at a position, and where the next begins."""
    character = text[position]
    if character == "*":
        return _stars(text, position)
    if character == "?":
        return "[^/]", position + 1
    if character == "[":
        return _bracket(text, position)
    if character == "\\":
        if position + 1 == len(text):
            raise _Nothing
        return re.escape(text[position + 1]), position + 2
    return re.escape(character), position + 1


def _stars(text: str, position: int) -> tuple[str, int]:
    """Return the expression for stars: two or more that stand alone between slashes are any number of folders."""
    end = position
    while end < len(text) and text[end] == "*":
        end += 1
    begins_part = position == 0 or text[position - 1] == "/"
    if end - position >= 2 and begins_part:
        if end == len(text):
            return ".*" if position == 0 else ".+", end
        if text[end] == "/":
            return _ANY, end + 1
    return "[^/]*", end


def _bracket(text: str, position: int) -> tuple[str, int]:
    """Return the expression for a set of characters."""
    end = position + 1
    negated = text[end : end + 1] in ("!", "^")
    end += negated
    members, first = "", True
    while True:
        if end >= len(text):
            raise _Nothing  # it has no end
        if text[end] == "]" and not first:
            break
        member, end = _member(text, end)
        members, first = members + member, False
    # No set of characters has the slash.
    return f"(?!/)[{'^' if negated else ''}{members}]", end + 1


def _member(text: str, position: int) -> tuple[str, int]:
    if text.startswith("[:", position) and (end := text.find(":]", position + 2)) >= 0:
        name = text[position + 2 : end]
        if name not in _CLASSES:
            raise _Nothing
        return _CLASSES[name], end + 2
    low, position = _character(text, position)
    if text[position : position + 1] == "-" and text[position + 1 : position + 2] not in ("", "]"):
        high, position = _character(text, position + 1)
        # One that runs backwards has its first character only.
        return (f"{re.escape(low)}-{re.escape(high)}" if low <= high else re.escape(low)), position
    return re.escape(low), position


def _character(text: str, position: int) -> tuple[str, int]:
    if text[position] == "\\":
        position += 1
        if position >= len(text):
            raise _Nothing
    return text[position], position + 1
