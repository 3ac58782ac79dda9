"""Rules over several sections of an experiment config, and what people should know about one that holds them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from determined.experiment.config._hyperparameters import Categorical, Const, Double, Hyperparameter, Int, Log, leaves
from determined.experiment.config._searcher import AdaptiveAshaSearcher, AsyncHalvingSearcher, GridSearcher
from determined.experiment.config._section import Path, RuleViolation, Section
from determined.experiment.config._text import spelled

if TYPE_CHECKING:
    from determined.experiment.config._experiment import ExperimentConfig

# All points of a grid are made at once.
_LARGEST_GRID = 1_000_000
_BATCH_SIZE = "global_batch_size"
_PERIODS = ("min_validation_period", "min_checkpoint_period")
# What scripts hand to `fit` by themselves.
_OF_CLASSES = (
    *_PERIODS,
    "checkpoint_policy",
    "perform_initial_validation",
    "profiling",
    "scheduling_unit",
)


def breaches(config: ExperimentConfig) -> Iterator[RuleViolation]:
    """Yield the rules over several sections that do not hold, each with the keys that it is about."""
    for rule, needs in _RULES.items():
        yield from (breach._replace(needs=frozenset(needs)) for breach in rule(config))


def _workspace_and_project(config: ExperimentConfig) -> Iterator[RuleViolation]:
    if bool(config.workspace) != bool(config.project):
        missing, given = ("project", "workspace") if config.workspace else ("workspace", "project")
        yield RuleViolation((missing,), f"{given} is given without it", f"Write both, or leave {given} out too.")


def _grid(config: ExperimentConfig) -> Iterator[RuleViolation]:
    if not isinstance(config.searcher, GridSearcher):
        return
    found = list(leaves(config.hyperparameters))
    for path, value in found:
        if isinstance(value, Int | Double | Log) and value.count is None:
            yield RuleViolation(("hyperparameters", *path, "count"), "a grid search needs it", "Write count: 5.")
    if (points := math.prod(_grid_points(value) for _, value in found)) > _LARGEST_GRID:
        yield RuleViolation(
            ("hyperparameters",),
            f"the grid has {points} points, more than {_LARGEST_GRID}",
            "Choose smaller counts, or searcher.name: random.",
        )


def _grid_points(value: Hyperparameter) -> int:
    if isinstance(value, Categorical):
        return len(value.vals)
    if isinstance(value, Int):
        return min(value.count or 1, value.maxval - value.minval + 1)
    return 1 if isinstance(value, Const) else value.count or 1


def _batch_size(config: ExperimentConfig) -> Iterator[RuleViolation]:
    size = config.hyperparameters.get(_BATCH_SIZE)
    slots = config.resources.slots_per_trial
    smallest = _smallest(size)
    if size is None or (smallest is not None and smallest >= slots):
        return
    at: Path = ("hyperparameters", _BATCH_SIZE)
    remedy = f"Write {_BATCH_SIZE}: {max(64, slots)}."
    if smallest is None:
        yield RuleViolation(at, "it is not a whole number of at least 1, or a range or choice of such numbers", remedy)
    else:
        yield RuleViolation(at, f"a batch of {smallest} leaves nothing for some of {slots} slots", remedy)


def _smallest(size: object) -> int | None:
    """Return the smallest batch size that a hyperparameter can be; None if one of its values is no batch size."""
    if isinstance(size, Int):
        values: list[object] = [size.minval]
    elif isinstance(size, Const):
        values = [size.val]
    else:
        values = list(size.vals) if isinstance(size, Categorical) else [None]
    whole = [value for value in values if isinstance(value, int) and not isinstance(value, bool) and value >= 1]
    return min(whole) if len(whole) == len(values) else None


def _length_of_classes(config: ExperimentConfig) -> Iterator[RuleViolation]:
    if config.trial_class is None or config.searcher.max_length is not None:
        return
    time_metric = getattr(config.searcher, "time_metric", None)
    if time_metric in ("batches", "epochs"):
        return
    counts = "" if time_metric is None else f", and time_metric={time_metric!r} counts neither batches nor epochs"
    yield RuleViolation(
        ("searcher", "max_length"),
        f"entrypoint {config.trial_class} is a trial class, which must be told how long to train{counts}",
        "Write max_length: {epochs: 10}.",
    )


def _records(config: ExperimentConfig) -> Iterator[RuleViolation]:
    if config.trial_class is None or _BATCH_SIZE in config.hyperparameters:
        return
    lengths: dict[Path, object] = {("searcher", "max_length"): config.searcher.max_length}
    lengths |= {(name,): getattr(config, name) for name in _PERIODS}
    for path, length in lengths.items():
        if getattr(length, "records", None):
            yield RuleViolation(path, *_RECORDS)


_RECORDS = (
    f"records are counted in batches of hyperparameters.{_BATCH_SIZE}, which must be there",
    f"Write {_BATCH_SIZE}: 64 in hyperparameters, or count {{batches: 1000}}.",
)

_RULES: dict[Callable[[ExperimentConfig], Iterator[RuleViolation]], tuple[str, ...]] = {
    _workspace_and_project: ("workspace", "project"),
    _grid: ("searcher", "hyperparameters"),
    _batch_size: ("hyperparameters", "resources"),
    _length_of_classes: ("entrypoint", "searcher"),
    _records: ("entrypoint", "searcher", "hyperparameters", *_PERIODS),
}


def notes(config: ExperimentConfig) -> Iterator[str]:
    """Yield what people should know about a config that holds all rules."""
    if keys := [spelled(path) for path in config.inert_keys()]:
        yield f"Without effect here: {', '.join(keys)}."
    if config.records_per_epoch:
        yield (
            f"records_per_epoch: {config.records_per_epoch} has no effect: an epoch is one pass over the training data."
        )
    yield from _notes_on_scripts(config)
    yield from _notes_on_search(config)


def _notes_on_scripts(config: ExperimentConfig) -> Iterator[str]:
    if config.entrypoint is None or config.trial_class is not None:
        return
    if changed := [name for name in _OF_CLASSES if _is_changed(config, name)]:
        yield (
            f"These keys act on entrypoints of the form module:Class: {', '.join(changed)}. A script gives its own "
            "to trainer.fit()."
        )


def _is_changed(config: ExperimentConfig, name: str) -> bool:
    default = type(config).model_fields[name].get_default(call_default_factory=True)
    return bool(getattr(config, name) != default)


def _notes_on_search(config: ExperimentConfig) -> Iterator[str]:
    searcher: Section = config.searcher
    if getattr(searcher, "max_trials", 1) > 1 and all(
        isinstance(value, Const) for _, value in leaves(config.hyperparameters)
    ):
        yield "All trials will have the same hyperparameters: there is no range or choice among them."
    is_blind = config.trial_class is not None and config.min_validation_period.count == 0
    if is_blind and isinstance(searcher, AsyncHalvingSearcher | AdaptiveAshaSearcher):
        yield (
            f"{searcher.name} stops trials after validations, but these validate at their end only; write "
            "min_validation_period: {epochs: 1}, for example."
        )
