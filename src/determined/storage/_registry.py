"""From the ways to name a checkpoint store, or one of its checkpoints, to the store."""

from __future__ import annotations

import importlib
import os
import pathlib
import pkgutil
import posixpath
from collections.abc import Mapping
from typing import Any

from determined import errors, storage
from determined.storage._base import CheckpointStore, SavedCheckpoint, section_types, url_schemes
from determined.storage._local import FolderStore, open_folder

# Retention settings stand beside the location in the same mapping.
_RETENTION = {"save_experiment_best", "save_trial_best", "save_trial_latest"}


def store_for(location: str | os.PathLike[str] | Mapping[str, Any] | None, default: pathlib.Path) -> CheckpointStore:
    """Return the store at a path or URL, at a `checkpoint_storage` section, or at `default` when none is given."""
    if location is None:
        return FolderStore(default)
    if isinstance(location, Mapping):
        return _from_section(location, default)
    if not isinstance(location, str | os.PathLike):
        raise TypeError(
            f"checkpoint_storage={location!r}: pass the path of a folder, a URL, or the section of an experiment "
            "config as a dict."
        )
    text = os.fspath(location)
    if not text:
        raise errors.StorageException("checkpoint_storage='' names no folder; leave it out to use the home folder.")
    scheme, separator, _ = text.partition("://")
    if not separator:
        return FolderStore(pathlib.Path(text).expanduser().absolute())
    _import_stores()
    if scheme not in url_schemes:
        raise errors.StorageException(
            f"checkpoint_storage is a URL with the scheme {scheme!r}, which is none of "
            f"{', '.join(sorted(url_schemes))}; pass one like s3://my-bucket/checkpoints, or the path of a folder."
        )
    return url_schemes[scheme](text)


def location_in(store: CheckpointStore, checkpoint_id: str) -> str:
    """Return where a store has a checkpoint, as records name it."""
    base, options = _split(store.location)
    return posixpath.join(base, checkpoint_id) + options


def locate(location: str) -> tuple[CheckpointStore, str]:
    """Return the store and the id of the checkpoint at a location."""
    base, options = _split(location)
    parent, checkpoint_id = posixpath.split(base)
    if "://" in location and "://" not in parent:
        raise errors.CheckpointNotFoundException(
            f"{location!r} names no checkpoint; add the id of one, as `det checkpoint list` shows it."
        )
    return store_for(f"{parent}{options}" or ".", pathlib.Path()), checkpoint_id


def _split(location: str) -> tuple[str, str]:
    """Return a URL without its options, and those with their question mark; a path has none."""
    base, mark, options = location.partition("?") if "://" in location else (location, "", "")
    return base, mark + options


def open_at(location: str) -> SavedCheckpoint:
    """Return the checkpoint at a location, to read in a `with` block. A folder may have any name."""
    if "://" not in location:
        return open_folder(pathlib.Path(location))
    store, checkpoint_id = locate(location)
    return store.open(checkpoint_id)


def has_store(section_type: str) -> bool:
    """Return whether a store makes itself of `checkpoint_storage` sections with this `type`."""
    _import_stores()
    return section_type in section_types


def _from_section(section: Mapping[str, Any], default: pathlib.Path) -> CheckpointStore:
    kind = section.get("type")
    if kind is None and not set(section) - _RETENTION:
        return FolderStore(default)
    _import_stores()
    if kind not in section_types:
        raise errors.StorageException(
            f"checkpoint_storage has type={kind!r}, which is none of {', '.join(sorted(section_types))}; use 's3' with "
            "bucket, 'shared_fs' with host_path or 'directory' with container_path, or leave checkpoint_storage out to "
            "keep checkpoints in the home folder."
        )
    return section_types[kind](section)


def _import_stores() -> None:
    """Import the modules of this package, so that each store has registered itself."""
    for module in pkgutil.iter_modules(storage.__path__, f"{storage.__name__}."):
        importlib.import_module(module.name)
