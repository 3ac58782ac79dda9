"""The guide to experiments and the way from a cluster: their configs are accepted, and their commands exist."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
import yaml

from det_command import root
from determined.experiment import config as configs

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "guides" / "experiments.md", DOCS / "from-determined.md"]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
BASE = {
    "entrypoint": "model_def:MyTrial",
    "hyperparameters": {"lr": {"type": "double", "minval": 0.1, "maxval": 1.0}},
    "searcher": {"name": "random", "metric": "loss", "max_trials": 3, "max_length": {"epochs": 1}},
}
# Services of a cluster, named as such.
NOT_THERE = {"user", "workspace", "project", "template", "notebook", "shell", "cmd"}

SNIPPETS = re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.M | re.S)
COMMANDS = sorted(set(re.findall(r"(?:`|^\$ )det ([a-z][^`\n]*)", TEXT, re.M)) - NOT_THERE)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_config_of_the_guide_is_accepted(snippet: str) -> None:
    assert configs.from_map({**BASE, **yaml.safe_load(snippet)}).notes == ()


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_the_guide_exists(command: str) -> None:
    found: Any = root()
    words = command.split()
    while words and words[0] in getattr(found, "commands", {}):
        found = found.commands[words.pop(0)]
    assert not words or not hasattr(found, "commands"), f"there is no command {words[0]!r}"
    options = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("-")} <= options


def test_overrides_of_the_guide_are_accepted() -> None:
    overrides = re.findall(r"--config (\S+=[^\s`]+)", TEXT)
    assert len(overrides) >= 2
    for override in overrides:
        assert configs.from_map(BASE, [override]) != configs.from_map(BASE)
