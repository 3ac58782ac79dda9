"""Whether a validation is worth a checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

logger = logging.getLogger("determined.pytorch")

_USUAL_NAMES = ("validation_loss", "val_loss", "loss")
_OURS = ("batches", "epochs")

POLICIES = ("best", "all", "none")


class CheckpointPolicy:
    """The policies `all` and `none`, and the base of `best`."""

    def __init__(self, always: bool) -> None:
        self._always = always

    def wants(self, metrics: Mapping[str, Any]) -> bool:
        """Say whether a validation with these metrics is worth a checkpoint."""
        return self._always

    def state_dict(self) -> dict[str, Any]:
        """Return what the policy must remember over a resume."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""


class Best(CheckpointPolicy):
    """A checkpoint for each validation that is better than all before it."""

    def __init__(
        self,
        metric: str | None,
        smaller_is_better: bool,
        best_elsewhere: Callable[[], float | None] = lambda: None,
    ) -> None:
        super().__init__(always=False)
        self._metric = metric
        self._smaller_is_better = smaller_is_better
        self._best_elsewhere = best_elsewhere
        self._best: float | None = None

    def wants(self, metrics: Mapping[str, Any]) -> bool:
        """Say whether this is the best validation so far; a NaN never is."""
        if self._metric is None:
            self._metric = _only_choice(metrics)
            way = "smallest" if self._smaller_is_better else "largest"
            logger.info("The best checkpoint is the one with the %s %s.", way, self._metric)
        value = _number(self._metric, metrics)
        if math.isnan(value) or not (self._beats(value, self._best) and self._beats(value, self._best_elsewhere())):
            return False
        self._best = value
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far and the metric that it is of."""
        return {"metric": self._metric, "best": self._best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the best value, unless it is of another metric than the one asked for now."""
        if self._metric is None:
            self._metric = state.get("metric")
        if self._metric is not None and state.get("metric") == self._metric:
            self._best = state["best"]

    def _beats(self, value: float, other: float | None) -> bool:
        if other is None or math.isnan(other):
            return True
        return value < other if self._smaller_is_better else value > other


def policy_of(
    name: str,
    searcher: tuple[str, bool] | None,
    asked: tuple[str | None, bool],
    best_elsewhere: Callable[[], float | None],
) -> CheckpointPolicy:
    """Return the policy of a name; the searcher's metric goes before the one that `fit` was asked for."""
    if name not in POLICIES:
        raise ValueError(f"fit(checkpoint_policy={name!r}): the policies are {', '.join(map(repr, POLICIES))}.")
    if name != "best":
        return CheckpointPolicy(always=name == "all")
    metric, smaller_is_better = searcher or asked
    return Best(metric, smaller_is_better, best_elsewhere)


def _only_choice(metrics: Mapping[str, Any]) -> str:
    numbers = [name for name, value in metrics.items() if isinstance(value, Real) and name not in _OURS]
    if len(numbers) == 1:
        return numbers[0]
    for name in _USUAL_NAMES:
        if name in numbers:
            return name
    raise RuntimeError(
        f"checkpoint_policy='best' cannot tell which of the validation metrics {sorted(metrics)} to compare; pass "
        "fit(best_metric='...'), name it in exp_conf['searcher']['metric'], or use checkpoint_policy='all'."
    )


def _number(name: str, metrics: Mapping[str, Any]) -> float:
    value = metrics.get(name)
    if isinstance(value, bool) or not isinstance(value, Real):
        found = f"is {value!r}, not a number" if name in metrics else f"is not among {sorted(metrics)}"
        raise RuntimeError(
            f"The metric {name!r}, by which validations are compared, {found}; return it from evaluate_batch() "
            "or name another in exp_conf['searcher']['metric']."
        )
    return float(value)
