"""What a search would do, told before it runs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from search_runs import SPACE

from determined.experiment.config import (
    AdaptiveAshaSearcher,
    AsyncHalvingSearcher,
    GridSearcher,
    Int,
    Length,
    RandomSearcher,
    SingleSearcher,
    Space,
    TpeSearcher,
)
from determined.experiment.search import Began, Create, PreviewRow, Search, preview


def cells(searcher: Any, space: Space = SPACE) -> list[tuple[str, ...]]:
    return preview(searcher, space, 7).table()


def test_brackets_and_rungs_of_the_worked_example() -> None:
    told = preview(AdaptiveAshaSearcher(metric="loss", max_trials=500, time_metric="epochs", max_time=16), SPACE, 7)
    assert told.header == ("bracket", "rung", "arrive", "go on", "end", "epochs")
    assert told.rows == (
        PreviewRow(0, 0, 364, 91, 273, 1),
        PreviewRow(0, 1, 91, 22, 69, 4),
        PreviewRow(0, 2, 22, 0, 22, 16),
        PreviewRow(1, 0, 136, 34, 102, 4),
        PreviewRow(1, 1, 34, 0, 34, 16),
    )
    assert told.trials == 500
    assert told.training == 273 * 1 + 69 * 4 + 22 * 16 + 102 * 4 + 34 * 16


def test_last_trial_goes_on_alone() -> None:
    searcher = AsyncHalvingSearcher(metric="loss", num_rungs=3, max_trials=2, time_metric="batches", max_time=1600)
    assert cells(searcher) == [
        ("0", "0", "2", "1", "1", "100"),
        ("0", "1", "1", "1", "0", "400"),
        ("0", "2", "1", "0", "1", "1,600"),
    ]


@pytest.mark.parametrize(
    ("searcher", "trials"),
    [
        (SingleSearcher(metric="loss"), "1"),
        (RandomSearcher(metric="loss", max_trials=2000), "2,000"),
        (TpeSearcher(metric="loss", max_trials=9), "9"),
        (GridSearcher(metric="loss"), "24"),
    ],
    ids=lambda value: str(value)[:6],
)
def test_trials_of_searches_without_rungs(searcher: Any, trials: str) -> None:
    assert cells(searcher) == [(trials, "-")]
    with_length = searcher.model_copy(update={"max_length": Length(epochs=5)})
    told = preview(with_length, SPACE, 7)
    assert (told.header, told.table()) == (("trials", "epochs"), [(trials, "5")])
    assert told.training == (told.trials or 0) * 5


def test_huge_grid_is_counted() -> None:
    space: Space = {name: Int(minval=0, maxval=999, count=1000) for name in "abc"}
    assert cells(GridSearcher(metric="loss", max_concurrent_trials=0), space) == [("1,000,000,000", "-")]


@pytest.mark.parametrize(
    "searcher",
    [
        RandomSearcher(metric="loss", max_trials=2000, max_concurrent_trials=0),
        AdaptiveAshaSearcher(metric="loss", max_trials=500, time_metric="epochs", max_time=16),
        TpeSearcher(metric="loss", max_trials=9),
    ],
    ids=lambda searcher: searcher.name,
)
def test_first_trials_are_those_that_the_search_creates(searcher: Any) -> None:
    created = [made.hparams for made in Search(searcher, SPACE, 7).handle(Began()) if isinstance(made, Create)]
    assert preview(searcher, SPACE, 7).first == tuple(created[:5])


def test_searching_loads_neither_torch_nor_optuna() -> None:
    program = "import sys, determined.experiment.search; print(*{'torch', 'optuna', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
