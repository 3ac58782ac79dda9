"""The section `searcher`: which hyperparameters are tried, and which trials go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from determined.experiment.config._length import Length
from determined.experiment.config._section import (
    LARGEST,
    Natural,
    Positive,
    RuleViolation,
    Section,
    Text,
    inert,
    is_finite_power,
    tagged,
)

_MaxTrials = Annotated[Positive, Field(description="How many trials to run in all.", examples=[100])]
_MaxConcurrentTrials = Annotated[
    Natural,
    Field(description="How many trials may be under way at once; 0 = any number.", examples=[8]),
]
_TimeMetric = Annotated[
    Text,
    Field(
        description="The validation metric that tells how far a trial is. A trial class reports `batches` and `epochs` "
        "by itself.",
        examples=["epochs"],
    ),
]
_MaxTime = Annotated[
    Positive, Field(description="How long a trial trains that is never stopped, by `time_metric`.", examples=[27])
]
_Divisor = Annotated[
    float,
    Field(gt=1, le=LARGEST, description="One in so many trials goes on from each rung to the next.", examples=[3]),
]
_Rungs = Annotated[int, Field(ge=1, le=100)]
_StopOnce = Annotated[Any, inert("Whether a trial that was stopped stays so; here it always does.", True)]
_StartupTrials = Annotated[
    Natural, Field(description="How many trials are drawn at random before the model chooses.", examples=[20])
]


class _Searcher(Section):
    """What all searchers have in common."""

    name: str
    metric: Annotated[
        Text, Field(description="The validation metric by which trials are compared.", examples=["validation_loss"])
    ]
    smaller_is_better: Annotated[
        bool, Field(description="Whether a smaller value of the metric is a better one.", examples=[False])
    ] = True
    max_length: Annotated[
        Length | None,
        Field(
            description="How long a trial trains when `fit` is given no length; a `module:Class` entrypoint needs it. "
            "Rung-based searches take their length from `max_time`; there, `max_length` without `max_time` is an old "
            "form of `time_metric` and `max_time`.",
            examples=[{"epochs": 10}],
        ),
    ] = None
    source_trial_id: Annotated[
        Positive | None,
        Field(description="Start every trial from the latest checkpoint of this trial.", examples=[17]),
    ] = None
    source_checkpoint_uuid: Annotated[
        Text | None,
        Field(
            description="Start every trial from this checkpoint. At most one of this and `source_trial_id`.",
            examples=["2f5b0ae1-7c1e-4a3c-9d0f-3c4f6f0a1b2c"],
        ),
    ] = None

    def breaches(self) -> Iterator[RuleViolation]:
        """Yield that there are two starting points, or no length."""
        if self.source_trial_id is not None and self.source_checkpoint_uuid is not None:
            yield RuleViolation(
                ("source_checkpoint_uuid",),
                "a warm start has one source, but source_trial_id is there too",
                "Remove one of the two.",
            )
        if self.max_length is not None and self.max_length.count == 0:
            yield RuleViolation(
                ("max_length",), "a training of length 0 learns nothing", "Write max_length: {epochs: 10}."
            )


class SingleSearcher(_Searcher):
    """One trial. Ranges among the hyperparameters are drawn from once."""

    name: Annotated[Literal["single"], Field(description="`single`", examples=["single"])] = "single"


class RandomSearcher(_Searcher):
    """`max_trials` trials, each with hyperparameters drawn at random."""

    name: Annotated[Literal["random"], Field(description="`random`", examples=["random"])] = "random"
    max_trials: _MaxTrials
    max_concurrent_trials: _MaxConcurrentTrials = 16


class GridSearcher(_Searcher):
    """One trial for every combination of values. Each int, double and log needs a `count`."""

    name: Annotated[Literal["grid"], Field(description="`grid`", examples=["grid"])] = "grid"
    max_concurrent_trials: _MaxConcurrentTrials = 16


class AsyncHalvingSearcher(_Searcher):
    """Random trials of which only the best go on from rung to rung (ASHA); the others are stopped early."""

    name: Annotated[Literal["async_halving"], Field(description="`async_halving`", examples=["async_halving"])] = (
        "async_halving"
    )
    num_rungs: Annotated[_Rungs, Field(description="How many rungs there are, the last at `max_time`.", examples=[4])]
    max_trials: _MaxTrials
    time_metric: _TimeMetric
    max_time: _MaxTime
    divisor: _Divisor = 4.0
    max_concurrent_trials: _MaxConcurrentTrials = 16
    stop_once: _StopOnce = None

    def breaches(self) -> Iterator[RuleViolation]:
        """Yield that the lowest rung is out of reach of numbers."""
        yield from super().breaches()
        if not is_finite_power(self.divisor, self.num_rungs - 1):
            yield RuleViolation(("num_rungs",), f"divisor={self.divisor} allows fewer rungs", "Write num_rungs: 4.")


class AdaptiveAshaSearcher(_Searcher):
    """Several ASHA brackets of different numbers of rungs, as it is not known how early a trial shows its worth."""

    name: Annotated[Literal["adaptive_asha"], Field(description="`adaptive_asha`", examples=["adaptive_asha"])] = (
        "adaptive_asha"
    )
    max_trials: _MaxTrials
    time_metric: _TimeMetric
    max_time: _MaxTime
    mode: Annotated[
        Literal["standard", "conservative", "aggressive"],
        Field(
            description="How early trials are stopped: `aggressive` has one bracket, which stops the earliest; "
            "`conservative` has brackets of every number of rungs.",
            examples=["aggressive"],
        ),
    ] = "standard"
    divisor: _Divisor = 4.0
    max_rungs: Annotated[_Rungs, Field(description="The most rungs that a bracket may have.", examples=[4])] = 5
    max_concurrent_trials: _MaxConcurrentTrials = 16
    stop_once: _StopOnce = None
    bracket_rungs: Annotated[
        list[_Rungs],
        Field(description="The number of rungs of each bracket, instead of what `mode` gives.", examples=[[4, 3]]),
    ] = []

    def breaches(self) -> Iterator[RuleViolation]:
        """Yield the brackets whose lowest rung is out of reach of numbers."""
        yield from super().breaches()
        for index, rungs in enumerate(self.bracket_rungs):
            if not is_finite_power(self.divisor, rungs - 1):
                yield RuleViolation(
                    ("bracket_rungs", index),
                    f"divisor={self.divisor} allows fewer rungs",
                    "Write bracket_rungs: [4, 3].",
                )


class _ModelSearcher(_Searcher):
    """What searchers have in common that learn where good hyperparameters lie."""

    max_trials: _MaxTrials
    max_concurrent_trials: _MaxConcurrentTrials = 16
    n_startup_trials: _StartupTrials = 10


class TpeSearcher(_ModelSearcher):
    """Trials where earlier ones did well, by a tree-structured Parzen estimator (Optuna)."""

    name: Annotated[Literal["tpe"], Field(description="`tpe`", examples=["tpe"])] = "tpe"


class GpSearcher(_ModelSearcher):
    """Trials where earlier ones did well, by a Gaussian process (Optuna); for few, costly trials."""

    name: Annotated[Literal["gp"], Field(description="`gp`", examples=["gp"])] = "gp"


class CustomSearcher(_Searcher):
    """A search method of your own, in Python."""

    name: Annotated[Literal["custom"], Field(description="`custom`", examples=["custom"])] = "custom"
    method: Annotated[
        str,
        Field(
            pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*$",
            description="Where the class is: `module:Class`.",
            examples=["my_search:Method"],
        ),
    ]
    max_concurrent_trials: _MaxConcurrentTrials = 16
    options: Annotated[
        dict[str, Any], Field(description="Given to the method, as they are.", examples=[{"patience": 3}])
    ] = {}


SEARCHERS = (
    SingleSearcher,
    RandomSearcher,
    GridSearcher,
    AsyncHalvingSearcher,
    AdaptiveAshaSearcher,
    TpeSearcher,
    GpSearcher,
    CustomSearcher,
)


def _kind(value: Any) -> str | None:
    if isinstance(value, SEARCHERS):
        return tagged(value.name)
    name = value.get("name") if isinstance(value, Mapping) else None
    return tagged(name) if isinstance(name, str) else None


Searcher = Annotated[
    Annotated[SingleSearcher, Tag(tagged("single"))]
    | Annotated[RandomSearcher, Tag(tagged("random"))]
    | Annotated[GridSearcher, Tag(tagged("grid"))]
    | Annotated[AsyncHalvingSearcher, Tag(tagged("async_halving"))]
    | Annotated[AdaptiveAshaSearcher, Tag(tagged("adaptive_asha"))]
    | Annotated[TpeSearcher, Tag(tagged("tpe"))]
    | Annotated[GpSearcher, Tag(tagged("gp"))]
    | Annotated[CustomSearcher, Tag(tagged("custom"))],
    Discriminator(_kind),
]
