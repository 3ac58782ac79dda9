"""What `create` puts on record, and what it leaves when it fails."""

from __future__ import annotations

import errno
import os
import pathlib
from typing import Any

import pytest

from determined import errors
from determined._home import home
from determined.tracking import RunState, TrackingReader
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


@pytest.mark.parametrize("failure", [OSError(errno.EIO, "broken"), KeyboardInterrupt()])
def test_an_experiment_whose_program_cannot_be_put_in_place_is_not_on_record(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def rename(source: pathlib.Path, target: pathlib.Path, _rename: Any = os.rename) -> None:
        if target.parent.parent == workshop.home.experiments and target.parent.name.isdigit():
            raise failure
        _rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises((errors.StorageException, KeyboardInterrupt)):
            workshop.create(settings(1))
    assert workshop.records.experiments() == []
    assert workshop.drive(workshop.create(settings(1))) is RunState.COMPLETED


@pytest.mark.usefixtures("on_a_file")
def test_what_an_experiment_of_a_lost_database_left_is_set_aside(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    lost = workshop.create(settings(1))
    log = workshop.home.runner_log(lost)
    log.write_text("of the lost one")
    workshop.home.database.unlink()
    id = workshop.create(settings(2))
    assert id == lost
    assert not log.exists()
    (aside,) = workshop.home.experiments.glob(f"{id}.*")
    assert (aside / log.name).read_text() == "of the lost one"
    assert str(aside) in caplog.text
    assert workshop.drive(id) is RunState.COMPLETED


def test_the_experiments_of_two_databases_do_not_share_a_home_folder(
    workshop: Workshop, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DET_DATABASE", raising=False)
    in_the_folder = home()
    workshop.home = in_the_folder
    workshop.create(settings(1))
    monkeypatch.setenv("DET_DATABASE", str(tmp_path / "other.db"))
    workshop.home = home()
    with pytest.raises(errors.StorageException, match=r"tracking\.db.*set DET_HOME to another folder"):
        workshop.create(settings(1))
    assert in_the_folder.code(1).is_dir()
    assert TrackingReader().experiments() == []
