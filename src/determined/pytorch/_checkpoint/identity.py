"""Whether a run continues an earlier one: the same program, hyperparameters and data."""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from determined import storage

MAX_NAMED_DIFFERENCES = 5

_ABSENT = object()
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def program_path() -> str | None:
    """Return the path of the script that runs; None where there is none, as in a notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return str(pathlib.Path(file).resolve()) if file else None


def read_description(folder: pathlib.Path, file: str) -> dict[str, Any] | None:
    """Return what a checkpoint of ours says of the run that saved it; None if it is unreadable or not ours."""
    if not (folder / storage.MANIFEST_FILE).is_file():
        return None
    try:
        description = json.loads(storage.read_plain(folder / file))
    except (OSError, ValueError, RecursionError):
        return None
    return description if isinstance(description, dict) else None


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Name what differs between the descriptions of two runs, such as "lr: 0.1 there, 0.001 here".

    An earlier version did not write every entry: one that is missing on a side is not compared.
    """
    named = ("program", "trial_cls_spec")
    programs = [{name: one[name] for name in named if there.get(name) and here.get(name)} for one in (there, here)]
    data = [{"data": _section(one, "data")} for one in (there, here)]
    return [*_differing(*programs), *hyperparameter_differences(there, here), *_differing(*data)]


def hyperparameter_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Name the hyperparameters that differ between the descriptions of two runs."""
    given = [_mapping(one.get("hparams")) for one in (there, here)]
    configured = [{"hyperparameters": _section(one, "hyperparameters")} for one in (there, here)]
    return [*_differing(*given), *_differing(*configured)]


def enumerated(found: list[str]) -> str:
    """Return differences as one line, the first few of many."""
    more = len(found) - MAX_NAMED_DIFFERENCES
    return "; ".join(found[:MAX_NAMED_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _section(description: Mapping[str, Any], name: str) -> Any:
    return _mapping(description.get("experiment_config")).get(name) or {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    before, now = dict(_leaves(_as_stored(there))), dict(_leaves(_as_stored(here)))
    for name in dict.fromkeys([*before, *now]):
        old, new = (_shown(side.get(name, _ABSENT)) for side in (before, now))
        if old != new:
            yield f"{name}: {old} there, {new} here"


def _as_stored(value: Any) -> Any:
    """Return a value as it comes back from the file of a description."""
    return json.loads(json.dumps(value, default=str))


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield name, value
        return
    for key, one in value.items():
        yield from _leaves(one, f"{name}.{key}" if name else key)


def _shown(value: Any) -> str:
    # An object without a form in JSON is stored as its str(), with an address that says nothing.
    return "not set" if value is _ABSENT else _ADDRESS.sub("", json.dumps(value))
