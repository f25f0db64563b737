"""Running states as they were before the drafts, for requests whose drafts are not all accepted.

Entries of rejected tokens need no undoing: nothing reads beyond a request's computed tokens, and
the next step overwrites them. A running state (Mamba2, gated delta, KDA, convolutions, open blocks
of compressed streams) has the rejected tokens in it. It goes back to what it was before the step;
the next step computes the accepted tokens again, beside the new ones. That costs one copy of a
request's states per verify step, and up to k rows in the step after a rejection.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtide.cache import TieredCache
from kvtide.engine.request import Request


class SavedStates:
    """`needed`: the model has running states at all, on any rank."""

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self._pools = [p for p in cache.memory.pools if p.tail_entries is not None]
        (none,) = cache.agreement.all_true([not self._pools])
        self.needed = not none
        self._rows: dict[Request, int] = {}
        self._saved: list[tuple[Tensor, Tensor, Tensor]] = []

    def save(self, requests: Sequence[Request]) -> None:
        """Copy the states after the computed tokens of these requests, for `restore`."""
        self._rows, self._saved = {}, []
        if not requests or not self.needed:
            return
        self._rows = {request: row for row, request in enumerate(requests)}
        for pool in self._pools:
            slots = self._slots_of(pool.follows or pool.name, requests)
            for layer in pool.layers:
                for field in self._cache.view(pool.name, layer).values():
                    self._saved.append((field, slots, field[slots]))

    def restore(self, requests: Sequence[Request]) -> None:
        """Put the states of these requests back."""
        if not requests or not self._saved:
            return
        device = self._cache.config.torch_device
        rows = torch.tensor([self._rows[request] for request in requests], device=device)
        for field, slots, saved in self._saved:
            field[slots[rows]] = saved[rows]

    def _slots_of(self, anchor: str, requests: Sequence[Request]) -> Tensor:
        page = self._cache.memory.page_tokens
        slots = [
            int(self._cache.page_table(request.held, anchor)[(request.computed - 1) // page])
            for request in requests
        ]
        assert min(slots) >= 0, f"{anchor}: a request has no state after its computed tokens"
        return torch.tensor(slots, device=self._cache.config.torch_device)
