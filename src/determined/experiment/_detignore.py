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
_TOKEN = re.compile(r"(\*+)|(\?)|\[([!^]?)(\]?+(?:\[:[^]]*:\]|\\.|[^]\\])*+)\]|\\(.)|([^[\\])", re.DOTALL)
"""Stars, a question mark, a set and whether it is negated, an escaped character, or any other one."""
_MEMBER = re.compile(r"\[:(.*?):\]|(?:\\?(.))(?:-(?:\\?(.)))?", re.DOTALL)
"""What a set has: a class, a character, or the two ends of a range."""


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


def _expression(pattern: str) -> str:
    """Return a pattern as a regular expression for paths."""
    # One with a slash in it is a path from the top, any other one a name at any depth.
    expression = "" if "/" in pattern else _ANY
    pattern, position = pattern.removeprefix("/"), 0
    while position < len(pattern):
        token = _TOKEN.match(pattern, position)
        if token is None:
            raise _Nothing  # a set without an end, or a backslash at the end
        stars, any_one, negation, members, escaped, plain = token.groups()
        position = token.end()
        if stars:
            part, position = _stars(pattern, *token.span())
        elif any_one:
            part = "[^/]"
        elif members is not None:
            part = f"(?!/)[{'^' if negation else ''}{''.join(map(_member, _MEMBER.finditer(members)))}]"
        else:
            part = re.escape(escaped or plain)
        expression += part
    return expression


def _stars(pattern: str, start: int, end: int) -> tuple[str, int]:
    """Return the expression for stars, and where the rest begins: `**` between slashes is any number of folders."""
    if end - start >= 2 and (start == 0 or pattern[start - 1] == "/"):
        if end == len(pattern):
            return ".*" if start == 0 else ".+", end
        if pattern[end] == "/":
            return _ANY, end + 1
    return "[^/]*", end


def _member(member: re.Match[str]) -> str:
    name, low, high = member.groups()
    if name is not None:
        if name not in _CLASSES:
            raise _Nothing
        return _CLASSES[name]
    # A range that runs backwards has its first character only.
    return re.escape(low) + (f"-{re.escape(high)}" if high is not None and low <= high else "")
