"""CRC-32C (Castagnoli), the checksum of event files, fast enough in NumPy for images and whole windows.

A CRC register that starts at zero is linear over GF(2): the register after a block is the XOR of what
each byte contributes alone, and that depends only on the byte and on how many bytes follow it.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x82F63B78  # reflected
_ALL_ONES = 0xFFFFFFFF
_MASK_DELTA = 0xA282EAD8
_BLOCK = 256
# Bounds the temporary index array (8 bytes a byte of data) when a payload is large.
_BLOCKS_AT_ONCE = 4096


def _byte_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [(crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0) for crc in table]
    return table


_TABLE = _byte_table()


# Few lengths are in use at a time: one per metric name while its layout is built, and `_BLOCK`.
@functools.lru_cache(maxsize=8)
def contributions(length: int) -> npt.NDArray[np.uint32]:
    """Return what byte value b at position p of `length` bytes adds to a zero register, as `[p, b]`."""
    table = np.array(_TABLE, dtype=np.uint32)
    rows = np.empty((length, 256), dtype=np.uint32)
    current = table
    for position in reversed(range(length)):
        rows[position] = current
        current = table[current & 0xFF] ^ (current >> 8)
    rows.flags.writeable = False
    return rows


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of `data`."""
    in_blocks = len(data) - len(data) % _BLOCK
    register = _ALL_ONES
    for start in range(0, in_blocks, _BLOCK * _BLOCKS_AT_ONCE):
        stop = min(in_blocks, start + _BLOCK * _BLOCKS_AT_ONCE)
        register = _advance_by_blocks(register, np.frombuffer(data, np.uint8, stop - start, start))
    for byte in data[in_blocks:]:
        register = _TABLE[(register ^ byte) & 0xFF] ^ (register >> 8)
    return register ^ _ALL_ONES


def _advance_by_blocks(register: int, data: npt.NDArray[np.uint8]) -> int:
    table = contributions(_BLOCK)
    alone = np.bitwise_xor.reduce(table[np.arange(_BLOCK), data.reshape(-1, _BLOCK)], axis=1)
    # A register before a block acts like that register XORed into the first four bytes of the block.
    first, second, third, fourth = table[:4].tolist()
    for block in alone.tolist():
        register = (
            first[register & 0xFF]
            ^ second[register >> 8 & 0xFF]
            ^ third[register >> 16 & 0xFF]
            ^ fourth[register >> 24]
            ^ block
        )
    return register


def masked(crc: int) -> int:
    """Return `crc` as event files store it: rotated and shifted, so that it can be checksummed again."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & _ALL_ONES


def masked_each(crcs: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return `masked` of every element."""
    return (crcs >> np.uint32(15) | crcs << np.uint32(17)) + np.uint32(_MASK_DELTA)
