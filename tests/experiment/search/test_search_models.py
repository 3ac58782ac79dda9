"""Searches through Optuna: they learn, and they follow from the seed and the history alone."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_runs import ACTS, BETTER, CONCURRENCY, SEEDS, SPACE, TRIALS, Act, begin, created, play, through_json

from determined import errors
from determined.experiment.config import Categorical, Const, Double, GpSearcher, Int, Log, Space, TpeSearcher
from determined.experiment.search import Began, Create, Exited, ExitReason, Search, Shutdown, Validated

TPES = st.builds(
    TpeSearcher,
    metric=st.just("loss"),
    smaller_is_better=BETTER,
    max_trials=TRIALS,
    max_concurrent_trials=CONCURRENCY,
    n_startup_trials=st.integers(0, 5),
)
MIXED: Space = {
    "lr": Log(base=2.0, minval=-8, maxval=-2),
    "deep": {"width": Int(minval=1, maxval=9), "act": Categorical(vals=[{"name": "relu"}, ["gelu"], None])},
    "dropout": Double(minval=0.25, maxval=0.75),
    "fixed": Const(val=[1, 2]),
    "only": Categorical(vals=["one"]),
}


def tpe(**changes: Any) -> TpeSearcher:
    return TpeSearcher(**{"metric": "loss", "max_trials": 30, "max_concurrent_trials": 3, **changes})


def gp(**changes: Any) -> GpSearcher:
    settings = {"max_trials": 6, "max_concurrent_trials": 2, "n_startup_trials": 3}
    return GpSearcher(**{"metric": "loss", **settings, **changes})


def unchanged(search: Search) -> Search:
    return search


def run(
    searcher: Any,
    space: Space,
    objective: Callable[[dict[str, Any]], float],
    between: Callable[[Search], Search] = unchanged,
    seed: int = 7,
) -> list[dict[str, Any]]:
    """Return the hyperparameters of all trials, each of which validates once and ends, in the order of their start."""
    search = Search(searcher, space, seed)
    waiting = [made for made in search.handle(Began()) if isinstance(made, Create)]
    started = []
    while waiting:
        trial = waiting.pop(0)
        started.append(trial.hparams)
        search.handle(Validated(trial.request_id, objective(trial.hparams)))
        search = between(search)
        made = search.handle(Exited(trial.request_id, ExitReason.COMPLETED))
        search = between(search)
        waiting += [operation for operation in made if isinstance(operation, Create)]
    return started


def bowl(hparams: dict[str, Any]) -> float:
    return (hparams["x"] - 0.3) ** 2 + (hparams["y"] + 0.2) ** 2


BOWL: Space = {"x": Double(minval=-1, maxval=1), "y": Double(minval=-1, maxval=1)}


@settings(max_examples=10, deadline=None)
@given(TPES, SEEDS, ACTS)
def test_model_built_anew_at_every_step_gives_the_same_trials(searcher: Any, seed: int, acts: list[Act]) -> None:
    def anew(search: Search) -> Search:
        return Search.restore(searcher, SPACE, seed, through_json(search.state()))

    undisturbed = play(Search(searcher, SPACE, seed), acts)
    assert str(play(Search(searcher, SPACE, seed), acts, between=anew)) == str(undisturbed)


def test_gaussian_process_built_anew_at_every_step_gives_the_same_trials() -> None:
    def anew(search: Search) -> Search:
        return Search.restore(gp(), BOWL, 7, through_json(search.state()))

    assert run(gp(), BOWL, bowl, between=anew) == run(gp(), BOWL, bowl)


@settings(max_examples=10, deadline=None)
@given(TPES, SEEDS, ACTS)
def test_as_many_trials_as_configured(searcher: Any, seed: int, acts: list[Act]) -> None:
    played = play(Search(searcher, SPACE, seed), acts)
    reasons: dict[str, ExitReason] = {}
    for event, _ in played:
        if isinstance(event, Exited):
            reasons.setdefault(event.request_id, event.reason)
    invalid = sum(reason is ExitReason.INVALID_HP for reason in reasons.values())
    assert len(created(played)) == searcher.max_trials + invalid


@pytest.mark.parametrize("searcher", [tpe(), gp()], ids=lambda searcher: searcher.name)
def test_every_kind_of_hyperparameter(searcher: Any) -> None:
    trials = run(searcher, MIXED, lambda hparams: hparams["lr"])
    for hparams in trials:
        assert list(hparams) == ["deep", "dropout", "fixed", "lr", "only"]
        assert 2.0**-8 <= hparams["lr"] <= 2.0**-2
        assert 0.25 <= hparams["dropout"] <= 0.75
        assert hparams["deep"]["width"] in range(1, 10)
        assert hparams["deep"]["act"] in [{"name": "relu"}, ["gelu"], None]
        assert (hparams["fixed"], hparams["only"]) == ([1, 2], "one")
        types = [type(value) for value in (hparams["lr"], hparams["dropout"], hparams["deep"]["width"])]
        assert types == [float, float, int]
    assert len({str(hparams) for hparams in trials}) == len(trials)


def test_constants_alone_are_allowed() -> None:
    assert run(tpe(max_trials=3), {"a": Const(val=1)}, lambda hparams: 1.0) == [{"a": 1}] * 3


@pytest.mark.parametrize("sign", [1, -1])
def test_model_learns_where_the_good_trials_are(sign: int) -> None:
    searcher = tpe(max_trials=80, smaller_is_better=sign > 0)
    found = [bowl(hparams) for hparams in run(searcher, BOWL, lambda hparams: sign * bowl(hparams))]
    at_random, learned = found[:10], found[-10:]
    assert sum(learned) < sum(at_random) / 5


def test_gaussian_process_learns_from_few_trials() -> None:
    found = [
        bowl(hparams) for hparams in run(gp(max_trials=12, n_startup_trials=6, max_concurrent_trials=1), BOWL, bowl)
    ]
    assert min(found[-3:]) < min(found[:6]) / 5


def test_seed_decides() -> None:
    same = run(tpe(max_trials=5), BOWL, bowl, seed=1)
    assert run(tpe(max_trials=5), BOWL, bowl, seed=1) == same
    assert run(tpe(max_trials=5), BOWL, bowl, seed=2) != same


def chosen_after(searcher: Any, failing: slice) -> list[dict[str, Any]]:
    """Return what is chosen in the place of four trials that fail, of eight under way after six that went well."""
    search, trials = begin(searcher, BOWL)
    chosen = []
    for place in range(6):
        search.handle(Validated(trials[place], float(place)))
        made = search.handle(Exited(trials[place], ExitReason.COMPLETED))
        trials += [operation.request_id for operation in made if isinstance(operation, Create)]
    for trial in trials[-8:][failing]:
        (made_now,) = search.handle(Exited(trial, ExitReason.ERROR))
        assert isinstance(made_now, Create)
        chosen.append(made_now.hparams)
    return chosen


@pytest.mark.parametrize(
    "searcher",
    [tpe(n_startup_trials=4, max_concurrent_trials=8), gp(max_trials=30, max_concurrent_trials=8)],
    ids=lambda searcher: searcher.name,
)
def test_trials_under_way_are_kept_in_mind(searcher: Any) -> None:
    # The results are the same in both cases; different trials go on.
    assert chosen_after(searcher, slice(4)) != chosen_after(searcher, slice(4, 8))


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        (math.nan, ExitReason.COMPLETED),
        (math.inf, ExitReason.COMPLETED),
        (None, ExitReason.COMPLETED),
        (1.0, ExitReason.ERROR),
        (1.0, ExitReason.INVALID_HP),
        (1.0, ExitReason.CANCELED),
    ],
)
def test_trial_without_a_usable_result_is_told_as_failed(metric: float | None, reason: ExitReason) -> None:
    search, (first, *_) = begin(tpe(), BOWL)
    if metric is not None:
        search.handle(Validated(first, metric))
    search.handle(Exited(first, reason))
    assert [result for _, result in search.state()["method"]] == ["failed", None, None, None]


@pytest.mark.parametrize(("smaller_is_better", "best"), [(True, 1.0), (False, 3.0)])
def test_best_metric_of_a_trial_is_learned(smaller_is_better: bool, best: float) -> None:
    search, (first, *_) = begin(tpe(smaller_is_better=smaller_is_better), BOWL)
    for metric in [math.nan, 2.0, 1.0, math.nan, 3.0, 2.0]:
        search.handle(Validated(first, metric))
    search.handle(Exited(first, ExitReason.COMPLETED))
    assert search.state()["method"][0][1] == best


def test_all_trials_may_fail() -> None:
    search, trials = begin(tpe(max_trials=3), BOWL)
    ended = [search.handle(Exited(trial, ExitReason.ERROR)) for trial in trials]
    assert ended == [[], [], [Shutdown(failed=True)]]


def test_nothing_is_logged_and_the_level_stays(caplog: pytest.LogCaptureFixture) -> None:
    level = optuna.logging.get_verbosity()
    logging.getLogger("optuna").addHandler(caplog.handler)  # its messages do not reach the root
    try:
        run(tpe(max_trials=15), MIXED, lambda hparams: hparams["lr"])
    finally:
        logging.getLogger("optuna").removeHandler(caplog.handler)
    assert caplog.messages == []
    assert optuna.logging.get_verbosity() == level


@pytest.mark.parametrize(
    ("searcher", "missing"), [(tpe(), "optuna"), (gp(), "optuna"), (gp(), "scipy")], ids=lambda value: str(value)[:8]
)
def test_missing_library_is_named(searcher: Any, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(errors.InvalidExperimentException) as caught:
        Search(searcher, BOWL, 7)
    assert f"searcher.name='{searcher.name}' needs {missing}" in str(caught.value)
    assert "pip install 'resolute[search]'" in str(caught.value)
