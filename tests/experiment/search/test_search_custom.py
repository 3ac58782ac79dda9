"""Search methods written by users."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
from search_runs import SPACE, through_json

from determined import errors
from determined.experiment.config import CustomSearcher, RandomSearcher
from determined.experiment.search import (
    Began,
    Create,
    Exited,
    ExitReason,
    Operation,
    Search,
    Shutdown,
    Stop,
    Validated,
    load_method,
    preview,
)

Write = Callable[[str], pathlib.Path]

HEAD = "from determined.experiment.search import SearchMethod\n"

COUNTING = """
class Method(SearchMethod):
    def suggest(self):
        return {"number": self.trials.created} if self.trials.created < self.options.get("trials", 3) else None
"""

MEMORY = """
class Method(SearchMethod):
    def __init__(self, setup):
        super().__init__(setup)
        self.results = []

    def suggest(self):
        if self.trials.created == 12:
            return None
        return {"seen": len(self.results), "drawn": self.random.normal(), **self.sample()}

    def stops(self, trial):
        return trial.last > 2

    def ended(self, trial, reason):
        self.results.append([trial.number, trial.hparams["seen"], trial.best, trial.last, reason.value])

    def state(self):
        return self.results

    def load_state(self, state):
        self.results = state
"""


def custom(**changes: Any) -> CustomSearcher:
    return CustomSearcher(**{"metric": "loss", "method": "probe_search:Method", "max_concurrent_trials": 2, **changes})


@pytest.fixture
def write(tmp_path: pathlib.Path) -> Write:
    """Writes a module and returns its folder."""

    def folder(source: str) -> pathlib.Path:
        (tmp_path / "probe_search.py").write_text(HEAD + source, encoding="utf-8")
        return tmp_path

    return folder


def ids(operations: list[Operation]) -> list[str]:
    return [operation.request_id for operation in operations if isinstance(operation, Create)]


def test_method_is_kept_at_its_concurrency_until_it_has_no_more(write: Write) -> None:
    search = Search(custom(), {}, 7, write(COUNTING))
    first, second = ids(search.handle(Began()))
    (third,) = ids(search.handle(Exited(first, ExitReason.COMPLETED)))
    assert search.handle(Exited(second, ExitReason.COMPLETED)) == []
    assert search.handle(Exited(third, ExitReason.COMPLETED)) == [Shutdown()]


def test_method_gets_its_options(write: Write) -> None:
    search = Search(custom(options={"trials": 7}, max_concurrent_trials=0), {}, 7, write(COUNTING))
    assert len(search.handle(Began())) == 7


def test_ids_and_seeds_are_drawn_as_for_every_method(write: Write) -> None:
    sampling = "class Method(SearchMethod):\n    def suggest(self): return self.sample()\n"
    made = Search(custom(), SPACE, 7, write(sampling)).handle(Began())
    assert made == Search(RandomSearcher(metric="loss", max_trials=2), SPACE, 7).handle(Began())


def test_method_may_wait_for_results(write: Write) -> None:
    in_pairs = """
class Method(SearchMethod):
    def suggest(self):
        whole_pairs = self.trials.created % 2 == 0
        return None if whole_pairs and len(self.trials) else {}
"""
    search = Search(custom(max_concurrent_trials=0), {}, 7, write(in_pairs))
    first, second = ids(search.handle(Began()))
    assert search.handle(Exited(first, ExitReason.COMPLETED)) == []
    assert len(ids(search.handle(Exited(second, ExitReason.COMPLETED)))) == 2


def test_stopped_trial_makes_room(write: Write) -> None:
    search = Search(custom(), SPACE, 7, write(MEMORY))
    first, _ = ids(search.handle(Began()))
    assert search.handle(Validated(first, 1.0)) == []
    stop, create = search.handle(Validated(first, 3.0))
    assert stop == Stop(first)
    assert isinstance(create, Create)
    assert search.handle(Validated(first, 4.0)) == []
    assert search.handle(Exited(first, ExitReason.COMPLETED)) == []


def test_stopped_trial_makes_room_after_a_restart_too(write: Write) -> None:
    folder = write(MEMORY)
    search = Search(custom(), SPACE, 7, folder)
    first, second = ids(search.handle(Began()))
    search.handle(Validated(first, 3.0))
    again = Search.restore(custom(), SPACE, 7, through_json(search.state()), folder)
    assert len(ids(again.handle(Exited(second, ExitReason.COMPLETED)))) == 1
    assert again.handle(Exited(first, ExitReason.COMPLETED)) == []


def test_method_is_told_best_and_last_metric_of_each_trial(write: Write) -> None:
    search = Search(custom(), SPACE, 7, write(MEMORY))
    first, second = ids(search.handle(Began()))
    for metric in (2.0, 1.0, 1.5):
        search.handle(Validated(first, metric))
    search.handle(Exited(first, ExitReason.COMPLETED))
    search.handle(Exited(second, ExitReason.ERROR))
    assert search.state()["method"] == [[0, 0, 1.0, 1.5, "COMPLETED"], [1, 0, None, None, "ERROR"]]


def trials_of(folder: pathlib.Path, anew: bool) -> list[Create]:
    search = Search(custom(), SPACE, 7, folder)
    waiting = search.handle(Began())
    made = []
    while waiting:
        operation = waiting.pop(0)
        if not isinstance(operation, Create):
            continue
        made.append(operation)
        for event in (
            Validated(operation.request_id, len(made) % 4),
            Exited(operation.request_id, ExitReason.COMPLETED),
        ):
            if anew:
                search = Search.restore(custom(), SPACE, 7, through_json(search.state()), folder)
            waiting += search.handle(event)
    return made


def test_restart_at_every_step_changes_nothing(write: Write) -> None:
    folder = write(MEMORY)
    assert trials_of(folder, anew=True) == trials_of(folder, anew=False)


def test_module_leaves_no_trace(write: Write) -> None:
    path = list(sys.path)
    load_method("probe_search:Method", write(COUNTING))
    assert "probe_search" not in sys.modules
    assert sys.path == path


def test_progress_is_over_the_total_that_the_method_tells(write: Write) -> None:
    told = COUNTING + "    def total(self): return 10\n"
    search = Search(custom(), {}, 7, write(told))
    first, second = ids(search.handle(Began()))
    search.handle(Exited(first, ExitReason.COMPLETED))
    assert search.progress({second: 0.5}) == 0.15


def test_progress_is_over_the_trials_so_far_if_the_total_is_open(write: Write) -> None:
    search = Search(custom(), {}, 7, write(COUNTING))
    first, second = ids(search.handle(Began()))
    search.handle(Exited(first, ExitReason.COMPLETED))
    assert search.progress({second: 0.5}) == 0.5


def test_preview_tells_what_is_open(write: Write) -> None:
    told = preview(custom(), {}, 7, write(COUNTING))
    assert (told.trials, told.training, told.first) == (None, None, ({"number": 0}, {"number": 1}))


@pytest.mark.parametrize(
    ("method", "source", "message"),
    [
        ("probe_nothing:Method", "", "there is no module 'probe_nothing'"),
        ("probe_search:Methods", COUNTING, "there is no 'Methods'; search methods there: Method"),
        ("probe_search:Method", "Method = 5\n", "5 is not a search method"),
        ("probe_search:Method", "class Method: pass\n", "inherits from SearchMethod"),
        ("probe_search:Method", "class Method(SearchMethod): pass\n", "Method lacks suggest"),
        ("probe_search:Method", "1 / 0\n", "ZeroDivisionError: division by zero"),
        ("probe_search:Method", "import probe_missing\n", "No module named 'probe_missing'"),
        ("probe_search.deep:Method", "", "there is no module 'probe_search.deep'"),
    ],
)
def test_what_cannot_be_loaded_is_refused(method: str, source: str, message: str, write: Write) -> None:
    with pytest.raises(errors.InvalidExperimentException) as caught:
        Search(custom(method=method), {}, 7, write(source))
    assert f"searcher.method={method!r}" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[1]", r"\[1\]: it is not a dict"),
        ('{"lr": object}', "it is not JSON"),
        ("None", "returned None before there was any trial"),
    ],
)
def test_suggestion_that_cannot_be_used_is_refused(returned: str, message: str, write: Write) -> None:
    source = f"class Method(SearchMethod):\n    def suggest(self): return {returned}\n"
    with pytest.raises(errors.InvalidExperimentException, match=message):
        Search(custom(), {}, 7, write(source)).handle(Began())


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("object", "which is not JSON"),
        ('float("nan")', "which is not JSON"),
        ("(1, 2)", r"lists, not tuples"),
        ("{1: 2}", "strings as keys"),
    ],
)
def test_state_that_json_would_change_is_refused(returned: str, message: str, write: Write) -> None:
    source = f"{COUNTING}    def state(self): return {returned}\n"
    search = Search(custom(), {}, 7, write(source))
    with pytest.raises(errors.InvalidExperimentException, match=rf"Method\.state\(\) returned .*{message}"):
        search.state()
