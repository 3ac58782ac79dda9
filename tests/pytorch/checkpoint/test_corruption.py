"""Checkpoints that were damaged on the disk: noticed, named, passed over, never silently used."""

from __future__ import annotations

import math
import os
import pathlib
import random
import shutil
import sqlite3
import sys
from collections.abc import Callable
from typing import Any

import pytest

import determined as det
from determined import pytorch
from determined._home import home
from determined.errors import InvalidCheckpointException
from determined.pytorch import Batch
from saving import program_in, reseal
from trials import SEED, LineTrial, assert_same, fit, latest_checkpoint, records, state_in

PAGE = 4096
FLIPS = 100


FILES = ["state_dict.pth", "load_data.json", "metadata.json", "manifest.json", "trials.py"]


def place(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Return the path of one of these files."""
    return program_in(folder) / name if name == "trials.py" else folder / name


def assert_refused(folder: pathlib.Path, name: str) -> None:
    """Check that reading the checkpoint fails for this file."""
    with pytest.raises(InvalidCheckpointException) as caught:
        pytorch.load_trial_from_checkpoint_path(folder)
    assert f"/{name} " in str(caught.value) or f"no {name}" in str(caught.value)


# Every kind of damage, to every file


def test_checkpoint_holds_just_the_files_that_are_damaged_below(checkpoint: pathlib.Path) -> None:
    assert {path.name for path in checkpoint.iterdir() if path.is_file()} == set(FILES) - {"trials.py"}
    assert (checkpoint / "state_dict.pth").stat().st_size > 4 * PAGE


@pytest.mark.parametrize("name", FILES)
def test_file_cut_off_at_any_page_is_refused(name: str, checkpoint: pathlib.Path) -> None:
    path = place(checkpoint, name)
    whole = path.read_bytes()
    for length in {*range(0, len(whole), PAGE), len(whole) - 1}:
        path.write_bytes(whole[:length])
        assert_refused(checkpoint, name)


@pytest.mark.parametrize("name", FILES)
def test_bits_flipped_anywhere_are_refused(name: str, checkpoint: pathlib.Path) -> None:
    path = place(checkpoint, name)
    whole = path.read_bytes()
    places = random.Random(name)
    for _ in range(FLIPS):
        changed = bytearray(whole)
        changed[places.randrange(len(whole))] ^= 1 << places.randrange(8)
        path.write_bytes(changed)
        assert_refused(checkpoint, name)


@pytest.mark.parametrize("name", FILES)
def test_deleted_file_is_refused(name: str, checkpoint: pathlib.Path) -> None:
    place(checkpoint, name).unlink()
    assert_refused(checkpoint, name)


@pytest.mark.parametrize("name", FILES)
def test_file_of_zeros_is_refused(name: str, checkpoint: pathlib.Path) -> None:
    place(checkpoint, name).write_bytes(bytes(place(checkpoint, name).stat().st_size))
    assert_refused(checkpoint, name)


@pytest.mark.parametrize("name", FILES)
def test_file_swapped_for_another_is_refused(name: str, checkpoint: pathlib.Path) -> None:
    other = "load_data.json" if name != "load_data.json" else "metadata.json"
    mine, its = place(checkpoint, name).read_bytes(), place(checkpoint, other).read_bytes()
    place(checkpoint, name).write_bytes(its)
    place(checkpoint, other).write_bytes(mine)
    with pytest.raises(InvalidCheckpointException, match=rf"{name}|{other}"):
        pytorch.load_trial_from_checkpoint_path(checkpoint)


def test_file_of_another_checkpoint_is_refused(checkpoint: pathlib.Path) -> None:
    fit(max_length=Batch(3))
    other = pathlib.Path(records().checkpoints()[-1].path)
    shutil.copyfile(other / "state_dict.pth", checkpoint / "state_dict.pth")
    assert_refused(checkpoint, "state_dict.pth")


def test_stray_file_of_determined_does_not_switch_the_checks_off(checkpoint: pathlib.Path) -> None:
    (checkpoint / "trial_state.pkl").touch()
    flip(checkpoint / "state_dict.pth")
    assert_refused(checkpoint, "state_dict.pth")


def flip(path: pathlib.Path) -> None:
    """Change one bit in the middle of a file."""
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 16
    path.write_bytes(contents)


@pytest.mark.parametrize("damage", [flip, os.remove, lambda path: os.truncate(path, 10)])
@pytest.mark.parametrize("name", ["state_dict.pth", "metadata.json", "manifest.json"])
def test_fit_from_the_id_of_a_damaged_checkpoint_trains_nothing(
    damage: Callable[[pathlib.Path], object], name: str
) -> None:
    fit(max_length=Batch(1))
    folder = pathlib.Path(records().checkpoints()[-1].path)
    damage(folder / name)
    with pytest.raises(InvalidCheckpointException, match=name):
        fit(max_length=Batch(2), latest_checkpoint=folder.name)
    assert len(records().checkpoints()) == 1


def test_code_need_not_be_intact_for_a_class_that_is_given(checkpoint: pathlib.Path) -> None:
    flip(program_in(checkpoint) / "trials.py")
    assert isinstance(pytorch.load_trial_from_checkpoint_path(checkpoint, LineTrial), LineTrial)


# The newest intact one

RUN = {"exp_conf": {**SEED, "name": "lines"}}


def train(batches: int, latest: str | None = "latest", init: dict[str, Any] | None = None) -> LineTrial:
    """Train with a checkpoint after each batch."""
    trial = fit(init=init or RUN, max_length=Batch(batches), latest_checkpoint=latest, checkpoint_period=Batch(1),
                checkpoint_policy="all")  # fmt: skip
    assert isinstance(trial, LineTrial)
    return trial


def folders() -> list[pathlib.Path]:
    return [pathlib.Path(one.path) for one in records().checkpoints()]


def test_latest_is_the_newest_checkpoint() -> None:
    train(3, None)
    assert train(5).seen == [(0, 3), (0, 4)]


def test_latest_without_any_checkpoint_starts_anew() -> None:
    assert train(2).seen == [(0, 0), (0, 1)]


def test_latest_of_another_experiment_is_not_taken() -> None:
    train(2, None, init={"exp_conf": {"name": "others"}})
    assert train(1).seen == [(0, 0)]


def with_rate(rate: float, **config: Any) -> dict[str, Any]:
    return {"hparams": {"lr": rate, "sizes": [4, 2]}, "exp_conf": {**RUN["exp_conf"], **config}}


def test_latest_of_a_run_with_other_hyperparameters_is_not_taken() -> None:
    train(2, None, init=with_rate(0.1))
    with pytest.warns(UserWarning, match=r"\(lr: 0\.1 there, 0\.001 here\), so training starts from the beginning"):
        trial = train(1, init=with_rate(0.001))
    assert trial.seen == [(0, 0)]


def test_latest_of_a_run_with_other_data_is_not_taken() -> None:
    train(2, None, init=with_rate(0.1, data={"path": "a"}))
    with pytest.warns(UserWarning, match=r'data\.path: "a" there, "b" here'):
        assert train(1, init=with_rate(0.1, data={"path": "b"})).seen == [(0, 0)]


def test_latest_of_another_trial_class_is_not_taken() -> None:
    class Other(LineTrial):
        pass

    train(2, None)
    with pytest.warns(UserWarning, match=r'trial_cls_spec: "trials:LineTrial" there, ".*Other" here'):
        assert fit(Other, RUN, max_length=Batch(1), latest_checkpoint="latest").seen == [(0, 0)]


def test_latest_of_another_script_is_not_taken(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "first.py"), raising=False)
    train(2, None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "second.py"))
    with pytest.warns(UserWarning, match=r'program: ".*first\.py" there, ".*second\.py" here'):
        assert train(1).seen == [(0, 0)]


def test_latest_is_the_newest_of_the_runs_that_this_one_continues() -> None:
    train(2, None, init=with_rate(0.1))
    train(3, None, init=with_rate(0.2))
    assert train(3, init=with_rate(0.1)).seen == [(0, 2)]


def test_checkpoint_that_is_named_continues_with_a_warning_of_other_hyperparameters() -> None:
    train(2, None, init=with_rate(0.1))
    with pytest.warns(UserWarning, match=r"other hyperparameters \(lr: 0\.1 there, 0\.001 here\)\. Training continues"):
        assert train(3, folders()[-1].name, init=with_rate(0.001)).seen == [(0, 2)]


@pytest.mark.parametrize("damage", [flip, os.remove, lambda path: os.truncate(path, 10)])
@pytest.mark.parametrize("name", ["state_dict.pth", "metadata.json", "manifest.json"])
def test_latest_passes_over_a_damaged_checkpoint_naming_it(damage: Callable[[pathlib.Path], object], name: str) -> None:
    train(3, None)
    damage(folders()[-1] / name)
    with pytest.warns(UserWarning, match=f"{folders()[-1].name} is passed over") as said:
        trial = train(4)
    assert trial.seen == [(0, 2), (0, 3)]
    assert name in str(said[0].message)


def test_latest_passes_over_all_that_are_damaged() -> None:
    train(4, None)
    for folder in folders()[1:]:
        flip(folder / "state_dict.pth")
    with pytest.warns(UserWarning, match="is passed over") as said:
        assert train(2).seen == [(0, 1)]
    assert [folder.name in str(one.message) for folder, one in zip(folders()[3:0:-1], said, strict=True)] == [True] * 3


def test_latest_passes_over_a_folder_that_is_gone() -> None:
    train(2, None)
    shutil.rmtree(folders()[-1])
    with pytest.warns(UserWarning, match="is passed over"):
        assert train(3).seen == [(0, 1), (0, 2)]


def test_latest_starts_anew_if_none_is_intact() -> None:
    train(2, None)
    for folder in folders():
        flip(folder / "state_dict.pth")
    with pytest.warns(UserWarning, match="is passed over"):
        assert train(2).seen == [(0, 0), (0, 1)]


def test_latest_after_damage_ends_as_a_run_without_a_break() -> None:
    train(8, None)
    whole = state_in(folders()[-1])
    shutil.rmtree(home().path)
    train(5, None)
    flip(folders()[-1] / "state_dict.pth")
    with pytest.warns(UserWarning, match="is passed over"):
        train(8)
    assert_same(state_in(folders()[-1]), whole)


def test_record_says_which_checkpoint_a_fallback_continues() -> None:
    train(3, None)
    flip(folders()[-1] / "state_dict.pth")
    intact = folders()[1].name
    with pytest.warns(UserWarning, match="is passed over"):
        train(4)
    assert (records().trial(2).source_checkpoint, records().trial(2).source_steps_completed) == (intact, 2)


# A restart by a runner


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LineTrial]:
    """Returns a function that goes on with trial 1 as a runner would, from the checkpoint it names."""

    def start(checkpoint: str, batches: int) -> LineTrial:
        config = {"name": "lines", **SEED}
        trial = det.TrialInfo(trial_id=1, experiment_id=1, trial_seed=5, hparams={}, _config=config)
        for name, value in det.ClusterInfo(trial=trial, latest_checkpoint=checkpoint).to_environment().items():
            monkeypatch.setenv(name, value)
        return train(batches, checkpoint, init={"exp_conf": None})

    return start


def test_restart_passes_over_a_damaged_checkpoint(restarted: Callable[..., LineTrial]) -> None:
    train(3, None)
    flip(folders()[-1] / "state_dict.pth")
    with pytest.warns(UserWarning, match=f"{folders()[-1].name} is passed over"):
        assert restarted(folders()[-1].name, 4).seen == [(0, 2), (0, 3)]


@pytest.mark.parametrize("gone", ["no-such-id", "../../x", "/etc", ".."])
def test_restart_from_what_is_no_checkpoint_takes_the_newest_one(
    gone: str, restarted: Callable[..., LineTrial]
) -> None:
    train(2, None)
    with pytest.warns(UserWarning, match="is passed over"):
        assert restarted(gone, 3).seen == [(0, 2)]


def test_restart_with_nothing_intact_says_so(restarted: Callable[..., LineTrial]) -> None:
    train(1, None)
    flip(folders()[-1] / "state_dict.pth")
    with (
        pytest.warns(UserWarning, match="is passed over"),
        pytest.raises(InvalidCheckpointException, match=r"Neither checkpoint .* nor one before it"),
    ):
        restarted(folders()[-1].name, 2)


# Saved, but not recorded


def forget(uuid: str) -> None:
    """Take a checkpoint off the record, as a crash between saving and recording would have left it."""
    with sqlite3.connect(home().database) as connection:
        connection.execute("DELETE FROM checkpoints WHERE uuid = ?", (uuid,))
    connection.close()


def test_latest_finds_a_checkpoint_that_was_not_recorded() -> None:
    train(3, None)
    last = latest_checkpoint()
    forget(last)
    assert train(4).seen == [(0, 3)]


def test_checkpoint_that_was_not_recorded_is_recorded_as_it_was() -> None:
    train(3, None)
    (before,) = [one for one in records().checkpoints() if one.uuid == latest_checkpoint()]
    forget(before.uuid)
    train(4)
    after = records().checkpoint(before.uuid)
    assert math.isclose(after.time, before.time, abs_tol=10)
    for field in ("trial_id", "experiment_id", "steps_completed", "path", "metadata", "resources", "size", "state"):
        assert getattr(after, field) == getattr(before, field)


def test_found_checkpoint_of_an_older_run_is_not_taken_for_the_newest() -> None:
    train(2, None)
    forget(latest_checkpoint())
    train(5, None)
    assert train(6).seen == [(0, 5)]


def test_damaged_checkpoint_that_was_not_recorded_is_not_taken() -> None:
    train(3, None)
    last = folders()[-1]
    forget(last.name)
    flip(last / "state_dict.pth")
    with pytest.warns(UserWarning, match=rf"{last.name} is not on record and is passed over: .*state_dict\.pth"):
        assert train(4).seen == [(0, 2), (0, 3)]
    assert last not in folders()


def test_checkpoint_of_another_database_is_left_alone(tmp_path: pathlib.Path) -> None:
    train(2, None)
    os.rename(home().database, tmp_path / "elsewhere.db")
    for name in ("tracking.db-wal", "tracking.db-shm"):
        (home().path / name).unlink(missing_ok=True)
    other = min((home().path / "checkpoints").iterdir())
    manifest = det.storage.Manifest.read(other)
    det.storage.Manifest(manifest.files, {**manifest.origin, "database": "/elsewhere.db"}).write(other)
    train(1, None)
    train(2)
    assert other not in folders()


@pytest.mark.parametrize("name", ["lost+found", ".hidden", "my notes", "-"])
def test_other_folders_in_the_store_do_not_disturb(name: str) -> None:
    train(1, None)
    (home().path / "checkpoints" / name).mkdir()
    assert train(2).seen == [(0, 1)]


@pytest.mark.parametrize("metadata", ["[]", "{", '{"steps_completed": "many"}', '{"steps_completed": []}', "[" * 99999])
def test_odd_metadata_of_an_unrecorded_checkpoint_does_not_disturb(metadata: str) -> None:
    train(2, None)
    last = folders()[-1]
    forget(last.name)
    (last / "metadata.json").write_text(metadata)
    reseal(last)
    with pytest.warns(UserWarning, match=f"{last.name} is not on record and is passed over"):
        assert train(3).seen == [(0, 1), (0, 2)]
