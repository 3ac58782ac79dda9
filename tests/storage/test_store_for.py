"""The ways to name a checkpoint store."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from determined import core, errors, storage

DEFAULT = pathlib.Path("/default")


def root(location: Any) -> pathlib.Path:
    return storage.store_for(location, DEFAULT).root


def test_no_location_is_the_default() -> None:
    assert root(None) == DEFAULT


@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_path_of_a_folder(kind: type, tmp_path: pathlib.Path) -> None:
    assert root(kind(tmp_path)) == tmp_path


def test_relative_path_starts_at_the_working_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    location = root("checkpoints")
    monkeypatch.chdir("/")
    assert location == tmp_path / "checkpoints"


def test_tilde_is_the_users_home() -> None:
    assert root("~/checkpoints") == pathlib.Path.home() / "checkpoints"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, DEFAULT),
        ({"save_trial_best": 2, "save_trial_latest": 1, "save_experiment_best": 0}, DEFAULT),
        ({"type": "shared_fs", "host_path": "/data"}, "/data"),
        ({"type": "shared_fs", "host_path": "/data/", "save_trial_best": 1}, "/data"),
        ({"type": "shared_fs", "host_path": "/data", "storage_path": "team"}, "/data/team"),
        ({"type": "shared_fs", "host_path": "/data", "storage_path": "/data/team"}, "/data/team"),
        ({"type": "shared_fs", "host_path": "/data", "storage_path": None}, "/data"),
        ({"type": "directory", "container_path": "/data"}, "/data"),
    ],
)
def test_section_of_an_experiment_config(section: dict[str, Any], expected: str | pathlib.Path) -> None:
    assert root(section) == pathlib.Path(expected)


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"type": "shared_fs"}, "host_path=None"),
        ({"type": "shared_fs", "host_path": "data"}, "host_path='data'"),
        ({"type": "shared_fs", "host_path": 5}, "host_path=5"),
        ({"type": "shared_fs", "host_path": "/data", "storage_path": "../other"}, r"storage_path='\.\./other'"),
        ({"type": "shared_fs", "host_path": "/data", "storage_path": "/other"}, "storage_path='/other'"),
        ({"type": "shared_fs", "host_path": "/data", "storage_path": 5}, "storage_path=5"),
        ({"type": "directory"}, "container_path=None"),
        ({"type": "s3", "bucket": "b"}, "type='s3'"),
        ({"type": "tape"}, "type='tape'"),
        ({"host_path": "/data"}, "type=None"),
    ],
)
def test_section_that_names_no_store_is_refused(section: dict[str, Any], named: str) -> None:
    with pytest.raises(errors.StorageException, match=named):
        root(section)


@pytest.mark.parametrize("url", ["s3://bucket/prefix", "gs://bucket", "az://container", "file:///data"])
def test_url_is_refused_with_the_remedy(url: str) -> None:
    with pytest.raises(errors.StorageException, match=rf"{url}.*Pass the path of a folder"):
        root(url)


def test_empty_path_is_refused() -> None:
    with pytest.raises(errors.StorageException, match="names no folder"):
        root("")


@pytest.mark.parametrize("location", [5, b"/data", ["/data"], True])
def test_location_of_another_type_is_refused(location: Any) -> None:
    with pytest.raises(TypeError, match="pass the path of a folder"):
        root(location)


def test_core_init_takes_the_section(tmp_path: pathlib.Path) -> None:
    with core.init(
        checkpoint_storage={"type": "shared_fs", "host_path": str(tmp_path), "storage_path": "x"}
    ) as context:
        assert context.checkpoint.store.root == tmp_path / "x"
