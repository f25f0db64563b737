"""Vectors of keys and values in eight bits: sign, four bits of exponent, three of mantissa.

    bf16   s eeeeeeee mmmmmmm     ──▶   s EEEE MMM    and once for each vector: the exponent's base

The base is the exponent of the largest element less 15. So a vector keeps three bits of mantissa
over 16 powers of two, whatever its size is. Smaller elements, zeros too, become the smallest of
these numbers, 2^-16 to 2^-15 of the largest; a vector of zeros stays one. Numbers that were rounded
once stay as they are when they are rounded again.

It is e4m3 without subnormals and without a pattern that is no number: those are not rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.spec import DType

ByteArray = npt.NDArray[np.uint8]
Magnitudes = npt.NDArray[np.int16]
"""The exponent and three bits of mantissa, of a number in bf16 or fp32."""

CHUNK_BYTES = 1 << 20
MANTISSA_BITS, EXPONENTS = 3, 16


class Kind(IntEnum):
    """What a run of bytes of an object holds."""

    PLAIN = 0
    BF16 = 1
    FP16 = 2
    FP32 = 3

    @property
    def size_bytes(self) -> int:
        return {Kind.BF16: 2, Kind.FP16: 2, Kind.FP32: 4}[self]


_FLOAT_MAX = (254 << MANTISSA_BITS) | 7
MAX_MAGNITUDE = {
    Kind.BF16: _FLOAT_MAX,
    Kind.FP16: (142 << MANTISSA_BITS) | 7,
    Kind.FP32: _FLOAT_MAX,
}
"""Of a finite number: larger ones are not rounded up."""

KINDS = {DType.BF16: Kind.BF16, DType.FP16: Kind.FP16, DType.FP32: Kind.FP32}


def rounded_bytes(size: int, kind: Kind, elements: int) -> int:
    """What so many bytes become: a byte for each number, and one for each vector."""
    count = size // kind.size_bytes
    return count + count // elements


def is_finite(raw: ByteArray, kind: Kind) -> bool:
    if kind is Kind.BF16:
        return not bool(((raw.view("<u2") & np.uint16(0x7F80)) == 0x7F80).any())
    return bool(np.isfinite(raw.view("<f2" if kind is Kind.FP16 else "<f4")).all())


def encode(raw: ByteArray, kind: Kind, elements: int, target: ByteArray) -> None:
    """Round finite numbers, in vectors of so many elements, into `rounded_bytes`."""
    rows, row_bytes = len(raw) // kind.size_bytes // elements, elements * kind.size_bytes
    bases, values = target[:rows], target[rows:].reshape(rows, elements)
    for some in _chunks(rows, row_bytes):
        part = raw[some.start * row_bytes : some.stop * row_bytes]
        signs, magnitudes = _apart(part, kind)
        vectors = magnitudes.reshape(-1, elements)
        base = np.maximum((vectors.max(1) >> MANTISSA_BITS) - (EXPONENTS - 1), 0)
        vectors -= (base << MANTISSA_BITS)[:, None]
        np.maximum(vectors, 0, out=vectors)
        bases[some] = base
        np.bitwise_or(vectors.astype(np.uint8), signs.reshape(-1, elements), out=values[some])


def decode(coded: ByteArray, kind: Kind, elements: int, target: ByteArray) -> None:
    """Fill the target with what `encode` made of as many bytes."""
    rows, row_bytes = len(target) // kind.size_bytes // elements, elements * kind.size_bytes
    bases, values = coded[:rows], coded[rows:].view(np.int8).reshape(rows, elements)
    for some in _chunks(rows, row_bytes):
        part = target[some.start * row_bytes : some.stop * row_bytes]
        if kind is Kind.BF16:
            words = values[some].astype(np.int16)  # The sign fills the upper bits.
            words <<= 4
            words &= np.int16(-0x7810)
            vectors = part.view("<i2").reshape(-1, elements)
            np.add(words, (bases[some].astype(np.int16) << 7)[:, None], out=vectors)
        else:
            longs = values[some].astype(np.int32)
            longs <<= 20
            longs &= np.int32(-0x78100000)
            longs += (bases[some].astype(np.int32) << 23)[:, None]
            numbers = longs.reshape(-1).view("<f4")
            part.view("<f4" if kind is Kind.FP32 else "<f2")[:] = numbers


def _chunks(rows: int, row_bytes: int) -> Iterator[slice]:
    step = max(1, CHUNK_BYTES // row_bytes)
    return (slice(at, min(rows, at + step)) for at in range(0, rows, step))


def _apart(raw: ByteArray, kind: Kind) -> tuple[ByteArray, Magnitudes]:
    """Sign bits, and magnitudes rounded to the nearest, ties to even."""
    if kind is Kind.BF16:
        words = raw.view("<u2")
        signs = (words >> np.uint16(8)).astype(np.uint8)
        magnitudes = _rounded(words & np.uint16(0x7FFF), 4)
    else:
        numbers = raw.view("<f2").astype("<f4") if kind is Kind.FP16 else raw.view("<f4")
        longs = numbers.view("<u4")
        signs = (longs >> np.uint32(24)).astype(np.uint8)
        magnitudes = _rounded(longs & np.uint32(0x7FFFFFFF), 20)
    signs &= np.uint8(0x80)
    return signs, np.minimum(magnitudes, MAX_MAGNITUDE[kind], out=magnitudes)


def _rounded(bits: npt.NDArray[Any], dropped: int) -> Magnitudes:
    one = bits.dtype.type(1)
    odd = bits >> bits.dtype.type(dropped)
    odd &= one
    bits += odd
    bits += bits.dtype.type((1 << (dropped - 1)) - 1)
    bits >>= bits.dtype.type(dropped)
    return bits.astype(np.int16)
