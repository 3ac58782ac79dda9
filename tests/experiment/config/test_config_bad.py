"""Configs that are wrong: each problem is named by its key and line, with the rule and what to write instead."""

from __future__ import annotations

import pathlib
import pickle
from typing import Any

import pytest
from bad_configs import ALL, SEARCHER, Bad

from determined.errors import InvalidConfig, InvalidExperimentException
from determined.experiment.config import from_map, load, parse


def refused(text: str) -> InvalidConfig:
    with pytest.raises(InvalidConfig) as caught:
        parse(text, "experiment.yaml")
    return caught.value


@pytest.mark.parametrize("bad", ALL, ids=lambda bad: f"{bad.path}-{bad.words[:30]}")
def test_problem_is_named_with_its_place_and_remedy(bad: Bad) -> None:
    error = refused(bad.whole)
    (problem,) = error.problems
    assert problem.path == bad.path
    assert problem.line == bad.line
    assert bad.words in str(problem)
    assert problem.remedy.endswith((".", "?"))
    assert str(error) == f"experiment.yaml: {problem}"


def test_all_problems_are_told_at_once_by_line() -> None:
    error = refused(
        "max_restarts: five\n"
        "workspace: vision\n"
        "hyperparameters: {a: {type: int, minval: 1, maxval: 2}}\n"
        "resources: {slots_per_trial: 3, max_slots: 2, wieght: 3}\n"
        "searcher: {name: grid, metric: 3}\n"
        "log_policies:\n- pattern: '('\n- action: 3\n"
        "data: {a: .nan}\n"
    )
    assert [(problem.path, problem.line) for problem in error.problems] == [
        ("max_restarts", 1),
        ("resources.wieght", 4),
        ("searcher.metric", 5),
        ("log_policies[0].pattern", 7),
        ("log_policies[1].action", 8),
        ("data.a", 9),
        ("project", None),
    ]
    assert str(error).splitlines() == ["experiment.yaml: 7 problems", *(f"  {problem}" for problem in error.problems)]


def test_rules_over_sections_are_checked_where_those_are_right() -> None:
    paths = {
        problem.path
        for problem in refused(
            f"workspace: a\ndebug: 3\nhyperparameters: {{a: {{type: x, val: 1}}}}\n{SEARCHER}"
        ).problems
    }
    assert paths == {"project", "debug", "hyperparameters.a.type"}


def test_rules_over_sections_that_are_wrong_are_left_out() -> None:
    error = refused("entrypoint: m:T\nsearcher: {name: single, metric: 3, max_length: 5}")
    assert [problem.path for problem in error.problems] == ["searcher.metric"]


def test_error_can_be_caught_as_what_older_programs_expect() -> None:
    error = refused("debug: 3")
    assert isinstance(error, ValueError)
    assert isinstance(error, InvalidExperimentException)


def test_error_survives_pickling() -> None:
    error = refused("debug: 3")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.problems) == (str(error), error.problems)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.yaml", None, "cannot be read (No such file or directory)"),
        ("empty.yaml", b"", "it is empty"),
        ("latin.yaml", b"name: a\ndescription: caf\xe9\n", "line 2: byte 25 is not UTF-8. Save the file as UTF-8."),
        ("wide.yaml", "name: a".encode("utf-16"), "is not UTF-8"),
        ("large.yaml", b"#" * 100_001, "it has more than 100,000 bytes"),
    ],
)
def test_file_that_cannot_be_used_is_named(
    name: str, content: bytes | None, words: str, tmp_path: pathlib.Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidConfig) as caught:
        load(tmp_path / name)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("path", "words"), [("/", "Is a directory"), ("/dev/zero", "more than 100,000 bytes"), ("\0", "null byte")]
)
def test_path_that_is_no_file_is_refused(path: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        load(path)


@pytest.mark.parametrize(
    ("value", "path", "words"),
    [
        ({1: 2}, "", "a key that is not a string: 1"),
        ({"data": {"x": {3}}}, "data.x", "it is a set"),
        ({"data": {"x": float("inf")}}, "data.x", "not a finite number"),
        ({"data": {"x": 10**5000}}, "data.x", "a number of about"),
        ({"data": {"x": "\ud800"}}, "data.x", "half a Unicode character"),
        ({"data": {"x": object}}, "data.x", "it is a type"),
    ],
)
def test_map_with_what_json_cannot_hold_is_refused(value: dict[Any, Any], path: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words) as caught:
        from_map({"searcher": {"name": "single", "metric": "loss"}} | value)
    assert [problem.path for problem in caught.value.problems] == [path]


@pytest.mark.parametrize("value", [None, 3, "searcher", ["searcher"]])
def test_what_is_no_map_is_refused(value: Any) -> None:
    with pytest.raises(InvalidConfig, match="Write at least searcher"):
        from_map(value)


def test_map_that_holds_itself_is_refused() -> None:
    endless: dict[str, Any] = {"searcher": {"name": "single", "metric": "loss"}}
    endless["data"] = endless
    with pytest.raises(InvalidConfig, match="nested more than 50 levels deep"):
        from_map(endless)
