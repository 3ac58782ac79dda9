"""Packages that Determined brought along and programs import without saying so; Resolute has an extra for them."""

from __future__ import annotations

import re

_MODULES = ("boto3", "google.cloud", "matplotlib", "requests", "ruamel", "tabulate", "termcolor")
"""What the packages of the extra `determined` are imported as."""
_MISSING = re.compile(r"No module named '([\w.]+)'")


def explained(message: str) -> str:
    """Return an error message, with the command that installs the package if it says that one of these is missing."""
    found = _MISSING.search(message)
    return message if found is None or not _is_known(found[1]) else f"{message}. {_remedy(found[1])}"


def note_missing_package(error: BaseException) -> None:
    """Add a note with the command that installs the package to an error that says that one of these is missing."""
    if isinstance(error, ModuleNotFoundError) and error.name and _is_known(error.name):
        note = _remedy(error.name)
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _is_known(module: str) -> bool:
    return any(f"{module}.".startswith(f"{known}.") or f"{known}.".startswith(f"{module}.") for known in _MODULES)


def _remedy(module: str) -> str:
    return f"Determined brought {module} along, Resolute does not: pip install 'resolute[determined]'"
