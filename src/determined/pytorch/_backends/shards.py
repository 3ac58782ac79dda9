"""Reads tensors that several ranks wrote in parts, into a subfolder of a checkpoint.

The files have the format of `torch.distributed.checkpoint`. Its metadata is a pickle, for torch's tools; only the JSON
index is read here, because unpickling could run code from the checkpoint.
"""

from __future__ import annotations

import io
import math
import pathlib
import re
import zipfile
from collections.abc import Callable, Mapping
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from determined import errors, storage
from determined.pytorch._data.tree import map_plain

SHARDS_FOLDER = "shards"
INDEX_FILE = "index.json"
INDEX_FORMAT = 1
REPLICATED = "all"
OWN = "own"

_MARK = "__shard__"
_FILE = re.compile(r"__\d+_\d+\.distcp")
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Chunk(NamedTuple):
    """A part of a tensor, and where in which file it is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: pathlib.Path
    begin: int
    length: int


class StoredTensor(NamedTuple):
    """A tensor in the files of a folder; in a state, it stands for the tensor itself."""

    key: str
    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    placement: int | str = OWN
    """The dimension along which it was sharded; or `REPLICATED` on all ranks; or `OWN` for a tensor of one rank."""

    def read(self, dim: int = 0, begin: int = 0, end: int | None = None) -> Tensor:
        """Return the tensor, or its part from `begin` to `end` along a dimension, on the CPU."""
        region = [(0, length) for length in self.size]
        if end is not None:
            region[dim] = (begin, end)
        tensor = torch.zeros([high - low for low, high in region], dtype=self.dtype)
        for chunk in self.chunks:
            here, there = [], []
            for (low, high), start, size in zip(region, chunk.offsets, chunk.sizes, strict=True):
                first, last = max(low, start), min(high, start + size)
                here.append(slice(first - low, last - low))
                there.append(slice(first - start, last - start))
            if all(one.start < one.stop for one in here):
                tensor[tuple(here)] = self._loaded(chunk)[tuple(there)]
        return tensor

    def _loaded(self, chunk: Chunk) -> Tensor:
        try:
            with chunk.path.open("rb") as file:
                file.seek(chunk.begin)
                contents = io.BytesIO(file.read(chunk.length))
            check_unpacked_size(contents)
            part = torch.load(contents, map_location="cpu", weights_only=True)
            if not isinstance(part, Tensor) or part.shape != chunk.sizes or part.dtype != self.dtype:
                raise ValueError(f"{chunk.path.name} does not hold the part of {self.key!r} that {INDEX_FILE} names")
        except Exception as error:  # torch raises anything for files that are damaged, or that hold more than data
            raise _unreadable(chunk.path.parent, error) from error
        return part


def check_unpacked_size(file: IO[bytes]) -> None:
    """Raise for an archive that unpacks to more than its size: `torch.save` does not compress."""
    if zipfile.is_zipfile(file):
        unpacked = sum(entry.file_size for entry in zipfile.ZipFile(file).infolist())
        if unpacked > (held := file.seek(0, io.SEEK_END)):
            raise ValueError(f"it would unpack to {unpacked} bytes from {held}, so fit() did not save it")
    file.seek(0)


def mark_of(key: str, placement: int | str) -> dict[str, Any]:
    """Return the entry that replaces a stored tensor in the file of a state."""
    return {_MARK: [key, placement]}


def with_references(value: Any, folder: pathlib.Path) -> Any:
    """Return nested values with the `StoredTensor`s of a folder in place of marks."""
    try:
        return _with_references(value, _read_index(folder))
    except (ValueError, RecursionError, OSError) as error:
        raise _unreadable(folder, error) from error


def with_tensors(value: Any, read: Callable[[StoredTensor], Tensor]) -> Any:
    """Return nested values with what `read` returns in place of each `StoredTensor`."""
    if isinstance(value, StoredTensor):
        return read(value)
    return map_plain(lambda _, one: with_tensors(one, read), value)


def _with_references(value: Any, index: Mapping[str, StoredTensor]) -> Any:
    if type(value) is dict and value.keys() == {_MARK}:
        return _reference(value[_MARK], index)
    return map_plain(lambda _, one: _with_references(one, index), value)


def _reference(mark: Any, index: Mapping[str, StoredTensor]) -> StoredTensor:
    if not (isinstance(mark, list) and len(mark) == 2 and isinstance(mark[0], str) and mark[0] in index):
        raise ValueError(f"{mark!r} does not name a tensor of {INDEX_FILE}")
    tensor, placement = index[mark[0]], mark[1]
    is_dimension = type(placement) is int and 0 <= placement < len(tensor.size)
    if placement not in (REPLICATED, OWN) and not is_dimension:
        raise ValueError(f"{mark!r} does not hold a valid placement of a tensor")
    return tensor._replace(placement=placement)


def _read_index(folder: pathlib.Path) -> dict[str, StoredTensor]:
    """Return the tensors in a folder by their keys; raises `ValueError` for an invalid index."""
    data = storage.read_json(folder / INDEX_FILE)
    if data.get("format") != INDEX_FORMAT or not isinstance(data.get("tensors"), dict):
        raise ValueError(f"{INDEX_FILE} is not an index of format {INDEX_FORMAT}")
    index: dict[str, StoredTensor] = {}
    for key, entry in data["tensors"].items():
        try:
            chunks = tuple(_chunk(folder, chunk) for chunk in entry["chunks"])
            index[key] = StoredTensor(key, _DTYPES[entry["dtype"]], _numbers(entry["size"]), chunks)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the entry of {key!r} in {INDEX_FILE} lacks a part ({error})") from error
        _check_chunks(index[key])
    return index


def _chunk(folder: pathlib.Path, entry: Mapping[str, Any]) -> Chunk:
    name, (begin, length) = entry["file"], _numbers([entry["begin"], entry["length"]])
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a file of shards")
    path = folder / name
    if path.is_symlink() or not path.is_file() or begin + length > path.stat().st_size:
        raise ValueError(f"{name!r} is not a file with {begin + length} bytes")
    return Chunk(_numbers(entry["offsets"]), _numbers(entry["sizes"]), path, begin, length)


def _check_chunks(tensor: StoredTensor) -> None:
    """Raise for chunks that do not make up a tensor, or that are larger than their bytes in the file."""
    for chunk in tensor.chunks:
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if len(ends) != len(tensor.size) or any(end > size for end, size in zip(ends, tensor.size, strict=True)):
            raise ValueError(f"a part of {tensor.key!r} is outside of it")
        if math.prod(chunk.sizes) * tensor.dtype.itemsize > chunk.length:
            raise ValueError(f"a part of {tensor.key!r} is larger than what its file has for it")
    if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
        raise ValueError(f"the parts of {tensor.key!r} are not the whole of it")


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**48 for value in values):
        raise ValueError(f"{values!r} is not a list of sizes")
    return tuple(values)


def _unreadable(folder: pathlib.Path, error: Exception) -> errors.InvalidCheckpointException:
    return errors.InvalidCheckpointException(f"{folder} cannot be read: {error}; use another checkpoint.")
