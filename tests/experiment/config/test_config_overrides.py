"""Values that are replaced from the command line: key.path=value."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from determined.errors import InvalidConfig
from determined.experiment.config import ExperimentConfig, load, parse

TEXT = """
name: a
hyperparameters: {lr: 0.1, net: {width: 8}}
searcher: {name: random, metric: loss, max_trials: 3}
"""


def overridden(*overrides: str) -> ExperimentConfig:
    return parse(TEXT, overrides=overrides)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("name=b", ("name",), "b"),
        ("name=a=b", ("name",), "a=b"),
        ("searcher.max_trials=20", ("searcher", "max_trials"), 20),
        (" searcher . max_trials =20", ("searcher", "max_trials"), 20),
        ("hyperparameters.lr=1e-3", ("hyperparameters", "lr", "val"), 0.001),
        (
            "hyperparameters.net.width={type: int, minval: 1, maxval: 9}",
            ("hyperparameters", "net", "width", "maxval"),
            9,
        ),
        ("hyperparameters.new.deep=[1, x]", ("hyperparameters", "new", "deep", "val"), [1, "x"]),
        ("data.secrets.token=abc", ("data", "secrets", "token"), "abc"),
        ("labels=[a, b]", ("labels",), ["a", "b"]),
        ("max_restarts=", ("max_restarts",), 5),
        ("searcher={name: single, metric: x}", ("searcher", "metric"), "x"),
    ],
)
def test_value_is_read_as_yaml_and_put_at_its_path(override: str, path: tuple[str, ...], value: Any) -> None:
    found: Any = overridden(override).to_dict()
    for key in path:
        found = found[key]
    assert found == value


def test_last_override_of_a_key_wins() -> None:
    assert overridden("name=b", "name=c").name == "c"


def test_rest_stays() -> None:
    assert overridden("hyperparameters.net.width=9").to_dict()["hyperparameters"]["lr"]["val"] == 0.1


@pytest.mark.parametrize(
    ("override", "path", "words"),
    [
        ("name", "", '"name": an override is of the form key=value. Write, for example, searcher.max_trials=20.'),
        ("=3", "", '"=3": an override is of the form key=value'),
        ("a..b=3", "", "an override is of the form key=value"),
        ("name=[", "name", "it is not YAML"),
        ("name.first=a", "name.first", "there is no mapping to put it into. Override the value around it."),
        ("searcher.max_trials=many", "searcher.max_trials", '"many": it is not an integer'),
        ("searcher.max_trails=3", "searcher.max_trails", "Did you mean max_trials?"),
        ("data.x=.nan", "data.x", "not a finite number"),
        ("data={a: 1, a: 2}", "data.a", "the key is given twice"),
    ],
)
def test_bad_override_is_named_without_a_line(override: str, path: str, words: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        overridden(override)
    (problem,) = caught.value.problems
    assert (problem.path, problem.line) == (path, None)
    assert words in str(problem)


def test_problems_of_text_and_overrides_are_told_together() -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse(f"{TEXT}debug: 3", overrides=["max_restarts=x", "nonsense"])
    assert [(problem.path, problem.line) for problem in caught.value.problems] == [
        ("debug", 5),
        ("", None),
        ("max_restarts", None),
    ]


def test_file_takes_overrides_too(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.yaml").write_text(TEXT)
    assert load(tmp_path / "a.yaml", ["name=b"]).name == "b"


def test_overrides_can_make_up_an_empty_config() -> None:
    assert parse("", overrides=["searcher.name=single", "searcher.metric=a"]).searcher.metric == "a"
