"""Weights as labs publish them: in eight and four bits with scales beside them, read as numbers.

    X.weight e4m3    X.weight_scale_inv fp32      a scale for each block of 128 × 128 (DeepSeek-V3)
    X.weight e4m3    X.scale e8m0 or fp32         the same (DeepSeek-V4)
    X.weight int8    X.scale e8m0                 MXFP4: two values a byte, a scale for each 32
                                                  along a row (DeepSeek-V4's experts)
    X_blocks uint8   X_scales uint8               MXFP4 in blocks (gpt-oss's experts)

What a tensor is tells how it is read, its dtype and what lies beside it: one file holds several of
these and plain tensors. A config adds only the size of blocks, where it is not 128 × 128.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvtide.layers.backend.packed_weight import PackedRows, PackedWeight, half_form
from kvtide.models import fp8, mxfp4
from kvtide.models.model_errors import CheckpointError
from kvtide.models.safetensors_folder import SafetensorsWeights, StoredTensors, WeightOutline
from kvtide.models.weight_digest import Stored

METHODS = ("fp8", "mxfp4")
"""What a config's `quantization_config` calls these."""

_FOUR_BITS = (torch.int8, torch.uint8)
_EXPONENTS = (torch.float8_e8m0fnu, torch.uint8)


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """Over tensors as they are published. `names` and `stored` are of those, scales too."""

    folder: Path
    tensors: StoredTensors
    block: tuple[int, int] = fp8.BLOCK

    @classmethod
    def open(cls, folder: Path, method: object) -> PublishedWeights:
        """`method` is the config's `quantization_config`, None where it has none."""
        size = method.get("weight_block_size") if isinstance(method, Mapping) else None
        return cls(folder, SafetensorsWeights(folder), _block(folder, size))

    def names(self) -> Collection[str]:
        return self.tensors.names()

    def stored(self, name: str) -> Stored:
        return self.tensors.stored(name)

    def has(self, name: str) -> bool:
        return self.tensors.has(name) or self.tensors.has(f"{name}_blocks")

    def get(self, name: str) -> Tensor:
        return self._read(name, None)

    def shape(self, name: str) -> tuple[int, ...]:
        if self.tensors.has(f"{name}_blocks"):
            experts, outputs, blocks, block_bytes = self.tensors.shape(f"{name}_blocks")
            return experts, blocks * block_bytes * mxfp4.BYTE_VALUES, outputs
        *outer, width = self.tensors.shape(name)
        is_packed = self._is_packed(name, self.tensors.get_rows(name, range(1)))
        return (*outer, width * mxfp4.BYTE_VALUES if is_packed else width)

    def get_rows(self, name: str, rows: range) -> Tensor:
        """Of a block-scaled matrix, blocks are read whole from the first row's on."""
        return self._read(name, rows)

    def packed(self, name: str) -> PackedWeight | None:
        if not self.tensors.has(name):
            return None
        weight = self.tensors.get(name)
        if weight.dtype is not torch.float8_e4m3fn:
            return PackedWeight.of_halves(weight)
        if self._packed_row_bytes(weight) is None:
            return None
        data = fp8.packed(weight, self._block_scales(name, weight, None), self.block)
        return PackedWeight(weight.shape[1], (PackedRows(fp8.FORM, data),))

    def _packed_row_bytes(self, weight: Tensor) -> int | None:
        is_matrix = weight.dim() == 2
        return fp8.packed_row_bytes(weight.shape[1], self.block) if is_matrix else None

    def outline(self, name: str) -> WeightOutline:
        if self.tensors.has(f"{name}_blocks"):
            return WeightOutline(mxfp4.VALUES.dtype)
        stored = self.tensors.get(name)
        if stored.dtype is torch.float8_e4m3fn:
            row_bytes = self._packed_row_bytes(stored)
            form = None if row_bytes is None else fp8.FORM
            return WeightOutline(torch.float32, form, row_bytes or 0)
        if self._is_packed(name, stored):
            return WeightOutline(mxfp4.VALUES.dtype)
        form = half_form(stored)
        return WeightOutline(stored.dtype, form, 0 if form is None else stored[0].nbytes)

    def _read(self, name: str, rows: range | None) -> Tensor:
        if self.tensors.has(f"{name}_blocks"):
            return self._in_blocks(name, rows)
        weight = self._stored(name, rows)
        if weight.dtype is torch.float8_e4m3fn:
            return self._eight_bits(name, weight, rows)
        if self._is_packed(name, weight):
            return self._four_bits(name, weight, rows)
        return weight

    def _stored(self, name: str, rows: range | None) -> Tensor:
        return self.tensors.get(name) if rows is None else self.tensors.get_rows(name, rows)

    def _is_packed(self, name: str, weight: Tensor) -> bool:
        return weight.dtype in _FOUR_BITS and name.endswith(".weight")

    # -- the forms -----------------------------------------------------------------------------

    def _eight_bits(self, name: str, weight: Tensor, rows: range | None) -> Tensor:
        of_scales, skipped = rows, 0
        if rows is not None and weight.dim() == 2:
            of_scales, skipped = _block_rows(rows, self.block[0])
            weight = self._stored(name, range(rows.start - skipped, rows.stop))
        scales = self._block_scales(name, weight, of_scales)
        return fp8.dequantise(weight, scales, self.block)[skipped:]

    def _block_scales(self, name: str, weight: Tensor, rows: range | None) -> Tensor:
        scales = self._scales(name, weight, rows)
        if weight.dim() < 2 or scales.shape != fp8.blocks(weight, self.block):
            each = " × ".join(map(str, self.block))
            raise self._misfit(name, weight, scales, f"a scale for each block of {each}")
        return _numbers(scales)

    def _four_bits(self, name: str, weight: Tensor, rows: range | None) -> Tensor:
        scales = self._scales(name, weight, rows)
        *outer, width = weight.shape
        groups = (*outer, width // mxfp4.BLOCK_BYTES)
        if scales.dtype not in _EXPONENTS or width % mxfp4.BLOCK_BYTES or scales.shape != groups:
            wanted = f"an eight-bit exponent for each {mxfp4.BLOCK_BYTES} bytes of a row"
            raise self._misfit(name, weight, scales, wanted)
        return mxfp4.dequantise_rows(weight, scales)

    def _in_blocks(self, name: str, rows: range | None) -> Tensor:
        blocks, scales = (self._stored(f"{name}_{part}", rows) for part in ("blocks", "scales"))
        if blocks.shape != (*scales.shape, mxfp4.BLOCK_BYTES):
            raise CheckpointError(
                f"{self.folder}: {name} has blocks {list(blocks.shape)} and scales "
                f"{list(scales.shape)}, which is not a scale for each block of "
                f"{mxfp4.BLOCK_BYTES} bytes; download it again"
            )
        return mxfp4.dequantise(blocks, scales)

    def _scales(self, name: str, weight: Tensor, rows: range | None) -> Tensor:
        names = [f"{name}_scale_inv"]
        if name.endswith(".weight"):
            names.append(f"{name.removesuffix('.weight')}.scale")
        for found in names:
            if self.tensors.has(found):
                return self._stored(found, rows)
        raise CheckpointError(
            f"{self.folder}: {name} is in {weight.dtype} and has no scales beside it "
            f"({' or '.join(names)}), without which it says nothing; download it again"
        )

    def _misfit(self, name: str, weight: Tensor, scales: Tensor, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder}: {name} is {list(weight.shape)} in {weight.dtype} with scales "
            f"{list(scales.shape)} in {scales.dtype}, which is not {wanted}; use the config.json "
            "that the weights were published with, or download them again"
        )


def _block_rows(rows: range, block: int) -> tuple[range, int]:
    """The blocks that hold these rows, and how many rows before them their first block has."""
    return range(rows.start // block, -(-rows.stop // block)), rows.start % block


def _numbers(scales: Tensor) -> Tensor:
    """Exponents are also written as bytes, by what does not know their dtype."""
    return scales.view(torch.float8_e8m0fnu) if scales.dtype is torch.uint8 else scales


def _block(folder: Path, size: object) -> tuple[int, int]:
    if size is None:
        return fp8.BLOCK
    if isinstance(size, list) and len(size) == 2:
        rows, columns = size
        if isinstance(rows, int) and isinstance(columns, int) and rows > 0 and columns > 0:
            return rows, columns
    raise CheckpointError(
        f"{folder}: `weight_block_size` is {size!r} in config.json; use two numbers, [128, 128]"
    )
