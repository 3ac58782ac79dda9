"""Packages that Determined brought along: an extra installs them, and errors of programs name it."""

from __future__ import annotations

import pathlib
import tomllib

import pytest

from determined import core, errors, pytorch
from determined._packages import explained
from saving import change_file, program_in, save

COMMAND = "pip install 'resolute[determined]'"
EXTRA = {"boto3", "google-cloud-storage", "matplotlib", "requests", "ruamel.yaml", "tabulate", "termcolor"}


def test_extra_installs_them() -> None:
    pyproject = pathlib.Path(__file__).parents[1] / "pyproject.toml"
    extra = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]["determined"]
    assert {requirement.partition(">=")[0] for requirement in extra} == EXTRA


@pytest.mark.parametrize("module", ["boto3", "google", "google.cloud", "matplotlib.pyplot", "ruamel", "termcolor"])
def test_message_about_one_of_them_names_the_command(module: str) -> None:
    assert COMMAND in explained(f"ModuleNotFoundError: No module named '{module}'")


@pytest.mark.parametrize("module", ["requests_cache", "goo", "my_own"])
def test_message_about_another_module_stays_as_it_is(module: str) -> None:
    message = f"ModuleNotFoundError: No module named '{module}'"
    assert explained(message) == message


def test_import_that_fails_within_a_run_gets_a_note() -> None:
    with pytest.raises(ModuleNotFoundError) as caught, core.init():
        import boto3.not_there  # noqa: F401
    (note,) = caught.value.__notes__
    assert COMMAND in note


def test_trial_of_a_checkpoint_whose_import_fails_names_the_command() -> None:
    folder = save()
    change_file(program_in(folder) / "trials.py", "import boto3.not_there")
    with pytest.raises(errors.InvalidCheckpointException, match=r"resolute\[determined\]"):
        pytorch.load_trial_from_checkpoint_path(folder)
