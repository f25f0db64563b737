"""Tail rows: where a peer writes the last page of a prompt, which is mostly not full.

A page that is not full belongs to one request: no match finds it, and part of it (state within a
page) exists on the device alone. So it lands beside the host's pages, in a row that has all pools
of the memory, and is copied to the request's own slots when that is admitted.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from kvtide.spec import ModelMemory, Tier
from kvtide.tiers.arena import Arena, host_arena
from kvtide.tiers.buffers import Buffers
from kvtide.tiers.layout import Arrangement, Layout, pieces
from kvtide.transfer.strided import PieceTable, Reference, Strided, Way
from kvtide.transfer.triton_copies import PageCopy, page_copy


class TailRows:
    """So many tails at a time. `homes` are the buffers that forward passes read, by tier."""

    def __init__(
        self,
        memory: ModelMemory,
        rows: int,
        homes: Mapping[Tier, Buffers],
        *,
        pinned: bool,
        shared: bool,
    ) -> None:
        slots = {anchor.name: rows for anchor in memory.anchors}
        arrangement = Arrangement(memory, slots, Layout.PAGE_FIRST_DIRECT)
        self.rows = rows
        self.arena: Arena = host_arena(arrangement.bytes, pinned, shared=shared)
        self.buffers = Buffers(arrangement, self.arena.data)
        self._device = homes[Tier.DEVICE].data.device
        self._writes_host = bool(memory.hot_pools)
        layers = range(memory.end_layer)
        self._tables = {
            anchor.name: PieceTable.of(
                Way.LOAD,
                self.buffers,
                homes[anchor.home],
                [pieces(arrangement, homes[anchor.home].arrangement, anchor.name, layers)],
            )
            for anchor in memory.anchors
        }
        self._on_host = Reference()
        self._on_device: Mapping[str, PageCopy] = {}
        if self._device.type == "cuda":
            self._on_device = {
                anchor.name: page_copy(self._tables[anchor.name], self._device)
                for anchor in memory.anchors
                if anchor.home is Tier.DEVICE
            }

    def copy(self, row: int, slots: Mapping[str, int]) -> None:
        """Copy a tail to a slot of every anchor, behind the work that is queued on the device.

        By a kernel: the next step must not wait for prefixes that the copy engines are loading.
        """
        if self._writes_host and self._device.type == "cuda":
            # The host's slots are written at once, and a running step may still use them.
            torch.cuda.current_stream(self._device).synchronize()
        for anchor, slot in slots.items():
            if anchor in self._on_device:
                self._on_device[anchor](row, slot)
                continue
            index = np.array([[row], [slot]], np.int64)
            for _ in self._on_host.issue([Strided(self._tables[anchor], *index)], 1):
                pass
