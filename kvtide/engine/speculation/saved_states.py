"""Recurrent states as they were before the drafts, for requests whose drafts are not all accepted.

Entries of rejected tokens need no undoing: nothing reads beyond a request's computed tokens, and
the next step overwrites them. A recurrent state (Mamba2, gated delta, KDA, convolutions, open
blocks of compressed streams) has the rejected tokens in it. It goes back to what it was before the
step; the next step computes the accepted tokens again, beside the new ones. That costs one copy of
a request's states per verify step, and up to k rows in the step after a rejection.

States are small, and every layer has its own: on a GPU all copies of a batch are one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtide.cache import TieredCache
from kvtide.engine.graphs.graph_capture import GraphCapture, Wait, graph_capture, no_wait
from kvtide.engine.page_tables import PageTables
from kvtide.engine.request import Request
from kvtide.layers.packing import plain

Slots = NDArray[np.int32]
"""(anchors, requests)."""


class SavedStates:
    """`needed`: the model has recurrent states at all, on any rank."""

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self._pools = [p for p in cache.memory.pools if p.tail_entries is not None]
        self._anchors = sorted({pool.follows or pool.name for pool in self._pools})
        (none,) = cache.agreement.all_true([not self._pools])
        self.needed = not none
        self._tables = PageTables(cache)
        self._capture = graph_capture(cache.config.torch_device)
        self._copies: dict[int, StateCopies] = {}
        self._last: StateCopies | None = None
        self._rows: dict[Request, int] = {}

    def save(self, requests: Sequence[Request]) -> None:
        """Copy the states after the computed tokens of these requests, for `restore`."""
        self._last, self._rows = None, {request: row for row, request in enumerate(requests)}
        if not requests or not self._pools:
            return
        slots = np.array([self._slots_of(request) for request in requests], np.int32).T
        size = 1 << (len(requests) - 1).bit_length()
        if size not in self._copies:
            self._copies[size] = StateCopies(self._capture, self._fields(), size, slots)
        self._last = self._copies[size]
        self._last.save(slots)

    def restore(self, requests: Sequence[Request]) -> None:
        """Put the states of these requests back."""
        if requests and self._last is not None:
            self._last.restore(np.array([self._rows[request] for request in requests]))

    def _fields(self) -> list[tuple[int, Tensor]]:
        """Every field of every state, with the number of its anchor."""
        return [
            (self._anchors.index(pool.follows or pool.name), plain(field))
            for pool in self._pools
            for layer in pool.layers
            for field in self._cache.view(pool.name, layer).values()
        ]

    def _slots_of(self, request: Request) -> list[int]:
        """By anchor, the slot of the state after the computed tokens."""
        _, table = self._tables.of(request.held)
        page = (request.computed - 1) // self._cache.memory.page_tokens
        slots = [int(table[anchor][page]) for anchor in self._anchors]
        assert min(slots) >= 0, f"{self._anchors}: no state after the computed tokens"
        return slots


class StateCopies:
    """Copies of the states of up to `size` requests, there and back.

    Fewer requests are padded with the first one. Capturing may run both, with the given slots: what
    is put back then is what was just saved.
    """

    def __init__(
        self, capture: GraphCapture, fields: list[tuple[int, Tensor]], size: int, slots: Slots
    ) -> None:
        self._fields, self._size = fields, size
        self._saved = [field.new_empty(size, *field.shape[1:]) for _, field in fields]
        self._there = capture.input_buffer(len(slots) * size)
        self._back = capture.input_buffer((1 + len(slots)) * size)
        self._slots = slots
        self._send_there()
        self._send_back(np.arange(slots.shape[1]))
        self._save = capture.capture(self._copy_there, "states", 1, per_layer=False)
        self._restore = capture.capture(self._copy_back, "states", 1, per_layer=False)

    def save(self, slots: Slots) -> None:
        self._slots = slots
        self._send_there()
        self._save.replay(no_wait)

    def restore(self, rows: NDArray[np.int64]) -> None:
        """Of these of the saved requests."""
        self._send_back(rows)
        self._restore.replay(no_wait)

    def _send_there(self) -> None:
        self._there.open().reshape(-1, self._size)[:] = self._padded(self._slots)
        self._there.send()

    def _send_back(self, rows: NDArray[np.int64]) -> None:
        numbers = self._back.open().reshape(-1, self._size)
        numbers[0], numbers[1:] = self._padded(rows), self._padded(self._slots[:, rows])
        self._back.send()

    def _padded(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """With the first one at the end, again and again."""
        missing = self._size - numbers.shape[-1]
        return np.concatenate([numbers, *[numbers[..., :1]] * missing], axis=-1)

    def _copy_there(self, wait: Wait) -> Tensor:
        slots = self._there.on_device.view(-1, self._size).long()
        for (anchor, field), saved in zip(self._fields, self._saved, strict=True):
            torch.index_select(field, 0, slots[anchor], out=saved)
        return slots[:1, 0]

    def _copy_back(self, wait: Wait) -> Tensor:
        rows, *slots = self._back.on_device.view(-1, self._size).long()
        for (anchor, field), saved in zip(self._fields, self._saved, strict=True):
            field.index_copy_(0, slots[anchor], saved.index_select(0, rows))
        one: Tensor = rows[:1]
        return one
