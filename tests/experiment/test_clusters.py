"""Where experiments run: the clusters that can be named, and what is on record of the choice."""

from __future__ import annotations

import pathlib

import pytest

from determined import errors
from determined.tracking import RunState
from told import Workshop, settings


@pytest.fixture
def workshop(tmp_path: pathlib.Path) -> Workshop:
    return Workshop(tmp_path)


def test_the_cluster_is_on_record(workshop: Workshop) -> None:
    id = workshop.create(settings(1), on="local")
    assert workshop.records.experiment(id).cluster == "local"
    assert workshop.drive(id) is RunState.COMPLETED


@pytest.mark.parametrize(("on", "slots", "message"), [
    ("moon", None, "on='moon' is nowhere to run.*local"),
    ("local:3", None, "on='local:3'.*no address"),
])  # fmt: skip
def test_a_cluster_that_is_not_there_is_refused(workshop: Workshop, on: str, slots: int | None, message: str) -> None:
    with pytest.raises(errors.InvalidExperimentException, match=message):
        workshop.create(settings(1), on=on, slots=slots)
    assert workshop.records.experiments() == []
