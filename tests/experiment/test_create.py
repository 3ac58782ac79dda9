"""What `create` puts on record, and what it leaves when it fails."""

from __future__ import annotations

import pathlib

import pytest

from determined.tracking import RunState
from told import Workshop, settings


@pytest.fixture
def workshop(tmp_path: pathlib.Path) -> Workshop:
    return Workshop(tmp_path)


def test_strings_that_spell_numbers_stay_strings(workshop: Workshop) -> None:
    names = ["NaN", "Infinity", "-Infinity", "\\NaN"]
    config = settings(1, name="NaN", labels=["Infinity"], hyperparameters={"names": names})
    id = workshop.create(config)
    assert workshop.drive(id) is RunState.COMPLETED
    stored = workshop.records.experiment(id)
    assert (stored.name, list(stored.labels)) == ("NaN", ["Infinity"])
    assert workshop.records.trials(id)[0].hparams["names"] == names
