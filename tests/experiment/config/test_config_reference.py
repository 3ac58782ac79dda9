"""The page of all keys is current, and what it shows works."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from determined.experiment.config import ExperimentConfig, from_map, parse

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "reference" / "config.md"
TEXT = PAGE.read_text(encoding="utf-8")
ROW = re.compile(
    r"^\| `(?P<key>\w+)` \| (?P<type>.+) \| (?P<default>.+) \| (?P<meaning>.+) \| `(?P<example>.+)` \|$", re.M
)
SMALLEST: dict[str, Any] = {"searcher": {"name": "single", "metric": "loss", "max_length": 3}}


def part(heading: str) -> str:
    """What is between a heading and the next one."""
    below = re.split(rf"^#+ {heading}$", TEXT, maxsplit=1, flags=re.M)[1]
    return re.split(r"^#+ ", below, maxsplit=1, flags=re.M)[0]


def examples(heading: str) -> list[tuple[str, Any]]:
    return [(row["key"], yaml.safe_load(row["example"])[row["key"]]) for row in ROW.finditer(part(heading))]


def test_page_is_what_the_models_say() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "determined.experiment.config"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    )
    assert done.stdout == TEXT, "run python -m determined.experiment.config > docs/reference/config.md"


def test_every_key_is_there_with_type_default_meaning_and_example() -> None:
    assert {row["key"] for row in ROW.finditer(part("All keys"))} == set(ExperimentConfig.model_fields)
    assert len(re.findall(r"^\| `", TEXT, re.M)) == len(ROW.findall(TEXT))


def test_first_example_is_a_config() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.S)
    assert parse(example).notes == ()


@pytest.mark.parametrize(("key", "value"), examples("All keys"), ids=str)
def test_example_of_a_key_is_right(key: str, value: Any) -> None:
    beside = {"workspace": {"project": "p"}, "project": {"workspace": "w"}}.get(key, {})
    from_map(SMALLEST | beside | {key: value})


@pytest.mark.parametrize(
    "section", ["resources", "optimizations", "profiling", "reproducibility", "environment", "retention_policy"]
)
def test_examples_of_a_section_are_right(section: str) -> None:
    for key, value in examples(section):
        from_map(SMALLEST | {section: {key: value}})


@pytest.mark.parametrize("name", ["random", "grid", "async_halving", "adaptive_asha", "tpe", "gp", "custom"])
def test_examples_of_a_searcher_make_one(name: str) -> None:
    common = {key: value for key, value in examples("searcher") if key != "source_trial_id"}
    from_map({"searcher": {"name": name} | common | dict(examples(f"name: {name}"))})


@pytest.mark.parametrize("kind", ["const", "int", "double", "log", "categorical"])
def test_examples_of_a_hyperparameter_make_one(kind: str) -> None:
    from_map(SMALLEST | {"hyperparameters": {"a": {"type": kind} | dict(examples(f"type: {kind}"))}})


@pytest.mark.parametrize("kind", ["shared_fs", "directory", "gcs", "s3"])
def test_examples_of_a_storage_make_one(kind: str) -> None:
    from_map(SMALLEST | {"checkpoint_storage": {"type": kind} | dict(examples(f"type: {kind}"))})


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(#([\w-]+)\)", TEXT))))
def test_links_lead_to_headings(link: str) -> None:
    assert re.search(rf"^#+ {link}$", TEXT, re.M | re.I)
