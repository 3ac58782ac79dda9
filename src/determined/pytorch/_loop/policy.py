"""Whether a validation is worth a checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from determined.core.metrics import POSITION_METRICS
from determined.pytorch._context import PyTorchTrialContext

if TYPE_CHECKING:
    from determined.pytorch._loop.run import FitSettings

logger = logging.getLogger("determined.pytorch")

_USUAL_NAMES = ("validation_loss", "val_loss", "loss")
_SMALLER_WORDS = """
    loss losses logloss error errors err cost regret perplexity ppl entropy crossentropy xent ce bce nll mse rmse mae
    mape smape msle rmsle brier ece distance divergence kl kld wer cer ter eer fid kid lpips epe bpc bpb false fpr fnr
    chamfer hausdorff emd deviation residual misclassification
"""
_LARGER_WORDS = """
    acc accuracy accuracies correct precision recall sensitivity specificity f1 f2 fbeta fscore auc auroc auprc roc
    rocauc ap map iou miou jaccard dice psnr ssim snr sdr ndcg dcg mrr hit hits top bleu rouge meteor cider spice em r2
    correlation pearson spearman kendall kappa mcc tpr tnr similarity likelihood elbo reward rewards return returns
    score scores success win winrate
"""
_SMALLER_IS_BETTER = frozenset(_SMALLER_WORDS.split())
_LARGER_IS_BETTER = frozenset(_LARGER_WORDS.split())
_NEGATIONS = frozenset(("neg", "negative", "minus", "inv", "inverse", "non", "not"))

POLICIES = ("best", "all", "none")


@dataclasses.dataclass
class CheckpointPolicy:
    """The policies `all` and `none`, and the base of `best`."""

    always: bool
    metric_name: str | None
    """The metric to compare; the first validation chooses it if the user named none."""
    smaller_is_better: bool | None
    """What the user set; if None, `default` applies, and then the words of the metric's name."""
    default: bool | None

    def __post_init__(self) -> None:
        self._is_named = self.metric_name is not None

    def wants(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether a validation with these metrics is worth a checkpoint.

        Raises `RuntimeError` if the metric that the user named is not a number.
        """
        if self.metric_name is None:
            self.metric_name = _default_metric(metrics)
        elif self._is_named and self.metric_name in metrics:
            _number(self.metric_name, metrics)
        return self.always

    @property
    def metric(self) -> tuple[str, bool] | None:
        """What retention may rank checkpoints by: (name, smaller_is_better); None unless the user set the direction.

        A direction that is guessed from a name may decide what to save, but not what to delete.
        """
        if self.metric_name is None or self.smaller_is_better is None:
            return None
        return self.metric_name, self.smaller_is_better

    @property
    def _is_smaller_better(self) -> bool | None:
        """Whether smaller is better; None if it is not known."""
        known = self.default if self.smaller_is_better is None else self.smaller_is_better
        return guess_smaller_is_better(str(self.metric_name)) if known is None else known

    def state_dict(self) -> dict[str, Any]:
        """Return the state to restore after a resume."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


@dataclasses.dataclass
class Best(CheckpointPolicy):
    """A checkpoint for each validation that is better than all before it."""

    best_elsewhere: Callable[[], float | None]
    say: Callable[[str], None]
    warns: bool
    best: float | None = None

    def wants(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether this is the best validation so far; False if the metric is not finite.

        Returns True if neither the config nor the metric names tell what to compare and in which direction.
        """
        if self.metric_name is None and not self._choose(metrics):
            self._warn(f"which of the validation metrics {_own(metrics)} to compare")
            return True
        if not self._is_named and not _is_number(metrics.get(str(self.metric_name))):
            return False
        value = _number(str(self.metric_name), metrics)
        if self._is_smaller_better is None:
            self._warn(f"whether a smaller or a larger {self.metric_name!r} is better")
            return True
        elsewhere = self.best_elsewhere()
        if not math.isfinite(value) or not (self._beats(value, self.best) and self._beats(value, elsewhere)):
            return False
        self.best = value
        return True

    def _choose(self, metrics: Mapping[str, Any]) -> bool:
        """Choose a metric to compare, if there is an obvious one, and show which."""
        self.metric_name = _default_metric(metrics)
        if self.metric_name is not None and self._is_smaller_better is not None:
            way = "smallest" if self._is_smaller_better else "largest"
            self.say(f"The best checkpoint is the one with the {way} {self.metric_name}.")
        return self.metric_name is not None

    def _warn(self, unknown: str) -> None:
        """Warn once that the best validation is unknown."""
        if self.warns:
            logger.warning(
                "checkpoint_policy='best' does not know %s, so every validation is followed by a checkpoint; pass "
                "fit(best_metric='...', smaller_is_better=...), or set metric and smaller_is_better in "
                "exp_conf['searcher'].",
                unknown,
            )
        self.warns = False

    def _beats(self, value: float, other: float | None) -> bool:
        if other is None or math.isnan(other):
            return True
        return value < other if self._is_smaller_better else value > other

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric_name, "best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best value, unless it belongs to another metric."""
        if self.metric_name is None:
            self.metric_name = state.get("metric")
        if self.metric_name is not None and state.get("metric") == self.metric_name:
            self.best = state["best"]


def policy_of(settings: FitSettings, context: PyTorchTrialContext, say: Callable[[str], None]) -> CheckpointPolicy:
    """Return the policy of a run; `say` shows a line.

    The config's `searcher` takes precedence over the arguments of `fit`; its metric is better smaller by default.
    """
    searcher = (context.config_if_any or {}).get("searcher")
    best_metric, smaller_is_better, default = settings.best_metric, settings.smaller_is_better, None
    if isinstance(searcher, Mapping) and searcher.get("metric"):
        best_metric, default = str(searcher["metric"]), True
        given = searcher.get("smaller_is_better", smaller_is_better)
        smaller_is_better = None if given is None else bool(given)
    if settings.checkpoint_policy != "best":
        return CheckpointPolicy(settings.checkpoint_policy == "all", best_metric, smaller_is_better, default)
    services = context.services
    # In an experiment of many trials, best means best of all of them.
    best_elsewhere = services.train.get_experiment_best_validation if services.info else lambda: None
    return Best(False, best_metric, smaller_is_better, default, best_elsewhere, say, services.distributed.is_chief)


def _default_metric(metrics: Mapping[str, Any]) -> str | None:
    """Return the metric to compare if the user named none: the only one, or one with a usual name."""
    numbers = [name for name, value in metrics.items() if _is_number(value) and name not in POSITION_METRICS]
    if len(numbers) == 1:
        return numbers[0]
    return next((name for name in _USUAL_NAMES if name in numbers), None)


def guess_smaller_is_better(metric: str) -> bool | None:
    """Return whether the words of a metric's name mean that smaller is better; None if they mean neither.

    Words such as `loss` win over words such as `score`.
    """
    words = _words(metric)
    if words & _NEGATIONS:
        return None
    if words & _SMALLER_IS_BETTER:
        return True
    return False if words & _LARGER_IS_BETTER else None


def _words(name: str) -> set[str]:
    """Return the words of a name in lower case: `valTop5-mAP50` has `val`, `top5`, `top`, `map50`, `map` among them."""
    parts = re.findall(r"[^\W_]+", name)
    parts += [word for part in parts for word in re.findall(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*", part)]
    lower = {part.lower() for part in parts}
    return lower | {part.rstrip("0123456789") for part in lower}


def _own(metrics: Mapping[str, Any]) -> list[str]:
    """Return the names of the trial's own metrics."""
    return sorted(metrics.keys() - set(POSITION_METRICS))


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _number(name: str, metrics: Mapping[str, Any]) -> float:
    value = metrics.get(name)
    if not _is_number(value):
        found = f"is {reprlib.repr(value)}, not a number" if name in metrics else f"is not among {_own(metrics)}"
        raise RuntimeError(
            f"The metric {name!r}, by which validations are compared, {found}; return it from evaluate_batch() "
            "or name another in exp_conf['searcher']['metric']."
        )
    try:
        return float(value)  # type: ignore[arg-type]  # a number
    except OverflowError:  # an integer too large for a float
        return math.inf
