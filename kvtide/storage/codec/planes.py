"""Byte planes: the bytes of numbers, those of one significance together.

    bf16   s eeeeeee | e mmmmmmm      plane 1, sign and exponent: 3 bits of 8 are left by libzstd
           s eeeeeee | e mmmmmmm      plane 0, mantissa: noise, kept as it is

What is coded is cut into blocks. A block's element width (1, 2 or 4 bytes) is the one whose planes
have the lowest entropy in a sample: so no dtype need be known, and pools of different kinds may lie
side by side. A plane that does not shrink is kept as it is.

    ┌──────────────────────────────────────┬─────────────────────────────────┐
    │ directory: width, bytes of each plane│ planes of block 0, of block 1, …│
    └──────────────────────────────────────┴─────────────────────────────────┘
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.storage.codec import zstd
from kvtide.storage.objects import CorruptObjectError

ByteArray = npt.NDArray[np.uint8]

BLOCK_BYTES = 1 << 20
"""Few calls of large blocks: each takes the interpreter, which the engine needs."""
WIDTHS: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
SAMPLES, SAMPLE_PARTS = 4096, 16
"""Words of four bytes, in so many places, of which a block's entropies are estimated."""
MAX_BITS = 7.5
"""Planes whose bytes have more bits of entropy are kept as they are."""
MIN_GAIN = 0.01
"""Wider elements must save so much more, of all."""

_BLOCK = struct.Struct("<B3x4I")
"""Width, bytes of each plane."""


def bound(raw_bytes: int) -> int:
    """The most that so many bytes become."""
    return raw_bytes + _blocks(raw_bytes) * _BLOCK.size


def encode(raw: ByteArray, target: ByteArray) -> int:
    """Write the planes of `raw` into the target, of `bound` bytes at least; how many they are."""
    directory, at = bytearray(), _blocks(len(raw)) * _BLOCK.size
    for start in range(0, len(raw), BLOCK_BYTES):
        sizes = []
        block = raw[start : start + BLOCK_BYTES]
        width, dense = _layout(block)
        for plane, is_dense in zip(_split(block, width), dense, strict=True):
            sizes.append(_put(plane, target[at : at + len(plane)], dense=is_dense))
            at += sizes[-1]
        directory += _BLOCK.pack(width, *sizes, *[0] * (4 - width))
    target[: len(directory)] = np.frombuffer(directory, np.uint8)
    return at


def decode(coded: ByteArray, target: ByteArray) -> None:
    """Fill the target; raises if these are not the planes of so many bytes."""
    at = _blocks(len(target)) * _BLOCK.size
    if len(coded) < at:
        raise CorruptObjectError("planes without a directory")
    records = list(_BLOCK.iter_unpack(bytes(coded[:at])))
    for number, (width, *sizes) in enumerate(records):
        block = target[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
        if width not in WIDTHS or len(block) % width or at + sum(sizes) > len(coded):
            raise CorruptObjectError(f"planes of width {width} and {sizes} bytes")
        planes = []
        for size in sizes[:width]:
            planes.append(_take(coded[at : at + size], len(block) // width))
            at += size
        _join(planes, block)
    if at != len(coded):
        raise CorruptObjectError(f"{len(coded) - at} bytes behind the planes")


def _blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES)


def _put(plane: ByteArray, target: ByteArray, *, dense: bool) -> int:
    """A plane of the same length as the target is kept as it is."""
    size = None if dense or len(plane) < 2 else zstd.compress(plane, target[:-1])
    if size is None:
        target[:] = plane
        return len(plane)
    return size


def _take(coded: ByteArray, size: int) -> ByteArray:
    if len(coded) == size:
        return coded
    plane = np.empty(size, np.uint8)
    try:
        zstd.decompress(coded, plane)
    except zstd.ZstdError as error:
        raise CorruptObjectError(str(error)) from None
    return plane


def _split(block: ByteArray, width: int) -> Iterator[ByteArray]:
    """From the least significant bytes to the most."""
    if width == 1:
        yield block
        return
    words = block.view(WIDTHS[width])
    for place in range(width):
        yield (words >> words.dtype.type(8 * place)).astype(np.uint8)


def _join(planes: list[ByteArray], block: ByteArray) -> None:
    width = len(planes)
    words, highest = block.view(WIDTHS[width]), planes[-1]
    if width == 1:
        words[:] = highest
        return
    joined = highest.astype(words.dtype)
    for plane in reversed(planes[:-1]):
        joined <<= words.dtype.type(8)
        np.bitwise_or(joined, plane, out=joined)
    words[:] = joined


def _layout(block: ByteArray) -> tuple[int, list[bool]]:
    """The width whose planes have the least entropy, and which of its planes are too dense."""
    words = len(block) // 4
    if len(block) % 4 or words < 16:
        return 1, [False]
    parts = SAMPLE_PARTS if words >= SAMPLES else 1
    spread = block.view("<u4")[: words // parts * parts].reshape(parts, -1)
    sample = spread[:, : SAMPLES // parts].reshape(-1)
    one, two, three, four = (
        np.bincount((sample >> np.uint32(8 * place)).astype(np.uint8), minlength=256)
        for place in range(4)
    )
    counts = {
        1: [one + two + three + four],
        2: [one + three, two + four],
        4: [one, two, three, four],
    }
    best, fewest, dense = 1, 8.0, [False]
    for width, planes in counts.items():
        bits = [_entropy(plane) for plane in planes]
        mean = sum(8.0 if each > MAX_BITS else each for each in bits) / width
        if width == 1 or mean < fewest - 8 * MIN_GAIN:
            best, fewest, dense = width, mean, [each > MAX_BITS for each in bits]
    return best, dense


def _entropy(counts: npt.NDArray[np.int64]) -> float:
    """Bits of a byte, with the correction of Miller and Madow for few samples."""
    seen = counts[counts > 0].astype(np.float64)
    total = float(seen.sum())
    plain = np.log2(total) - float((seen * np.log2(seen)).sum()) / total
    return float(plain + (len(seen) - 1) / (2 * np.log(2) * total))
