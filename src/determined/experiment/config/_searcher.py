"""The section `searcher`: what all searchers have in common, and the registry of those there are.

Each searcher is defined next to its search method, in `determined.experiment.search.methods`.
"""

from __future__ import annotations

import abc
import functools
import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, Union

import pydantic
from pydantic import Discriminator, Tag
from pydantic_core import CoreSchema, core_schema

from determined.experiment.config._hyperparameters import Space
from determined.experiment.config._section import Length, Natural, Positive, RuleViolation, Section, Text, key, tagged

if TYPE_CHECKING:
    from determined.experiment.search import SearchMethod, Setup

MaxTrials = Annotated[Positive, key("Number of trials in all.", 100)]
MaxConcurrentTrials = Annotated[Natural, key("Maximum number of trials that run at once; 0 = no limit.", 8)]


def _registered_searcher(value: Any, info: pydantic.ValidationInfo) -> Searcher:
    return _union().validate_python(value, context=info.context)


class Searcher(Section, abc.ABC):
    """What all searchers have in common.

    A subclass with the decorator `register` adds a searcher: its keys, its rules, and the search method in `build`.
    As the type of a field, this class stands for all registered searchers.
    """

    stops_early: ClassVar[bool] = False
    """Whether the method compares trials after validations and stops some of them."""

    name: str
    metric: Annotated[Text, key("Validation metric that ranks trials.", "validation_loss")]
    smaller_is_better: Annotated[bool, key("Whether a smaller value of the metric is better.", False)] = True
    max_length: Annotated[
        Length | None,
        key(
            "How long a trial trains if `fit` gets no length; required for a `module:Class` entrypoint. "
            "Searches with rungs use `max_time`; there, `max_length` without `max_time` is an old form of "
            "`time_metric` and `max_time`.",
            {"epochs": 10},
        ),
    ] = None
    source_trial_id: Annotated[
        Positive | None, key("Start every trial from the latest checkpoint of this trial.", 17)
    ] = None
    source_checkpoint_uuid: Annotated[
        Text | None,
        key(
            "Start every trial from this checkpoint. Excludes `source_trial_id`.",
            "2f5b0ae1-7c1e-4a3c-9d0f-3c4f6f0a1b2c",
        ),
    ] = None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: pydantic.GetCoreSchemaHandler) -> CoreSchema:
        if Section not in cls.__bases__:  # a subclass; the name of this class is not defined yet
            return handler(source)
        return core_schema.with_info_plain_validator_function(_registered_searcher)

    @abc.abstractmethod
    def build(self, setup: Setup) -> SearchMethod:
        """Return the search method of a search that has not begun."""

    @property
    def trial_length(self) -> tuple[str, int] | None:
        """The unit and the length of a trial that is never stopped; None if the program decides."""
        return None if self.max_length is None else (self.max_length.unit, self.max_length.count)

    def space_violations(self, space: Space) -> Iterator[RuleViolation]:
        """Yield what this search cannot do with the hyperparameters; the paths begin in that section."""
        yield from ()

    def violations(self) -> Iterator[RuleViolation]:
        """Yield that there are two starting points, or no length."""
        if self.source_trial_id is not None and self.source_checkpoint_uuid is not None:
            yield RuleViolation(
                ("source_checkpoint_uuid",),
                "a warm start has one source, but source_trial_id is given too",
                "Remove one of the two.",
            )
        if self.max_length is not None and self.max_length.count == 0:
            yield RuleViolation(
                ("max_length",), "a training of length 0 learns nothing", "Write max_length: {epochs: 10}."
            )


S = TypeVar("S", bound=Searcher)
_REGISTERED: dict[str, type[Searcher]] = {}


def register(searcher: type[S]) -> type[S]:
    """Add a searcher to those that a config can name; a class decorator."""
    _REGISTERED[str(searcher.model_fields["name"].default)] = searcher
    _union.cache_clear()
    return searcher


def searchers() -> dict[str, type[Searcher]]:
    """Return all searchers by name, in alphabetical order."""
    # The search methods import this package, so they are imported late; each registers its searcher.
    importlib.import_module("determined.experiment.search.methods")
    return dict(sorted(_REGISTERED.items()))


@functools.cache
def _union() -> pydantic.TypeAdapter[Searcher]:
    kinds = tuple(Annotated[kind, Tag(tagged(name))] for name, kind in searchers().items())
    any_kind: Any = Union[kinds]  # noqa: UP007  # of a tuple
    return pydantic.TypeAdapter(Annotated[any_kind, Discriminator(_kind)])


def _kind(value: Any) -> str | None:
    name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
    return tagged(name) if isinstance(name, str) else None
