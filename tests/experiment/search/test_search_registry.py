"""A new search method is one new file: its section of the config, its rules, its trials, its rungs and its preview."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest

import determined

METHOD = '''
"""The hyperparameters with the smallest values first."""

from typing import Annotated, Literal

from determined.experiment.config._searcher import MaxTrials, Searcher, register
from determined.experiment.config._section import Positive, RuleViolation, key
from determined.experiment.search._method import PreviewRow, Rung, SearchMethod


@register
class LadderSearcher(Searcher):
    """One trial after the other, each one step further."""

    stops_early = True

    name: Literal["ladder"] = "ladder"
    max_trials: MaxTrials
    step: Annotated[Positive, key("Distance of two trials.", 5)] = 2

    def build(self, setup):
        return Ladder(setup)

    def violations(self):
        yield from super().violations()
        if self.step > self.max_trials:
            yield RuleViolation(("step",), f"it is more than max_trials={self.max_trials}", "Write step: 2.")

    def space_violations(self, space):
        if "depth" not in space:
            yield RuleViolation(("depth",), "a ladder needs it", "Write depth: 3.")


class Ladder(SearchMethod):
    def __init__(self, setup):
        super().__init__(setup)
        self.searcher = setup.searcher

    def suggest(self):
        number = self.trials.created
        return {"depth": number * self.searcher.step} if number < self.total() else None

    def total(self):
        return self.searcher.max_trials

    def rungs(self):
        return (Rung(0, 0, 1, self.trials.closed, tuple(trial.request_id for trial in self.trials)),)

    def planned_rungs(self):
        return (PreviewRow(0, 0, self.total(), 0, self.total(), 7),)
'''

PROGRAM = """
import json

from determined import errors
from determined.experiment import config
from determined.experiment.config import _reference
from determined.experiment.search import Began, Search, preview

SECTION = {"name": "ladder", "metric": "loss", "max_trials": 3}


def problems(section, hyperparameters):
    try:
        config.from_map({"searcher": section, "hyperparameters": hyperparameters})
    except errors.InvalidConfig as error:
        return [str(problem) for problem in error.problems]


made = config.from_map({"searcher": SECTION, "hyperparameters": {"depth": 1}, "entrypoint": "true"})
search = Search(made.searcher, made.hyperparameters, 7)
created = search.handle(Began())
again = Search.restore(made.searcher, made.hyperparameters, 7, json.loads(json.dumps(search.state())))
shown = preview(made.searcher, made.hyperparameters, 7)
page = _reference.reference()
print(json.dumps({
    "section": made.to_dict()["searcher"],
    "is read back": config.from_map(made.to_dict()) == made,
    "trials": [operation.hparams["depth"] for operation in created],
    "restored": again.rungs() == search.rungs(),
    "climbing": len(search.rungs()[0].climbing),
    "preview": [shown.header, shown.table()],
    "violated": problems(SECTION | {"step": 4}, {"depth": 1}),
    "misfit": problems(SECTION, {}),
    "misspelled": problems(SECTION | {"name": "lader"}, {"depth": 1}),
    "reference": [line for line in page.splitlines() if "ladder" in line or "Distance" in line],
}))
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program prints in a copy of the sources with one more file."""
    folder = tmp_path_factory.mktemp("sources")
    ignored = shutil.ignore_patterns("__pycache__")
    sources = shutil.copytree(pathlib.Path(determined.__file__).parent, folder / "determined", ignore=ignored)
    (sources / "experiment" / "search" / "methods" / "ladder.py").write_text(METHOD, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def test_config_has_its_section(shown: dict[str, Any]) -> None:
    expected = {"name": "ladder", "metric": "loss", "smaller_is_better": True, "max_trials": 3, "step": 2}
    assert {key: value for key, value in shown["section"].items() if value is not None} == expected
    assert shown["is read back"]


def test_search_runs_it_and_restores_it(shown: dict[str, Any]) -> None:
    assert shown["trials"] == [0, 2, 4]
    assert shown["climbing"] == 3
    assert shown["restored"]


def test_preview_shows_its_rungs(shown: dict[str, Any]) -> None:
    header = ["bracket", "rung", "arrive", "go on", "end", "length"]
    assert shown["preview"] == [header, [["0", "0", "3", "0", "3", "7"]]]


def test_config_check_applies_its_rules(shown: dict[str, Any]) -> None:
    assert shown["violated"] == ["searcher.step = 4: it is more than max_trials=3. Write step: 2."]
    assert shown["misfit"] == ["hyperparameters.depth: a ladder needs it. Write depth: 3."]
    (misspelled,) = shown["misspelled"]
    assert "Did you mean ladder?" in misspelled


def test_config_reference_lists_it(shown: dict[str, Any]) -> None:
    row = "| `step` | integer, at least 1 | `2` | Distance of two trials. | `step: 5` |"
    assert shown["reference"] == ["### name: ladder", row]
