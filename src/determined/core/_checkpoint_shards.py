"""Several ranks fill one checkpoint: each its own folder, which the chief then puts together."""

from __future__ import annotations

import contextlib
import filecmp
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, cast

from determined import errors, storage
from determined.core._distributed import DistributedContext

T = TypeVar("T")

Files = Mapping[str, int]
"""Sizes of files by their path below a folder."""


class Attempt:
    """A block whose exception is kept until all ranks have come to its end; then all of them raise.

    Without it the others would wait for a rank that has failed.
    """

    def __init__(self, distributed: DistributedContext) -> None:
        self._distributed = distributed
        self._error: Exception | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False  # a process that is ending; the others see it go
        self._error = error
        return True

    def settle(self, result: T) -> list[T]:
        """Return the results of all ranks, or raise what went wrong on any. All ranks must call this."""
        try:
            outcomes = self._distributed.allgather((self._error and _summary(self._error), result))
        except Exception:
            if self._error is not None:  # by which the exchange failed too
                raise self._error from None
            raise
        if self._error is not None:
            raise self._error
        failures = {rank: failure for rank, (failure, _) in enumerate(outcomes) if failure}
        if failures:
            told = "; ".join(f"rank {rank} failed: {failure}" for rank, failure in failures.items())
            raise errors.PeerLostException(f"The checkpoint is not complete: {told}", failures)
        return [result for _, result in outcomes]

    def settle_for_all(self) -> None:
        """Raise on every rank what went wrong on the chief, which has acted for all. All ranks must call this."""
        own, chief = self._error, self._distributed.is_chief
        is_ours = isinstance(own, errors.DeterminedException)
        failure = self._distributed.broadcast(own if is_ours else own and _summary(own))
        if chief and own is not None:
            raise own
        if isinstance(failure, errors.DeterminedException):
            raise failure
        if failure is not None:
            raise errors.PeerLostException(f"The checkpoint is not complete: rank 0 failed: {failure}", [0])


def by_first_of_machine(distributed: DistributedContext, action: Callable[[], T]) -> T:
    """Return what the action gives on the first rank of this machine, or raise its error on all ranks of it.

    All ranks of the machine must call this.
    """
    result: T | None = None
    error: Exception | None = None
    is_first = distributed.local_rank == 0
    if is_first:
        try:
            result = action()
        except Exception as failure:
            error = failure
    is_ours = isinstance(error, errors.DeterminedException)
    result, told = distributed.broadcast_local((result, error if is_ours else error and _summary(error)))
    if is_first and error is not None:
        raise error
    if isinstance(told, errors.DeterminedException):
        raise told
    if told is not None:
        raise errors.PeerLostException(f"The first rank of this machine failed: {told}")
    return cast(T, result)


def wait_for_machine(distributed: DistributedContext) -> None:
    """Wait until all ranks of this machine are here, or one of them is gone, which the next exchange tells."""
    with contextlib.suppress(errors.PeerLostException):
        distributed.allgather_local(None)


def check_same_folder(distributed: DistributedContext, folder: str | os.PathLike[str]) -> None:
    """Refuse different folders on the ranks of one machine. All of them must call this."""
    folders = distributed.allgather_local(os.path.abspath(folder))
    if len(set(folders)) > 1:
        raise errors.MisuseError(
            f"download(ckpt_dir=...) got different folders on the ranks of one machine: {', '.join(sorted(folders))}. "
            "They share one download: pass the same folder, or download_mode=core.DownloadMode.NoSharedDownload."
        )


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class Contribution(NamedTuple):
    """What one rank adds to a checkpoint."""

    metadata: dict[str, Any]
    files: Files


def own_folder(staging: pathlib.Path, rank: int) -> pathlib.Path:
    """Return a new folder for the files of a rank, inside that of the checkpoint, which the chief has made."""
    if not staging.is_dir():
        raise errors.StorageException(
            f"Rank {rank} does not see {staging}, where the chief puts the checkpoint together: it is on another "
            "machine. Set checkpoint_storage to a folder that all machines share, such as one on NFS."
        )
    folder = _ranks_folder(staging) / str(rank)
    folder.mkdir(mode=0o700, parents=True)
    return folder


def contribution(folder: pathlib.Path, metadata: dict[str, Any]) -> Contribution:
    """Return what a rank has put into its folder, once that is on the disk."""
    with storage.errors_naming(folder):
        storage.sync_folder(folder)
        return Contribution(metadata, {name: path.lstat().st_size for name, path in _entries(folder).items()})


def put_together(staging: pathlib.Path, parts: Sequence[Contribution]) -> dict[str, Any]:
    """Move the files of all ranks into the folder of the checkpoint, and return the metadata of all."""
    metadata = _merged([part.metadata for part in parts])
    _check_places([part.files for part in parts])
    with storage.errors_naming(staging):
        owners: dict[str, int] = {}
        for rank, part in enumerate(parts):
            folder = _ranks_folder(staging) / str(rank)
            _check_arrival(folder, part.files, rank)
            _move_up(folder, staging, rank, owners)
        shutil.rmtree(_ranks_folder(staging))
    return metadata


def _ranks_folder(staging: pathlib.Path) -> pathlib.Path:
    # By the id in its name it cannot be that of a file of the checkpoint.
    return staging / f".ranks-{staging.name}"


def _entries(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Return all that is in a folder, but for folders, by its path there."""
    paths = [pathlib.Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    links = [pathlib.Path(parent, name) for parent, names, _ in os.walk(folder) for name in names]
    paths += [path for path in links if path.is_symlink()]
    return {path.relative_to(folder).as_posix(): path for path in sorted(paths)}


def _merged(per_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    owners: dict[tuple[str, ...], int] = {}
    for rank, metadata in enumerate(per_rank):
        _merge_into(merged, metadata, rank, owners, ())
    return merged


def _merge_into(
    merged: dict[str, Any],
    metadata: Mapping[str, Any],
    rank: int,
    owners: dict[tuple[str, ...], int],
    above: tuple[str, ...],
) -> None:
    """Add the metadata of a rank below the keys `above`; mappings are merged, other values must be equal."""
    for key, value in metadata.items():
        path = (*above, key)
        owners.setdefault(path, rank)
        if isinstance(value, dict) and isinstance(merged.setdefault(key, {}), dict):
            _merge_into(merged[key], value, rank, owners, path)
        elif merged.setdefault(key, value) != value:
            raise errors.MisuseError(
                f"The checkpoint metadata has {'.'.join(path)}={merged[key]!r} on rank {owners[path]}, but {value!r} "
                f"on rank {rank}; pass it on one rank, or the same on all."
            )


def _check_places(per_rank: Sequence[Files]) -> None:
    """Refuse a name that is a file on one rank and a folder on another."""
    owners = {name: rank for rank, files in reversed(list(enumerate(per_rank))) for name in files}
    for name, rank in owners.items():
        for parent in map(str, pathlib.PurePosixPath(name).parents):
            if parent in owners:
                raise errors.StorageException(
                    f"{parent!r} of the checkpoint is a file on rank {owners[parent]}, but a folder on rank {rank}; "
                    "give them different names."
                )


def _check_arrival(folder: pathlib.Path, files: Files, rank: int) -> None:
    """Refuse a folder that shows other files to the chief than to the rank that wrote them."""
    found = {name: path.lstat().st_size for name, path in _entries(folder).items()} if folder.is_dir() else {}
    if found != files:
        name = min(name for name, _ in found.items() ^ files.items())
        raise errors.StorageException(
            f"The chief sees {name!r} of rank {rank} with {found.get(name, 'no')} bytes in {folder}, where rank {rank} "
            f"wrote {files.get(name, 'no')}. Set checkpoint_storage to a folder that all machines share."
        )


def _move_up(folder: pathlib.Path, staging: pathlib.Path, rank: int, owners: dict[str, int]) -> None:
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            if not os.path.islink(path := pathlib.Path(parent, name)):
                (staging / path.relative_to(folder)).mkdir(mode=0o700, exist_ok=True)
    for name, path in _entries(folder).items():
        if name not in owners:
            path.rename(staging / name)
            owners[name] = rank
        elif not _is_same(path, staging / name):
            raise errors.StorageException(
                f"{name!r} has other contents on rank {rank} than on rank {owners[name]}; give each rank names of its "
                "own, or write the file on one of them."
            )


def _is_same(one: pathlib.Path, other: pathlib.Path) -> bool:
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and one.readlink() == other.readlink()
    return filecmp.cmp(one, other, shallow=False)
