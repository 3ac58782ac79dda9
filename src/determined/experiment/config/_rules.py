"""Rules over several sections of an experiment config, and the notes on a valid one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from determined.experiment.config._hyperparameters import Categorical, Const, Int, leaves
from determined.experiment.config._section import Path, RuleViolation
from determined.experiment.config._text import spelled

if TYPE_CHECKING:
    from determined.experiment.config._experiment import ExperimentConfig

_BATCH_SIZE = "global_batch_size"
_PERIODS = ("min_validation_period", "min_checkpoint_period")
# What scripts pass to `fit` themselves.
_OF_CLASSES = (*_PERIODS, "checkpoint_policy", "perform_initial_validation", "profiling", "scheduling_unit")


def violations(config: ExperimentConfig) -> Iterator[RuleViolation]:
    """Yield the violated rules over several sections, each with the keys that it is about."""
    for rule, needs in _RULES.items():
        yield from (violation._replace(needs=frozenset(needs)) for violation in rule(config))


def _workspace_and_project(config: ExperimentConfig) -> Iterator[RuleViolation]:
    if bool(config.workspace) != bool(config.project):
        missing, given = ("project", "workspace") if config.workspace else ("workspace", "project")
        yield RuleViolation((missing,), f"{given} is given without it", "Write both, or neither.")


def _search_space(config: ExperimentConfig) -> Iterator[RuleViolation]:
    for violation in config.searcher.space_violations(config.hyperparameters):
        yield violation._replace(at=("hyperparameters", *violation.at))


def _batch_size(config: ExperimentConfig) -> Iterator[RuleViolation]:
    size = config.hyperparameters.get(_BATCH_SIZE)
    slots = config.resources.slot_range.max
    smallest = _smallest(size)
    if size is None or (smallest is not None and smallest >= slots):
        return
    at: Path = ("hyperparameters", _BATCH_SIZE)
    remedy = f"Write {_BATCH_SIZE}: {max(64, slots)}."
    if smallest is None:
        yield RuleViolation(at, "it is not an integer of at least 1, or a range or choice of such integers", remedy)
    else:
        yield RuleViolation(at, f"a batch of {smallest} records cannot be divided among {slots} slots", remedy)


def _smallest(size: object) -> int | None:
    """Return the smallest batch size that a hyperparameter can be; None if one of its values cannot be a batch size."""
    if isinstance(size, Int):
        values: list[object] = [size.minval]
    elif isinstance(size, Const):
        values = [size.val]
    else:
        values = list(size.vals) if isinstance(size, Categorical) else [None]
    sizes = [value for value in values if isinstance(value, int) and not isinstance(value, bool) and value >= 1]
    return min(sizes) if len(sizes) == len(values) else None


def _length_of_classes(config: ExperimentConfig) -> Iterator[RuleViolation]:
    if config.trial_class is None or config.searcher.max_length is not None:
        return
    time_metric = getattr(config.searcher, "time_metric", None)
    if time_metric in ("batches", "epochs"):
        return
    counts = "" if time_metric is None else f", and time_metric={time_metric!r} counts neither batches nor epochs"
    yield RuleViolation(
        ("searcher", "max_length"),
        f"entrypoint {config.trial_class} is a trial class, which needs a training length{counts}",
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
    f"records are counted in batches of hyperparameters.{_BATCH_SIZE}, which is missing",
    f"Write {_BATCH_SIZE}: 64 in hyperparameters, or count {{batches: 1000}}.",
)

_RULES: dict[Callable[[ExperimentConfig], Iterator[RuleViolation]], tuple[str, ...]] = {
    _workspace_and_project: ("workspace", "project"),
    _search_space: ("searcher", "hyperparameters"),
    _batch_size: ("hyperparameters", "resources"),
    _length_of_classes: ("entrypoint", "searcher"),
    _records: ("entrypoint", "searcher", "hyperparameters", *_PERIODS),
}


def notes(config: ExperimentConfig) -> Iterator[str]:
    """Yield what people should know about a valid config."""
    if keys := [spelled(path) for path in config.ignored_keys()]:
        yield f"These keys have no effect here: {', '.join(keys)}."
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
            f"These keys apply only to entrypoints of the form module:Class: {', '.join(changed)}. A script passes "
            "such settings to trainer.fit()."
        )


def _is_changed(config: ExperimentConfig, name: str) -> bool:
    default = type(config).model_fields[name].get_default(call_default_factory=True)
    return bool(getattr(config, name) != default)


def _notes_on_search(config: ExperimentConfig) -> Iterator[str]:
    searcher = config.searcher
    if getattr(searcher, "max_trials", 1) > 1 and all(
        isinstance(value, Const) for _, value in leaves(config.hyperparameters)
    ):
        yield "All trials will have the same hyperparameters: there is no range or choice among them."
    is_blind = config.trial_class is not None and config.min_validation_period.count == 0
    if is_blind and searcher.stops_early:
        yield (
            f"{searcher.name} stops trials after validations, but these validate only at their end; write "
            "min_validation_period: {epochs: 1}, for example."
        )
