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
        ({"type": "s3"}, "type 's3' needs a bucket"),
        ({"type": "s3", "bucket": ""}, "bucket=''"),
        ({"type": "azure", "container": 5}, "container=5"),
        ({"type": "gcs", "bucket": "b", "prefix": "a/../b"}, "prefix 'a/../b'"),
        ({"type": "s3", "bucket": "b", "endpoint_url": "minio:9000"}, "endpoint_url='minio:9000'"),
        ({"type": "tape"}, "type='tape'"),
        ({"host_path": "/data"}, "type=None"),
    ],
)
def test_section_that_names_no_store_is_refused(section: dict[str, Any], named: str) -> None:
    with pytest.raises(errors.StorageException, match=named):
        root(section)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("ftp://host/folder", "scheme 'ftp', which is none of az, file, gs, memory, s3"),
        ("s3://", r"'s3://' names no bucket; write it like s3://my-bucket/checkpoints"),
        ("s3://bucket?region=x", "option 'region', but only 'endpoint_url' is allowed"),
        ("gs://bucket?endpoint_url=x", "option 'endpoint_url', but none is allowed"),
        ("az://container?account_url=me", "account_url='me' is not a URL"),
        ("s3://bucket/../other", r"prefix '\.\./other'"),
        ("file://data", "absolute path after file://"),
    ],
)
def test_url_that_names_no_store_is_refused_with_the_remedy(url: str, named: str) -> None:
    with pytest.raises(errors.StorageException, match=named):
        root(url)


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(errors.StorageException, match="leave credentials out") as caught:
        root("s3://AKIA:hush@bucket")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket//a/b/", "s3://bucket/a/b"),
        ({"type": "s3", "bucket": "b", "prefix": "/a"}, "s3://b/a"),
        (
            {"type": "s3", "bucket": "b", "endpoint_url": "http://minio:9000"},
            "s3://b?endpoint_url=http://minio:9000",
        ),
        ({"type": "gcs", "bucket": "b", "prefix": None}, "gs://b"),
        (
            {"type": "azure", "container": "c", "account_url": "https://me.blob.core.windows.net"},
            "az://c?account_url=https://me.blob.core.windows.net",
        ),
        (
            {"type": "azure", "container": "c", "connection_string": "AccountName=me;AccountKey=k3y"},
            "az://c?account_url=https://me.blob.core.windows.net",
        ),
    ],
)
def test_store_is_known_by_a_url_without_secrets(location: Any, expected: str) -> None:
    store = storage.store_for(location, DEFAULT)
    assert store.location == expected
    at = storage.location_in(store, "abc")
    assert at.startswith(expected.partition("?")[0] + "/abc")
    found, uuid = storage.locate(at)
    assert (found.location, uuid) == (expected, "abc")


def test_url_of_a_folder() -> None:
    assert root("file:///data/a%20b") == pathlib.Path("/data/a b")


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
