"""Files of tensors that several ranks share, written and read by `torch.distributed.checkpoint`.

Beside torch's own description of them, a pickle for its tools, there is one in JSON: only that is read here, since
unpickling could run code of whoever wrote the checkpoint.
"""

from __future__ import annotations

import collections
import io
import json
import math
import os
import pathlib
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor, Replicate
from torch.futures import Future

from determined import errors, storage
from determined.pytorch._backends.state_codec import OWN, REPLICATED, SHARDS_FOLDER, Reference, mapped, mark_of

INDEX_FILE = "index.json"
FORMAT = 1

_FILE = re.compile(r"__\d+_\d+\.distcp")
_TYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class TakenShards:
    """Tensors taken out of the state of a checkpoint, each written by the ranks that have parts of it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._tensors: dict[str, Tensor] = {}

    def take(self, value: Any, place: str) -> Any:
        """Return nested values with marks in place of tensors that ranks share."""
        if not isinstance(value, DTensor):
            return mapped(self.take, value, place)
        (placement,) = value.placements
        if placement.is_partial():
            value = value.redistribute(placements=[Replicate()])
            (placement,) = value.placements
        self._tensors[place] = value.detach()
        return mark_of(place, getattr(placement, "dim", REPLICATED))

    def take_own(self, value: Any, place: str) -> Any:
        """Return nested values with marks in place of all tensors."""
        if isinstance(value, DTensor):
            return self.take(value, place)
        if not isinstance(value, Tensor):
            return mapped(self.take_own, value, place)
        key = f"rank {self._rank}{place}"
        self._tensors[key] = value.detach()
        return mark_of(key, OWN)

    def write(self, folder: pathlib.Path) -> None:
        """Write this rank's parts of what was taken. All ranks must call this."""
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            save(dict(self._tensors), storage_writer=_Writer(folder / SHARDS_FOLDER), planner=planner)
        except CheckpointException as error:
            raise errors.StorageException(f"{_first_failure(error)} in {folder / SHARDS_FOLDER}.") from error


class _Writer(FileSystemWriter):
    """Adds the description in JSON, and leaves out the path of the folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder, overwrite=False)
        self._folder = folder

    def storage_meta(self) -> described.StorageMeta | None:
        """Return nothing: the folder gets another name when the checkpoint is complete."""
        return described.StorageMeta()

    def finish(self, metadata: described.Metadata, results: list[list[Any]]) -> None:
        """Write both descriptions, on one rank."""
        super().finish(metadata, results)
        pieces = {(one.index.fqn, one.index.offset): one.storage_data for part in results for one in part}
        tensors = {key: _tensor_entry(key, entry, pieces) for key, entry in metadata.state_dict_metadata.items()}
        (self._folder / INDEX_FILE).write_text(json.dumps({"format": FORMAT, "tensors": tensors}))


def _tensor_entry(key: str, entry: Any, pieces: Mapping[tuple[str, Any], Any]) -> dict[str, Any]:
    chunks = []
    for chunk in entry.chunks:
        if not math.prod(chunk.sizes):  # of a rank for which nothing was left
            continue
        piece = pieces[key, chunk.offsets]
        place = {"file": piece.relative_path, "begin": piece.offset, "length": piece.length}
        chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **place})
    return {"dtype": str(entry.properties.dtype).removeprefix("torch."), "size": list(entry.size), "chunks": chunks}


# Reading


class Piece(NamedTuple):
    """Where a part of a tensor is."""

    path: pathlib.Path
    begin: int
    length: int


class Index(NamedTuple):
    """What a folder of shards holds."""

    tensors: dict[str, described.TensorStorageMetadata]
    pieces: dict[described.MetadataIndex, Piece]

    @classmethod
    def read(cls, folder: pathlib.Path) -> Index:
        """Return the index in a folder; raises `ValueError` for what `_Writer` did not write."""
        data = json.loads(storage.read_plain(folder / INDEX_FILE))
        if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("tensors"), dict):
            raise ValueError(f"{INDEX_FILE} is not an index of format {FORMAT}")
        index = cls({}, {})
        for key, entry in data["tensors"].items():
            try:
                index._add(folder, key, entry)
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"the entry of {key!r} in {INDEX_FILE} lacks a part ({error})") from error
        return index

    def _add(self, folder: pathlib.Path, key: str, entry: Mapping[str, Any]) -> None:
        dtype, size = _TYPES[entry["dtype"]], _numbers(entry["size"])
        chunks = []
        for chunk in entry["chunks"]:
            offsets, sizes = _numbers(chunk["offsets"]), _numbers(chunk["sizes"])
            ends = [offset + length for offset, length in zip(offsets, sizes, strict=True)]
            piece = _checked_piece(folder, chunk)
            # Tensors are not packed, so that no small file asks for a large memory.
            if len(ends) != len(size) or any(end > whole for end, whole in zip(ends, size, strict=True)):
                raise ValueError(f"a part of {key!r} is outside of it")
            if math.prod(sizes) * dtype.itemsize > piece.length:
                raise ValueError(f"a part of {key!r} is larger than what its file has for it")
            chunks.append(described.ChunkStorageMetadata(offsets, sizes))
            self.pieces[described.MetadataIndex(key, offsets)] = piece
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
            raise ValueError(f"the parts of {key!r} are not the whole of it")
        properties = described.TensorProperties(dtype=dtype)
        self.tensors[key] = described.TensorStorageMetadata(properties, size, chunks)


def _numbers(values: Any) -> torch.Size:
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**48 for value in values):
        raise ValueError(f"{values!r} is not a size")
    return torch.Size(values)


def _checked_piece(folder: pathlib.Path, chunk: Mapping[str, Any]) -> Piece:
    name, (begin, length) = chunk["file"], _numbers([chunk["begin"], chunk["length"]])
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a file of shards")
    path = folder / name
    if path.is_symlink() or not path.is_file() or begin + length > path.stat().st_size:
        raise ValueError(f"{name!r} is not a file with {begin + length} bytes")
    return Piece(path, begin, length)


class _Reader(StorageReader):
    """Reads parts of tensors by an index, and nothing but tensors."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: there is nothing to forget."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> described.Metadata:
        """Return what there is to read."""
        return described.Metadata(self._index.tensors)  # type: ignore[arg-type]  # a dict that may hold more

    def set_up_storage_reader(
        self, metadata: described.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: all is there."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of a plan."""
        for item in plan.items:
            part = self._part(item.storage_index)
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say no: an index is read, not a place."""
        return False

    def _part(self, place: described.MetadataIndex) -> Tensor:
        piece, entry = self._index.pieces[place], self._index.tensors[place.fqn]
        with piece.path.open("rb") as file:
            file.seek(piece.begin)
            contents = io.BytesIO(file.read(piece.length))
        with zipfile.ZipFile(contents) as archive:
            if sum(one.file_size for one in archive.infolist()) > piece.length:
                raise ValueError(f"{piece.path.name} would unpack to more bytes than it has")
        contents.seek(0)
        part = torch.load(contents, map_location="cpu", weights_only=True)
        (sizes,) = [chunk.sizes for chunk in entry.chunks if chunk.offsets == place.offset]
        if not isinstance(part, Tensor) or part.shape != sizes or part.dtype != entry.properties.dtype:
            raise ValueError(f"{piece.path.name} does not hold the part of {place.fqn!r} that {INDEX_FILE} tells of")
        return part


def whole_tensors(wanted: Iterable[Reference]) -> dict[Reference, Tensor]:
    """Return whole tensors, on the CPU, of what was kept in parts. Each process reads by itself."""

    def empty(reference: Reference, entry: described.TensorStorageMetadata) -> Tensor:
        return torch.empty(entry.size, dtype=entry.properties.dtype)

    return _loaded(wanted, empty, no_dist=True)


def _loaded(wanted: Iterable[Reference], empty: Any, *, no_dist: bool) -> dict[Reference, Tensor]:
    """Return tensors that `empty` makes room for, filled; with all ranks together unless `no_dist`."""
    by_folder: dict[pathlib.Path, list[Reference]] = collections.defaultdict(list)
    for reference in sorted(wanted):
        by_folder[reference.folder].append(reference)
    tensors: dict[Reference, Tensor] = {}
    for folder, found in by_folder.items():
        try:
            index = Index.read(folder)
            if missing := [one.key for one in found if one.key not in index.tensors]:
                raise ValueError(f"it has no tensor {missing[0]!r}")
            filled = {one.key: empty(one, index.tensors[one.key]) for one in found}
            _fill(filled, index, no_dist=no_dist)
        except (CheckpointException, ValueError, RecursionError, OSError) as error:
            told = _first_failure(error) if isinstance(error, CheckpointException) else str(error)
            raise errors.InvalidCheckpointException(
                f"{folder} cannot be read: {told}; use another checkpoint."
            ) from error
        tensors |= {one: filled[one.key] for one in found}
    return tensors


def _fill(tensors: Mapping[str, Tensor], index: Index, *, no_dist: bool) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        # What torch says of a process that reads alone, which here is meant to.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(dict(tensors), storage_reader=_Reader(index), planner=planner, no_dist=no_dist)


def spread_tensors(wanted: Iterable[Reference], empty: Any) -> dict[Reference, Tensor]:
    """Return tensors that `empty` makes room for, of which each rank reads its part. All ranks must call this."""
    return _loaded(wanted, empty, no_dist=False)


def _first_failure(error: CheckpointException) -> str:
    rank, (failure, _) = next(iter(sorted(error.failures.items())))
    return f"rank {rank} failed with {type(failure).__name__}: {failure}"
