"""What the guide to searching says is so."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pydantic
import pytest
import yaml
from search_runs import through_json

from determined.experiment.config import CustomSearcher, Double, Length, Log, RandomSearcher, Searcher, Space
from determined.experiment.search import Began, Create, Exited, ExitReason, Search, Validated, preview

GUIDE = (pathlib.Path(__file__).parents[3] / "docs" / "guides" / "search.md").read_text(encoding="utf-8")
CONFIGS = [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```$", GUIDE, re.M | re.S)]
SEARCHERS: pydantic.TypeAdapter[Searcher] = pydantic.TypeAdapter(Searcher)
SPACES: pydantic.TypeAdapter[Space] = pydantic.TypeAdapter(Space)


def table(first_title: str) -> list[tuple[str, ...]]:
    """Return the rows of the table that begins with this title."""
    (text,) = re.findall(rf"^\| {first_title} \|.*\n\|[-|]+\n((?:\|.*\n)+)", GUIDE, re.M)
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in text.splitlines()]


def test_cost_of_the_first_config_is_what_its_preview_says() -> None:
    config = CONFIGS[0]
    told = preview(SEARCHERS.validate_python(config["searcher"]), SPACES.validate_python(config["hyperparameters"]), 1)
    assert table("bracket") == told.table()
    assert f"{told.training:,} epochs together" in GUIDE


def searcher_of(name: str) -> Any:
    if "random" in name:
        return RandomSearcher(metric="loss", max_trials=500, max_length=Length(epochs=16))
    mode = re.search(r"mode: (\w+)", name)
    return SEARCHERS.validate_python({**CONFIGS[0]["searcher"], "mode": mode[1] if mode else "standard"})


@pytest.mark.parametrize("row", table("searcher"), ids=lambda row: row[0])
def test_costs_of_other_searchers_are_what_their_previews_say(row: tuple[str, ...]) -> None:
    told = preview(searcher_of(row[0]), {}, 1)
    to_the_end = sum(rung.end or 0 for rung in told.rows if rung.time == 16)
    assert row[1:] == (str(told.trials), str(to_the_end), f"{told.training:,}")


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """The code folder of the guide's own method."""
    (program,) = re.findall(r"^```python title=\"neighbours.py\"\n(.*?)^```$", GUIDE, re.M | re.S)
    (tmp_path / "neighbours.py").write_text(program, encoding="utf-8")
    return tmp_path


def losses(folder: pathlib.Path, anew: bool) -> list[float]:
    searcher = SEARCHERS.validate_python(CONFIGS[1]["searcher"])
    assert isinstance(searcher, CustomSearcher)
    space: Space = {"lr": Log(minval=-4, maxval=0), "dropout": Double(minval=0, maxval=0.5)}
    search = Search(searcher, space, 1, folder)
    waiting = search.handle(Began())
    found = []
    while waiting:
        trial = waiting.pop(0)
        if isinstance(trial, Create):
            found.append(abs(trial.hparams["lr"] - 0.02))
            waiting += search.handle(Validated(trial.request_id, found[-1]))
            waiting += search.handle(Exited(trial.request_id, ExitReason.COMPLETED))
        if anew:
            search = Search.restore(searcher, space, 1, through_json(search.state()), folder)
    return found


def test_own_method_comes_near_the_optimum(folder: pathlib.Path) -> None:
    found = losses(folder, anew=False)
    assert len(found) == 30
    assert min(found[10:]) < min(found[:10])
    assert sum(found[10:]) / 20 < sum(found[:10]) / 10 / 2


@pytest.mark.thorough
def test_own_method_survives_restarts(folder: pathlib.Path) -> None:
    assert losses(folder, anew=True) == losses(folder, anew=False)
