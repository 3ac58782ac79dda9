"""The home folder."""

from __future__ import annotations

import os
import pathlib
import stat
import subprocess
import sys

import platformdirs
import pytest

import determined
from determined import errors, tensorboard, tracking
from determined._home import home

SOURCES = pathlib.Path(determined.__file__).parents[1]


def test_det_home_is_the_home_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_HOME", str(tmp_path))
    assert home().path == tmp_path


def test_tilde_in_det_home_is_the_users_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_HOME", "~/resolute")
    assert home().path == pathlib.Path.home() / "resolute"


def test_relative_det_home_starts_at_the_working_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DET_HOME", "here")
    assert home().path == tmp_path / "here"


@pytest.mark.parametrize("unset", [True, False])
def test_default_is_the_users_data_folder(unset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DET_HOME") if unset else monkeypatch.setenv("DET_HOME", "")
    assert home().path == platformdirs.user_data_path("resolute", appauthor=False)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("sqlite:///{folder}/a%20b.db", "{folder}/a b.db"),
        ("{folder}/c.db", "{folder}/c.db"),
        ("d.db", "{folder}/d.db"),
        ("~/e.db", "{user}/e.db"),
        ("postgresql://me@host/name", "postgresql://me@host/name"),
        ("", "{home}/tracking.db"),
    ],
)
def test_det_database_names_another_database(
    given: str, found: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DET_DATABASE", given.format(folder=tmp_path))
    expected = found.format(folder=tmp_path, user=pathlib.Path.home(), home=home().path)
    assert home().database == (expected if "://" in expected else pathlib.Path(expected))


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:se%40cret@host:5432/name",
        "postgresql://me:se/cr@et@host/name",
        "postgresql://me@host/name?sslmode=require&password=secret&host=x",
        "mysql://me:secret@host/name",
        "postgresql://me:secret@host:port/name",
    ],
)
def test_the_password_of_the_database_is_never_shown(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_DATABASE", url)
    here = home()
    with pytest.raises(errors.DatabaseException) as raised:
        tracking.TrackingReader().experiments()
    shown = [repr(here), here.database_name, str(raised.value), str(raised.value.__cause__)]
    assert not [text for text in shown if "secret" in text or "cr@et" in text]
    assert here.variables["DET_DATABASE"] == url


def test_asking_for_the_home_folder_creates_nothing(tmp_path: pathlib.Path) -> None:
    assert not home().path.exists()


def test_everything_is_below_the_home_folder() -> None:
    here = home()
    places = [here.database, here.checkpoints, here.tensorboard(1, 2), here.unattached_tensorboard]
    places += [here.code(1), here.runner_log(1), here.trial(1, 2), here.run(1, 2, 3).path, here.run(1, 2, 3).exit]
    assert all(place.is_relative_to(here.path) for place in places)
    assert len(set(places)) == len(places)


# Refuses the library as if it were not installed, whatever the interpreter has imported before.
WITHOUT_PLATFORMDIRS = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "platformdirs":
            raise ModuleNotFoundError("No module named 'platformdirs'", name="platformdirs")

sys.meta_path.insert(0, Blocker())
from determined._home import home
print(home().path)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="platformdirs names another folder there")
@pytest.mark.parametrize("data_home", [None, "/data/mine"])
def test_without_platformdirs_the_folder_is_the_same(data_home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DET_HOME")
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    if data_home is not None:
        monkeypatch.setenv("XDG_DATA_HOME", data_home)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PLATFORMDIRS], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == str(platformdirs.user_data_path("resolute", appauthor=False))


def test_home_folder_that_is_not_utf_8_is_refused_in_a_sentence(tmp_path: pathlib.Path) -> None:
    environment = {**os.environb, b"DET_HOME": bytes(tmp_path) + b"/\xff", b"PYTHONPATH": bytes(SOURCES)}
    command = [sys.executable, "-m", "determined.cli", "experiment", "list"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "is not UTF-8" in done.stderr
    assert "set DET_HOME to another folder" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_folders_of_an_older_home_are_closed_to_others_when_written_to(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DET_HOME", str(tmp_path))
    tmp_path.chmod(0o755)
    folder = home().tensorboard(1, 2)
    folder.mkdir(parents=True, mode=0o755)
    file = tensorboard.EventFile(folder)
    file.add_scalars("loss", [1], [1.0], [1.0])
    file.close()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.parents)}
    assert (modes["trial-2"], modes["experiment-1"], modes["tensorboard"]) == (0o700, 0o700, 0o700)
    assert modes[tmp_path.name] == 0o755  # the user has chosen it
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600]
