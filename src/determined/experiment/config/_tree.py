"""What a config may be made of: maps with texts as keys, lists, texts, numbers, true, false and null."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from typing import Any

from determined.experiment.config._findings import ConfigIssue
from determined.experiment.config._section import Path

DEEPEST = 50
MOST = 100_000
_WIDEST_BITS = 63


class TooMuch(Exception):
    """A config is too deep or too large to go on with."""

    def __init__(self, finding: ConfigIssue) -> None:
        super().__init__(finding.rule)
        self.finding = finding


class Budget:
    """How much of a config may still be read; what refers to itself is endless."""

    def __init__(self) -> None:
        self._left = MOST

    def spend(self, path: Path) -> None:
        """Count one value; raise if it is too deep or one too many."""
        self._left -= 1
        if len(path) > DEEPEST:
            raise TooMuch(
                ConfigIssue(
                    path[:3], f"it is nested more than {DEEPEST} levels deep", "Take levels out; nothing needs so many."
                )
            )
        if self._left < 0:
            raise TooMuch(
                ConfigIssue(
                    path[:1],
                    f"the config has more than {MOST} values",
                    "Move data to a file; use fewer YAML aliases (*).",
                )
            )


class Plain:
    """Copies a value into plain maps, lists and scalars; what cannot be in a config is found and becomes null."""

    def __init__(self) -> None:
        self.findings: list[ConfigIssue] = []
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
            if isinstance(key, str) and (found := _text_fault(key)) is None:
                yield str.__str__(key), its
            elif isinstance(key, str):
                self.findings.append(ConfigIssue(path, f"it has a key that {found}", "Write keys in letters."))
            else:
                self.findings.append(
                    ConfigIssue(
                        path, f"it has a key that is not a text: {key!r:.40}", f'Put the key in quotes: "{key!s:.40}".'
                    )
                )

    def _scalar(self, value: Any, path: Path) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._checked(str.__str__(value), _text_fault(value), "Write it without that.", path)
        if isinstance(value, numbers.Integral):
            remedy = f"Write at most {2**_WIDEST_BITS - 1}, or put it in quotes."
            return self._checked(int(value), _whole_fault(int(value)), remedy, path)
        if isinstance(value, numbers.Real):
            return self._checked(float(value), _finite_fault(value), "Write a finite number, or a text.", path)
        remedy = "Write a text, a number, true, false, a list or a map."
        return self._checked(repr(value), f"is a {type(value).__name__}", remedy, path)

    def _checked(self, value: Any, fault: str | None, remedy: str, path: Path) -> Any:
        if fault is None:
            return value
        self.findings.append(ConfigIssue(path, f"it {fault}", remedy, value))
        return None


def _text_fault(text: str) -> str | None:
    if "\0" in text:
        return "has a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "has half a Unicode character (a lone surrogate)"
    return None


def _whole_fault(number: int) -> str | None:
    return "is too large a number" if number.bit_length() > _WIDEST_BITS else None


def _finite_fault(number: numbers.Real) -> str | None:
    return None if math.isfinite(number) else "is not a finite number"
