"""Translates the forms of older configs into those of today."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from determined.experiment.config._searcher import searchers
from determined.experiment.config._section import UNITS, ConfigIssue
from determined.experiment.config._text import in_yaml

Tree = dict[str, Any]


def translate(tree: Tree) -> tuple[Tree, list[str], list[ConfigIssue]]:
    """Return a config in today's forms, notes for the user, and what could not be translated.

    A config in today's forms, or one with other errors, is returned unchanged.
    """
    notes: list[str] = []
    issues: list[ConfigIssue] = []
    tree = copy.deepcopy(tree)
    for form in _FORMS:
        for message in form(tree):
            issues.append(message) if isinstance(message, ConfigIssue) else notes.append(message)
    return tree, notes, issues


def _max_length(tree: Tree) -> Iterator[str | ConfigIssue]:
    """Add the `time_metric` and `max_time` that `max_length` of a search with rungs means.

    `max_length` stays, for programs that read it.
    """
    searcher = tree.get("searcher")
    if not isinstance(searcher, dict) or not _has_rungs(searcher.get("name")):
        return
    old = searcher.get("max_length")
    if old is None or searcher.get("time_metric") is not None or searcher.get("max_time") is not None:
        return
    # If the old form is invalid, only that is reported.
    searcher |= {"time_metric": "batches", "max_time": 1}
    if (length := _length(old)) is None:
        return
    unit, number = length
    if unit == "records":
        if (batch_size := _batch_size(tree)) is None:
            yield ConfigIssue(("searcher", "max_length"), *_RECORDS, old)
            return
        unit, number = "batches", max(number // batch_size, 1)
    searcher |= {"time_metric": unit, "max_time": number}
    yield (
        f"searcher.max_length: {in_yaml(old)} is an old form; it was read as time_metric: {unit}, max_time: {number}."
    )


def _has_rungs(name: Any) -> bool:
    kind = searchers().get(name) if isinstance(name, str) else None
    return kind is not None and "max_time" in kind.model_fields


_RECORDS = (
    "records are counted in batches of hyperparameters.global_batch_size, which must be a constant",
    "Write global_batch_size: 64 in hyperparameters, or time_metric: epochs and max_time: 27 instead of max_length.",
)


def _length(old: Any) -> tuple[str, int] | None:
    if isinstance(old, dict) and len(old) == 1:
        ((unit, number),) = old.items()
    else:
        unit, number = "batches", old
    is_length = unit in UNITS and isinstance(number, int) and not isinstance(number, bool) and number > 0
    return (unit, number) if is_length else None


def _batch_size(tree: Tree) -> int | None:
    hyperparameters = tree.get("hyperparameters")
    size = hyperparameters.get("global_batch_size") if isinstance(hyperparameters, dict) else None
    if isinstance(size, dict) and size.get("type") == "const":
        size = size.get("val")
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def _no_slots(tree: Tree) -> Iterator[str | ConfigIssue]:
    """Turn `slots_per_trial: 0`, which asked a cluster for no GPU, into one slot."""
    resources = tree.get("resources")
    if not isinstance(resources, dict):
        return
    slots = resources.get("slots_per_trial")
    if slots == 0 and not isinstance(slots, bool):
        resources["slots_per_trial"] = 1
        yield "resources.slots_per_trial: 0 is an old form; it was read as 1, since a CPU counts as slots here."


def _actions(tree: Tree) -> Iterator[str | ConfigIssue]:
    """Turn `action: {type: cancel_retries}` of log policies into `action: cancel_retries`."""
    policies = tree.get("log_policies")
    for policy in policies if isinstance(policies, list) else []:
        action = policy.get("action") if isinstance(policy, dict) else None
        if isinstance(action, dict) and set(action) == {"type"}:
            policy["action"] = action["type"]
    yield from ()


def _variables(tree: Tree) -> Iterator[str | ConfigIssue]:
    """Turn environment variables for `gpu` into those for `cuda`."""
    environment = tree.get("environment")
    variables = environment.get("environment_variables") if isinstance(environment, dict) else None
    if isinstance(variables, dict) and "gpu" in variables and variables.get("cuda") is None:
        variables["cuda"] = variables.pop("gpu")
    yield from ()


_FORMS: tuple[Callable[[Tree], Iterator[str | ConfigIssue]], ...] = (_max_length, _no_slots, _actions, _variables)
