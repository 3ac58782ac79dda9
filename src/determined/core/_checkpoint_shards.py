"""Several ranks write one checkpoint: each fills a folder of its own, and the chief merges them."""

from __future__ import annotations

import contextlib
import filecmp
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from determined import errors, storage
from determined.core.distributed import DistributedContext

T = TypeVar("T")


def on_all_ranks(distributed: DistributedContext, action: Callable[[], T]) -> list[T]:
    """Return what `action` returns on each rank, or raise if it fails on any. All ranks must call this.

    A rank that fails still takes part in the exchange: otherwise the others would wait for it.
    """
    result, error = _outcome(action)
    try:
        outcomes = distributed.allgather((error and _summary(error), result))
    except Exception:
        if error is not None:  # the cause of the failed exchange
            raise error from None
        raise
    if error is not None:
        raise error
    failures = {rank: failure for rank, (failure, _) in enumerate(outcomes) if failure}
    if failures:
        listed = "; ".join(f"rank {rank} failed: {failure}" for rank, failure in failures.items())
        raise errors.PeerLostException(f"The checkpoint is not complete: {listed}", failures)
    return [cast(T, result) for _, result in outcomes]


def on_first_rank(distributed: DistributedContext, action: Callable[[], T], *, of_machine: bool = False) -> T:
    """Return what `action` returns on the chief, or raise its error, on all ranks. All ranks must call this.

    With `of_machine`, the first rank of this machine acts, for all ranks of the machine.
    """
    is_first, broadcast = distributed.is_chief, distributed.broadcast
    who, ranks = "The checkpoint is not complete: rank 0", [0]
    if of_machine:
        is_first, broadcast = distributed.local_rank == 0, distributed.broadcast_local
        who, ranks = "The first rank of this machine", []
    result, error = _outcome(action) if is_first else (None, None)
    shared = error
    if error is not None and not isinstance(error, errors.DeterminedException):  # it may not be picklable
        shared = errors.PeerLostException(f"{who} failed: {_summary(error)}", ranks)
    result, shared = broadcast((result, shared))
    if shared is not None:
        raise error or shared
    return cast(T, result)


def _outcome(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        return None, error


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def wait_for_machine(distributed: DistributedContext) -> None:
    """Wait until all ranks of this machine are here, or one of them is lost, which the next exchange reports."""
    with contextlib.suppress(errors.PeerLostException):
        distributed.allgather_local(None)


class Shard(NamedTuple):
    """What one rank adds to a checkpoint."""

    metadata: dict[str, Any]
    files: dict[str, int]
    """Sizes of files by their path below the rank's folder."""


def make_folder(staging: pathlib.Path, rank: int) -> pathlib.Path:
    """Return a new folder for the files of a rank, inside the checkpoint's, which the chief has made."""
    if not staging.is_dir():
        raise errors.StorageException(
            f"Rank {rank} does not see {staging}, where the chief puts the checkpoint together: it is on another "
            "machine. Set checkpoint_storage to a folder that all machines share, such as one on NFS; if it is a URL, "
            "set DET_HOME to such a folder."
        )
    folder = _shards_folder(staging) / str(rank)
    folder.mkdir(mode=0o700, parents=True)
    return folder


def finished(folder: pathlib.Path, metadata: dict[str, Any]) -> Shard:
    """Return what a rank has put into its folder, once that is on the disk."""
    with storage.errors_naming(folder):
        storage.sync_folder(folder)
        return Shard(metadata, _sizes(folder))


def merge(staging: pathlib.Path, shards: Sequence[Shard]) -> dict[str, Any]:
    """Move the files of all ranks into the folder of the checkpoint, and return their merged metadata."""
    metadata: dict[str, Any] = {}
    key_owners: dict[tuple[str, ...], int] = {}
    for rank, shard in enumerate(shards):
        _merge_metadata(metadata, shard.metadata, rank, key_owners)
    with storage.errors_naming(staging):
        file_owners: dict[str, int] = {}
        for rank, shard in enumerate(shards):
            folder = _shards_folder(staging) / str(rank)
            _check_arrival(folder, shard.files, rank)
            _move_up(folder, staging, rank, file_owners)
        shutil.rmtree(_shards_folder(staging))
    return metadata


def _shards_folder(staging: pathlib.Path) -> pathlib.Path:
    # The checkpoint's id keeps the name apart from those of its files.
    return staging / f".ranks-{staging.name}"


def _is_folder(path: pathlib.Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _sizes(folder: pathlib.Path) -> dict[str, int]:
    """Return the sizes of files and links by their path below the folder."""
    paths = [path for path in folder.rglob("*") if not _is_folder(path)]
    return {path.relative_to(folder).as_posix(): path.lstat().st_size for path in paths}


def _merge_metadata(
    merged: dict[str, Any],
    metadata: Mapping[str, Any],
    rank: int,
    owners: dict[tuple[str, ...], int],
    above: tuple[str, ...] = (),
) -> None:
    """Add the metadata of a rank below the keys `above`; mappings are merged, other values must be equal."""
    for key, value in metadata.items():
        path = (*above, key)
        owners.setdefault(path, rank)
        if isinstance(value, dict) and isinstance(merged.setdefault(key, {}), dict):
            _merge_metadata(merged[key], value, rank, owners, path)
        elif merged.setdefault(key, value) != value:
            raise errors.MisuseError(
                f"The checkpoint metadata has {'.'.join(path)}={merged[key]!r} on rank {owners[path]}, but {value!r} "
                f"on rank {rank}; pass it on one rank, or the same on all."
            )


def _check_arrival(folder: pathlib.Path, files: Mapping[str, int], rank: int) -> None:
    """Refuse a folder in which the chief sees other files than the rank that wrote them."""
    found = _sizes(folder)
    if found != files:
        name = min(name for name, _ in found.items() ^ files.items())
        raise errors.StorageException(
            f"The chief sees {name!r} of rank {rank} with {found.get(name, 'no')} bytes in {folder}, where rank {rank} "
            f"wrote {files.get(name, 'no')}. Set checkpoint_storage to a folder that all machines share."
        )


def _move_up(folder: pathlib.Path, staging: pathlib.Path, rank: int, owners: dict[str, int]) -> None:
    for path in sorted(folder.rglob("*")):  # a folder before what is in it
        name = path.relative_to(folder).as_posix()
        target, owner, is_folder = staging / name, owners.setdefault(name, rank), _is_folder(path)
        if owner != rank and _is_folder(target) != is_folder:
            of_file, of_folder = (owner, rank) if is_folder else (rank, owner)
            raise errors.StorageException(
                f"{name!r} of the checkpoint is a file on rank {of_file}, but a folder on rank {of_folder}; give them "
                "different names."
            )
        if is_folder:
            target.mkdir(mode=0o700, exist_ok=True)
        elif owner == rank:
            path.rename(target)
        elif not _is_same(path, target):
            raise errors.StorageException(
                f"{name!r} has other contents on rank {rank} than on rank {owner}; give each rank names of its own, "
                "or write the file on one of them."
            )


def _is_same(one: pathlib.Path, other: pathlib.Path) -> bool:
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and one.readlink() == other.readlink()
    return filecmp.cmp(one, other, shallow=False)
