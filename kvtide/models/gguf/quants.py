"""How GGUF stores numbers: the formats read here, and back to float32.

A quantised row is a run of blocks; a block holds the numbers of 32 or 256 consecutive elements
and what scales them. Every decoder takes blocks as rows of bytes and gives the same blocks as
rows of float32, for many blocks at once. The arithmetic, its order included, is that of
llama.cpp: the same file gives the same floats.

Nibbles lie in two halves: the low nibbles of a run of bytes are its first elements, the high
nibbles the ones after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ByteArray = NDArray[np.uint8]
Fp32Array = NDArray[np.float32]

CHUNK_ELEMENTS = 1 << 20
"""What is decoded at a time: intermediate arrays stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Format:
    """A way to store numbers: so many elements in a block of so many bytes."""

    name: str
    block_elements: int
    block_bytes: int
    decode: Callable[[ByteArray], Fp32Array]

    def stored_bytes(self, elements: int) -> int:
        """Bytes of so many elements, which are whole blocks."""
        return elements // self.block_elements * self.block_bytes


def dequantise(data: ByteArray, form: Format) -> Fp32Array:
    """All elements of these bytes, as one float32 row."""
    blocks = data.reshape(-1, form.block_bytes)
    values = np.empty((len(blocks), form.block_elements), np.float32)
    step = max(1, CHUNK_ELEMENTS // form.block_elements)
    for start in range(0, len(blocks), step):
        values[start : start + step] = form.decode(blocks[start : start + step])
    return values.reshape(-1)


# -- plain numbers -----------------------------------------------------------------------------


def _f32(blocks: ByteArray) -> Fp32Array:
    return np.ascontiguousarray(blocks).view("<f4")


def _f16(blocks: ByteArray) -> Fp32Array:
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _bf16(blocks: ByteArray) -> Fp32Array:
    """The upper half of a float32."""
    halves = np.ascontiguousarray(blocks).view("<u2").astype(np.uint32)
    return (halves << np.uint32(16)).view(np.float32)


# -- blocks of 32 ------------------------------------------------------------------------------


def _nibbles(packed: ByteArray) -> ByteArray:
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _signed(blocks: ByteArray) -> Fp32Array:
    return np.ascontiguousarray(blocks).view(np.int8).astype(np.float32)


def _fifth_bits(packed: ByteArray) -> ByteArray:
    """Bit i of 32, moved to where it belongs: above the nibble of element i."""
    word = np.ascontiguousarray(packed).view("<u4")
    bits = (word >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    return bits.astype(np.uint8) << np.uint8(4)


def _q8_0(blocks: ByteArray) -> Fp32Array:
    """scale | 32 signed bytes."""
    return _f16(blocks[:, :2]) * _signed(blocks[:, 2:])


def _q4_0(blocks: ByteArray) -> Fp32Array:
    """scale | 16 bytes of nibbles, 8 standing for zero."""
    return _f16(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: ByteArray) -> Fp32Array:
    """scale | least value | 16 bytes of nibbles."""
    return _f16(blocks[:, :2]) * _nibbles(blocks[:, 4:]).astype(np.float32) + _f16(blocks[:, 2:4])


def _q5_0(blocks: ByteArray) -> Fp32Array:
    """scale | 32 fifth bits | 16 bytes of nibbles, 16 standing for zero."""
    levels = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _f16(blocks[:, :2]) * (levels.astype(np.float32) - 16)


def _q5_1(blocks: ByteArray) -> Fp32Array:
    """scale | least value | 32 fifth bits | 16 bytes of nibbles."""
    levels = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _f16(blocks[:, :2]) * levels.astype(np.float32) + _f16(blocks[:, 2:4])


# -- blocks of 256 -----------------------------------------------------------------------------


def _six_bit_pairs(packed: ByteArray) -> tuple[Fp32Array, Fp32Array]:
    """Scales and offsets of 8 runs of 32 elements, six bits each, in 12 bytes.

    The first four of each have a byte of their own; the last four are spread over the top two
    bits of those bytes and the nibbles of the last four bytes.
    """
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], axis=1)
    offsets = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], axis=1)
    return scales.astype(np.float32), offsets.astype(np.float32)


def _scaled_runs(blocks: ByteArray, levels: ByteArray) -> Fp32Array:
    """8 runs of 32 levels, with the scales and offsets that Q4_K and Q5_K begin with."""
    scales, offsets = _six_bit_pairs(blocks[:, 4:16])
    scales, offsets = _f16(blocks[:, :2]) * scales, _f16(blocks[:, 2:4]) * offsets
    return (scales[:, :, None] * levels.astype(np.float32) - offsets[:, :, None]).reshape(-1, 256)


def _q4_k(blocks: ByteArray) -> Fp32Array:
    """scale of scales | scale of offsets | 12 bytes of both | 4 × 32 bytes of nibbles."""
    return _scaled_runs(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: ByteArray) -> Fp32Array:
    """As Q4_K, with 32 bytes before the nibbles: bit r of byte i is the fifth bit of element i
    of run r."""
    run = np.arange(8, dtype=np.uint8)[:, None]
    fifth = ((blocks[:, None, 16:48] >> run) & np.uint8(1)) << np.uint8(4)
    nibbles = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _scaled_runs(blocks, nibbles | fifth)


def _q6_k(blocks: ByteArray) -> Fp32Array:
    """128 bytes of nibbles | 64 bytes of two upper bits | 16 signed scales | scale of scales.

    Both halves of a block are laid out alike: 64 bytes of nibbles for 4 runs of 32 elements, and
    32 bytes that carry the upper bits of element i of all four runs in byte i.
    """
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shift = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shift) & 3
    levels = (low | (high << 4)).astype(np.float32).reshape(-1, 16, 16) - 32
    scales = _f16(blocks[:, 208:]) * _signed(blocks[:, 192:208])
    return (scales[:, :, None] * levels).reshape(-1, 256)


# -- the table -----------------------------------------------------------------------------------

FORMATS: dict[int, Format] = {
    0: Format("F32", 1, 4, _f32),
    1: Format("F16", 1, 2, _f16),
    2: Format("Q4_0", 32, 18, _q4_0),
    3: Format("Q4_1", 32, 20, _q4_1),
    6: Format("Q5_0", 32, 22, _q5_0),
    7: Format("Q5_1", 32, 24, _q5_1),
    8: Format("Q8_0", 32, 34, _q8_0),
    12: Format("Q4_K", 256, 144, _q4_k),
    13: Format("Q5_K", 256, 176, _q5_k),
    14: Format("Q6_K", 256, 210, _q6_k),
    30: Format("BF16", 1, 2, _bf16),
}
"""A tensor's type in the file → how it is stored."""

OTHER_FORMATS = {
    10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Types that are not read here, by the names that a refusal calls them."""
