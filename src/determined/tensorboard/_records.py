"""The bytes of event files: TFRecord frames around `Event` messages, encoded without protobuf.

A frame is the payload's length (uint64), the masked CRC of those eight bytes, the payload and its masked
CRC, all little-endian. A scalar's payload is

    Event { wall_time: double = 1, step: int64 = 2, summary: Summary = 5 }
    Summary { value: Value = 1 }    Value { tag: string = 1, simple_value: float = 2 }

With one tag and one length of the step's varint, every frame has the same length and differs only in the
bytes of wall time, step, value and CRC. So a window is encoded as the rows of one array.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from determined._text import bounded
from determined.tensorboard import _crc

Numbers = Sequence[float] | npt.NDArray[Any]

_HEADER = 12  # bytes before the payload: length and its CRC
_WALL_TIME_AT = _HEADER + 1
_STEP_AT = _WALL_TIME_AT + 8 + 1
_LARGEST_STEP = np.iinfo(np.int64).max
_MAX_TAG = 1000  # characters; what the CRC of a tag takes grows with its length
# The smallest step whose varint takes 2, 3, ... 9 bytes.
_LONGER_FROM = np.array([1 << 7 * length for length in range(1, 9)], dtype=np.int64)


def record(payload: bytes) -> bytes:
    """Return the frame around one serialized event."""
    length = struct.pack("<Q", len(payload))
    return b"".join((length, _checksum(length), payload, _checksum(payload)))


def version_event(wall_time: float) -> bytes:
    """Return the serialized event that opens every event file."""
    return b"\x09" + struct.pack("<d", wall_time) + _message(3, b"brain.Event:2")


def scalar_records(name: str, steps: Numbers, values: Numbers, wall_times: Numbers) -> bytes:
    """Return the frames of one metric's values, in the order given."""
    step_numbers = _checked_steps(name, steps)
    numbers = _float_column(values, "<f4")
    times = _float_column(wall_times, "<f8")
    if step_numbers.ndim != 1 or not step_numbers.shape == numbers.shape == times.shape:
        raise ValueError(
            f"add_scalars({name!r}) got steps, values and wall times of the shapes {step_numbers.shape}, "
            f"{numbers.shape} and {times.shape}; pass three flat sequences of one length."
        )
    # A lone surrogate cannot be UTF-8; an odd metric name should be legible, not end a training.
    tag = bounded(name, _MAX_TAG).encode(errors="backslashreplace")
    return b"".join(
        _rows(_layout(tag, length), step_numbers[part], numbers[part], times[part])
        for length, part in _runs(step_numbers)
    )


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", _crc.masked(_crc.crc32c(data)))


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _checked_steps(name: str, steps: Numbers) -> npt.NDArray[np.int64]:
    numbers = np.asarray(steps)
    if not numbers.size:
        return np.empty(numbers.shape, dtype=np.int64)
    if numbers.dtype.kind not in "iu":
        raise TypeError(
            f"add_scalars({name!r}) got steps of type {numbers.dtype}, the first is {numbers.flat[0]!r}; "
            "pass integers from 0 to 2**63 - 1, such as batches trained."
        )
    for extreme in (int(numbers.min()), int(numbers.max())):
        if not 0 <= extreme <= _LARGEST_STEP:
            raise ValueError(
                f"add_scalars({name!r}) got step {extreme}; TensorBoard's steps are 0 to 2**63 - 1, "
                "pass the number of batches trained."
            )
    return numbers.astype(np.int64, copy=False)


def _float_column(numbers: Numbers, dtype: str) -> npt.NDArray[np.floating[Any]]:
    # What a float32 cannot hold becomes infinite, as in every TensorBoard writer.
    with np.errstate(all="ignore"):
        return np.asarray(numbers, dtype=dtype)


def _runs(steps: npt.NDArray[np.int64]) -> Iterator[tuple[int, slice]]:
    """Give the parts of a window whose steps have varints of one length, with that length."""
    lengths = np.searchsorted(_LONGER_FROM, steps, side="right") + 1
    bounds = [0, *(np.flatnonzero(lengths[1:] != lengths[:-1]) + 1).tolist(), steps.size]
    for start, stop in itertools.pairwise(bounds):
        if start < stop:
            yield int(lengths[start]), slice(start, stop)


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """Everything about the frames of one tag and one varint length that is the same in every window."""

    frame: npt.NDArray[np.uint8]  # one frame, its varying bytes zero
    fields: np.dtype[np.void]  # where the varying bytes lie in a frame
    shifts: npt.NDArray[np.int64]  # of each step byte
    more: npt.NDArray[np.uint8]  # the continuation bit of each step byte
    varying: npt.NDArray[np.intp]  # columns of a frame that differ between rows, CRC apart
    table: npt.NDArray[np.uint32]  # CRC contributions of those columns, 256 a column
    table_starts: npt.NDArray[np.intp]
    crc: np.uint32  # of the payload in `frame`


# Bounded for programs that make up metric names as they go; a layout takes about 15 kB.
@functools.lru_cache(maxsize=1024)
def _layout(tag: bytes, step_length: int) -> _Layout:
    value = _message(1, tag) + b"\x15" + bytes(4)
    payload = b"\x09" + bytes(8) + b"\x10" + bytes(step_length) + _message(5, _message(1, value))
    value_at = _HEADER + len(payload) - 4
    fields = np.dtype(
        {
            "names": ["wall_time", "step", "value", "crc"],
            "formats": ["<f8", f"({step_length},)u1", "<f4", "<u4"],
            "offsets": [_WALL_TIME_AT, _STEP_AT, value_at, value_at + 4],
        }
    )
    varying = np.r_[_WALL_TIME_AT : _STEP_AT - 1, _STEP_AT : _STEP_AT + step_length, value_at : value_at + 4]
    return _Layout(
        frame=np.frombuffer(record(payload), dtype=np.uint8),
        fields=fields,
        shifts=7 * np.arange(step_length, dtype=np.int64),
        more=np.array([0x80] * (step_length - 1) + [0], dtype=np.uint8),
        varying=varying,
        table=_crc.contributions(len(payload))[varying - _HEADER].ravel(),
        table_starts=256 * np.arange(varying.size, dtype=np.intp),
        crc=np.uint32(_crc.crc32c(payload)),
    )


def _rows(
    layout: _Layout,
    steps: npt.NDArray[np.int64],
    values: npt.NDArray[np.floating[Any]],
    wall_times: npt.NDArray[np.floating[Any]],
) -> bytes:
    rows = layout.frame[np.newaxis].repeat(steps.size, axis=0)
    frames = rows.view(layout.fields)[:, 0]
    frames["wall_time"] = wall_times
    frames["step"] = (steps[:, None] >> layout.shifts) & 0x7F | layout.more
    frames["value"] = values
    varying = rows.take(layout.varying, axis=1)
    crcs = np.bitwise_xor.reduce(layout.table.take(varying + layout.table_starts), axis=1)
    frames["crc"] = _crc.masked_each(crcs ^ layout.crc)
    return rows.tobytes()
