"""What a config may contain: mappings with string keys, lists, strings, numbers, true, false and null."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from typing import Any

from determined.experiment.config._section import ConfigIssue, Path

MAX_DEPTH = 50
MAX_VALUES = 100_000
_MAX_BITS = 63


class TooMuch(Exception):
    """A config is nested too deeply or too large."""

    def __init__(self, issue: ConfigIssue) -> None:
        super().__init__(issue.rule)
        self.issue = issue


class Budget:
    """How many more values of a config may be read; one that refers to itself is endless."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def spend(self, path: Path) -> None:
        """Count one value; raise if it is too deep or there are too many."""
        self._left -= 1
        if len(path) > MAX_DEPTH:
            raise TooMuch(ConfigIssue(path[:3], f"it is nested more than {MAX_DEPTH} levels deep", "Remove levels."))
        if self._left < 0:
            raise TooMuch(
                ConfigIssue(
                    path[:1],
                    f"the config has more than {MAX_VALUES} values",
                    "Move data to a file; use fewer YAML aliases (*).",
                )
            )


class Plain:
    """Copies a value into plain mappings, lists and scalars; a value that a config cannot contain becomes an issue."""

    def __init__(self) -> None:
        self.issues: list[ConfigIssue] = []
        self._budget = Budget()

    def copy(self, value: Any, path: Path = ()) -> Any:
        """Return the plain copy of a value."""
        self._budget.spend(path)
        if isinstance(value, Mapping):
            return {name: self.copy(its, (*path, name)) for name, its in self._entries(value, path)}
        if isinstance(value, list | tuple):
            return [self.copy(item, (*path, index)) for index, item in enumerate(value)]
        return self._scalar(value, path)

    def _entries(self, value: Mapping[Any, Any], path: Path) -> Iterator[tuple[str, Any]]:
        for key, its in value.items():
            if isinstance(key, str) and (found := _string_fault(key)) is None:
                yield str.__str__(key), its
            elif isinstance(key, str):
                self.issues.append(ConfigIssue(path, f"it has a key that {found}", "Write the key in letters."))
            else:
                self.issues.append(
                    ConfigIssue(
                        path,
                        f"it has a key that is not a string: {key!r:.40}",
                        f'Put the key in quotes: "{key!s:.40}".',
                    )
                )

    def _scalar(self, value: Any, path: Path) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._checked(str.__str__(value), _string_fault(value), "Remove it.", path)
        if isinstance(value, numbers.Integral):
            remedy = f"Write at most {2**_MAX_BITS - 1}, or put it in quotes."
            return self._checked(int(value), _integer_fault(int(value)), remedy, path)
        if isinstance(value, numbers.Real):
            return self._checked(float(value), _finite_fault(value), "Write a finite number, or a string.", path)
        remedy = "Write a string, a number, true, false, a list or a mapping."
        return self._checked(repr(value), f"is a {type(value).__name__}", remedy, path)

    def _checked(self, value: Any, fault: str | None, remedy: str, path: Path) -> Any:
        if fault is None:
            return value
        self.issues.append(ConfigIssue(path, f"it {fault}", remedy, value))
        return None


def _string_fault(text: str) -> str | None:
    if "\0" in text:
        return "has a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "has half a Unicode character (a lone surrogate)"
    return None


def _integer_fault(number: int) -> str | None:
    return "is too large a number" if number.bit_length() > _MAX_BITS else None


def _finite_fault(number: numbers.Real) -> str | None:
    return None if math.isfinite(number) else "is not a finite number"
