"""The bytes of a tier, and how model code sees them.

A tier's pages all lie in one block of memory (`Arena`); `Buffers` joins that block with the
arrangement of its rows. Model code asks for a pool and a global layer and gets one tensor per field
over all slots: `kv["k"][slot, entry]`. Views alias the block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from kvtide.spec import DType, PoolSpec, Slots
from kvtide.tiers.layout import Arrangement

TORCH_DTYPES: dict[DType, torch.dtype] = {kind: getattr(torch, kind.torch_name) for kind in DType}


@dataclass(frozen=True, slots=True)
class Buffers:
    """`data` is the tier's block of bytes, at least as long as the arrangement."""

    arrangement: Arrangement
    data: torch.Tensor
    _views: dict[tuple[str, int], Mapping[str, torch.Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        assert self.data.dtype is torch.uint8 and self.data.is_contiguous()
        assert self.data.numel() >= self.arrangement.bytes, "the block is too small"
        assert self.data.data_ptr() % 16 == 0, "rows are aligned only if the block is"

    @property
    def address(self) -> int:
        return self.data.data_ptr()

    def view(self, pool: str, layer: int) -> Mapping[str, torch.Tensor]:
        """A layer's own rows by field: tensors of (slots, entries of a page, *field shape)."""
        known = self._views.get((pool, layer))
        if known is None:
            known = self._views[pool, layer] = self._view(pool, layer)
        return known

    def _view(self, pool: str, layer: int) -> Mapping[str, torch.Tensor]:
        spec = self.arrangement.memory.pool(pool)
        views: dict[str, torch.Tensor] = {}
        offset = 0
        for part in spec.entry.fields:
            views[part.name] = self._field(spec, layer, offset, part.shape, part.dtype)
            offset += part.bytes
        return views

    def rows(self, pool: str, layer: int) -> torch.Tensor:
        """A layer's rows as bytes: (slots, bytes of a row)."""
        spec = self.arrangement.memory.pool(pool)
        row = self.arrangement.row(spec, layer)
        slots = self.arrangement.slots[spec.follows or spec.name]
        start = self.data.storage_offset() + row.offset
        return self.data.as_strided((slots, row.bytes), (row.stride, 1), start)

    def copy_rows(self, pool: str, sources: Slots, targets: Slots) -> None:
        """Copy a pool's rows from slot to slot, in all its layers."""
        ours, theirs = (
            torch.from_numpy(slots).long().to(self.data.device) for slots in (sources, targets)
        )
        for layer in self.arrangement.memory.pool(pool).layers:
            rows = self.rows(pool, layer)
            rows[theirs] = rows[ours]

    def pages(self, anchor: str, slots: Slots) -> torch.Tensor:
        """A copy of whole pages in canonical order: (pages, bytes behind a slot)."""
        picked = torch.from_numpy(slots).long().to(self.data.device)
        rows = self.arrangement.rows(anchor)
        parts = [self.rows(row.pool, row.layer)[picked] for row in rows]
        return torch.cat(parts, 1) if parts else self.data.new_empty((len(slots), 0))

    def _field(
        self, pool: PoolSpec, layer: int, offset: int, shape: tuple[int, ...], dtype: DType
    ) -> torch.Tensor:
        memory, size = self.arrangement.memory, dtype.size_bytes
        row = self.arrangement.row(pool, layer)
        strides = [row.stride, pool.entry.bytes]
        assert not any(n % size for n in (row.offset + offset, *strides)), (
            f"pool {pool.name}: a field of {dtype} lies across its own alignment"
        )
        extents = (
            self.arrangement.slots[pool.follows or pool.name],
            pool.entries_per_page(memory.page_tokens),
        )
        inner = torch.empty(shape, device="meta").stride()
        typed = self.data[: self.data.numel() // size * size].view(TORCH_DTYPES[dtype])
        start = typed.storage_offset() + (row.offset + offset) // size
        return typed.as_strided((*extents, *shape), (*(n // size for n in strides), *inner), start)
