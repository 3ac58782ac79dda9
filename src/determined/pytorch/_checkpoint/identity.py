"""Whether a run continues an earlier one: the same program, hyperparameters and data."""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from determined import storage
from determined.pytorch._checkpoint.legacy import LOAD_FILE

MAX_NAMED_DIFFERENCES = 5

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def program_path() -> str | None:
    """Return the path of the script that runs; None where there is none, as in a notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return str(pathlib.Path(file).resolve()) if file else None


def read_description(saved: storage.SavedCheckpoint) -> dict[str, Any] | None:
    """Return the description of the run that saved a checkpoint; None if it is unreadable or Determined's."""
    if not saved.has_manifest:
        return None
    try:
        return storage.read_json(saved.file(LOAD_FILE))
    except (OSError, ValueError):
        return None


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return what differs between the descriptions of two runs, such as "lr: 0.1 there, 0.001 here".

    An earlier version did not write every entry: a program that is missing on a side is not compared.
    """
    compared = [name for name in ("program", "trial_cls_spec") if there.get(name) and here.get(name)]
    programs = [{name: one[name] for name in compared} for one in (there, here)]
    data = [_configured(one, "data") for one in (there, here)]
    return [*_differing(*programs), *hyperparameter_differences(there, here), *_differing(*data)]


def hyperparameter_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return the hyperparameters that differ between the descriptions of two runs."""
    given = [_mapping(one.get("hparams")) for one in (there, here)]
    configured = [_configured(one, "hyperparameters") for one in (there, here)]
    return [*_differing(*given), *_differing(*configured)]


def enumerated(found: list[str]) -> str:
    """Return differences as one line: the first few, and the number of others."""
    more = len(found) - MAX_NAMED_DIFFERENCES
    return "; ".join(found[:MAX_NAMED_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _configured(description: Mapping[str, Any], section: str) -> dict[str, Any]:
    return {section: _mapping(description.get("experiment_config")).get(section) or {}}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    # As the JSON file of a description returns them.
    stored = [json.loads(json.dumps(side, default=str)) for side in (there, here)]
    before, now = (dict(_leaves(side)) for side in stored)
    for name in before | now:
        old, new = before.get(name, "not set"), now.get(name, "not set")
        if old != new:
            yield f"{name}: {old} there, {new} here"


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values in nested dicts as JSON, by their dotted names."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _leaves(one, f"{name}.{key}" if name else key)
    else:
        # JSON stores other objects as their str(), which may contain an address.
        yield name, _ADDRESS.sub("", json.dumps(value))
