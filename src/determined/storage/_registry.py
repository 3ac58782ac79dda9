"""From the ways to name a checkpoint store to the store."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from determined import errors
from determined.storage._local import FolderStore

# Retention settings stand beside the location in the same map.
_RETENTION = {"save_experiment_best", "save_trial_best", "save_trial_latest"}


def store_for(location: str | os.PathLike[str] | Mapping[str, Any] | None, default: pathlib.Path) -> FolderStore:
    """Return the store at a path, at a `checkpoint_storage` section, or at `default` when neither is given."""
    if location is None:
        return FolderStore(default)
    if isinstance(location, Mapping):
        return _from_section(location, default)
    if not isinstance(location, str | os.PathLike):
        raise TypeError(
            f"checkpoint_storage={location!r}: pass the path of a folder, or the section of an experiment config as "
            "a dict."
        )
    text = os.fspath(location)
    if not text:
        raise errors.StorageException("checkpoint_storage='' names no folder; leave it out to use the home folder.")
    if "://" in text:
        raise errors.StorageException(
            f"checkpoint_storage={text!r} is a URL; checkpoints go to folders. Pass the path of a folder."
        )
    return FolderStore(pathlib.Path(text).expanduser().absolute())


def _from_section(section: Mapping[str, Any], default: pathlib.Path) -> FolderStore:
    kind = section.get("type")
    if kind is None and not set(section) - _RETENTION:
        return FolderStore(default)
    if kind == "shared_fs":
        return FolderStore(_below(_absolute(section, "host_path"), section.get("storage_path")))
    if kind == "directory":
        return FolderStore(_absolute(section, "container_path"))
    raise errors.StorageException(
        f"checkpoint_storage has type={kind!r}; use 'shared_fs' with host_path, 'directory' with "
        "container_path, or leave checkpoint_storage out to keep checkpoints in the home folder."
    )


def _below(host_path: pathlib.Path, storage_path: Any) -> pathlib.Path:
    if not isinstance(storage_path, str | None):
        raise errors.StorageException(f"checkpoint_storage.storage_path={storage_path!r} must be a path.")
    folder = pathlib.Path(os.path.normpath(host_path / (storage_path or "")))
    if not folder.is_relative_to(host_path):
        raise errors.StorageException(
            f"checkpoint_storage.storage_path={storage_path!r} leaves host_path={str(host_path)!r}; "
            "use a path below it, such as 'checkpoints'."
        )
    return folder


def _absolute(section: Mapping[str, Any], key: str) -> pathlib.Path:
    value = section.get(key)
    if not isinstance(value, str) or not os.path.isabs(value):
        raise errors.StorageException(
            f"checkpoint_storage.{key}={value!r} must be an absolute path for type {section['type']!r}, "
            "such as /data/checkpoints."
        )
    return pathlib.Path(os.path.normpath(value))
