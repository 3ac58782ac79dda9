"""Whether a validation is worth a checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from determined.core._scalars import POSITIONS

logger = logging.getLogger("determined.pytorch")

_USUAL_NAMES = ("validation_loss", "val_loss", "loss")
_LARGER_IS_BETTER = ("acc", "f1", "auc", "auroc", "precision", "recall", "score", "iou", "bleu", "reward", "r2", "dice")

POLICIES = ("best", "all", "none")


class CheckpointPolicy:
    """The policies `all` and `none`, and the base of `best`."""

    def __init__(self, always: bool, metric: str | None = None, smaller_is_better: bool | None = None) -> None:
        self._always = always
        self._metric = metric
        self._smaller_is_better = smaller_is_better

    def wants(self, metrics: Mapping[str, Any]) -> bool:
        """Say whether a validation with these metrics is worth a checkpoint."""
        if self._metric is None:
            self._metric = _offered(metrics)
        return self._always

    @property
    def metric(self) -> tuple[str, bool] | None:
        """What the best validation is the best of: (name, smaller_is_better); None while that is not known."""
        return None if self._metric is None else (self._metric, self._is_smaller_better)

    @property
    def _is_smaller_better(self) -> bool:
        return _is_better_smaller(str(self._metric)) if self._smaller_is_better is None else self._smaller_is_better

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
        smaller_is_better: bool | None,
        best_elsewhere: Callable[[], float | None] = lambda: None,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        super().__init__(False, metric, smaller_is_better)
        self._best_elsewhere = best_elsewhere
        self._say = say
        self._told = False
        self._best: float | None = None

    def wants(self, metrics: Mapping[str, Any]) -> bool:
        """Say whether this is the best validation so far; one that is not finite never is.

        Where nothing says what to compare, each validation counts as one.
        """
        if self._metric is None and not self._choose(metrics):
            return True
        value = _number(str(self._metric), metrics)
        elsewhere = self._best_elsewhere()
        if not math.isfinite(value) or not (self._beats(value, self._best) and self._beats(value, elsewhere)):
            return False
        self._best = value
        return True

    def _choose(self, metrics: Mapping[str, Any]) -> bool:
        """Choose a metric to compare, if one offers itself, and say so once."""
        self._metric = _offered(metrics)
        if self._metric is None:
            if not self._told:
                logger.warning(
                    "checkpoint_policy='best' cannot tell which of the validation metrics %s to compare, so every "
                    "validation is followed by a checkpoint; pass fit(best_metric='...', smaller_is_better=...), or "
                    "name it in exp_conf['searcher']['metric'].",
                    sorted(metrics),
                )
            self._told = True
            return False
        way = "smallest" if self._is_smaller_better else "largest"
        self._say(f"The best checkpoint is the one with the {way} {self._metric}.")
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
        return value < other if self._is_smaller_better else value > other


def policy_of(
    name: str,
    searcher: tuple[str, bool] | None,
    asked: tuple[str | None, bool | None],
    best_elsewhere: Callable[[], float | None],
    say: Callable[[str], None],
) -> CheckpointPolicy:
    """Return the policy of a name; the searcher's metric goes before the one that `fit` was asked for."""
    metric, smaller_is_better = searcher or asked
    if name != "best":
        return CheckpointPolicy(name == "all", metric, smaller_is_better)
    return Best(metric, smaller_is_better, best_elsewhere, say)


def _offered(metrics: Mapping[str, Any]) -> str | None:
    """Return the metric to compare when nobody named one: the only one, or one with a usual name."""
    numbers = [name for name, value in metrics.items() if isinstance(value, Real) and name not in POSITIONS]
    if len(numbers) == 1:
        return numbers[0]
    return next((name for name in _USUAL_NAMES if name in numbers), None)


def _is_better_smaller(metric: str) -> bool:
    """Guess from a metric's name, when nobody says it, whether smaller is better."""
    return not any(word in metric.lower() for word in _LARGER_IS_BETTER)


def _number(name: str, metrics: Mapping[str, Any]) -> float:
    value = metrics.get(name)
    if isinstance(value, bool) or not isinstance(value, Real):
        found = f"is {value!r}, not a number" if name in metrics else f"is not among {sorted(metrics)}"
        raise RuntimeError(
            f"The metric {name!r}, by which validations are compared, {found}; return it from evaluate_batch() "
            "or name another in exp_conf['searcher']['metric']."
        )
    try:
        return float(value)
    except OverflowError:  # a whole number beyond all floats
        return math.inf
