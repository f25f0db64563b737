"""Restores that are checked while serving: some prefixes are computed again, and compared.

    a request goes on from a kept prefix ──drawn──▶ its first logits are remembered
        a check with the same tokens is queued, which computes everything anew
            └─▶ its logits are compared: alike, or a divergence

A divergence is counted and logged with the pools whose pages differ. All that shares pages with the
prefix is quarantined, and who runs on it computes its tokens anew and goes on from there, so that
no further token comes from it. Tokens that were told before stay told.

With deterministic arithmetic alike means equal to the last bit. Otherwise sums are ordered by the
batch they are computed in, and alike means close: see TOLERANCES.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.cache import Lease, TieredCache, TransferError
from kvtide.engine.request import Request, RequestParams
from kvtide.layers.packing import at_slots, packing
from kvtide.spec import PoolSpec

MAX_CHECKS = 4
"""Checks that may wait or run at once: a busy server must not be doubled."""

MIN_PRIORITY = -(1 << 40)

TOLERANCES = {torch.float32: 0.02, torch.bfloat16: 0.5, torch.float16: 0.2}
"""How far a log-probability of a likely token may be off, by what is computed in."""

LIKELY = 0.01
"""Tokens less likely than this are not looked at, where arithmetic is not deterministic."""

log = logging.getLogger("kvtide")


@dataclass(slots=True)
class Restore:
    """A prefix that a request went on from, and what the model said after its prompt.

    known_wrong  it shares pages with one that was quarantined since
    """

    request: Request
    cached_tokens: int
    logits: Tensor
    known_wrong: bool = False


@dataclass(slots=True)
class Checks:
    """Counted since the start. `skipped` restores were drawn while too many checks waited."""

    alike: int = 0
    diverged: int = 0
    skipped: int = 0


class Oracle:
    """`share` of restores are checked; `tolerance` None means to the last bit."""

    def __init__(
        self, cache: TieredCache, share: float, tolerance: float | None, seed: int = 0
    ) -> None:
        self.counts = Checks()
        self._cache = cache
        self._share = share
        self._tolerance = tolerance
        self._draw = random.Random(seed)
        self._checks: dict[Request, Restore] = {}
        self._wrong: list[Request] = []

    def look(
        self,
        requests: Sequence[Request],
        logits: Tensor,
        submit: Callable[[RequestParams], Request],
    ) -> frozenset[Request]:
        """What the model says after these requests' tokens; which of them are checks of ours.

        Checks that are through are judged, and requests that went on from a prefix are drawn.
        """
        checks = frozenset(request for request in requests if request in self._checks)
        for request, row in zip(requests, logits, strict=True):
            if request in checks:
                self._judge(request, row)
            elif self._is_drawn(request):
                params = RequestParams(
                    request.params.tokens, 0, recompute=True, priority=MIN_PRIORITY
                )
                cached = sum(request.by_tier.values())
                self._checks[submit(params)] = Restore(request, cached, row.clone())
        return checks

    def misled(self, running: Sequence[Request], but: Sequence[Request]) -> list[Request]:
        """Those who run on what was quarantined since the last call, but for these."""
        wrong, self._wrong = self._wrong, []
        return [
            request
            for request in running
            if request not in but and any(self._share_pages(request, other) for other in wrong)
        ]

    def _is_drawn(self, request: Request) -> bool:
        restored = request.by_tier and not request.output
        if not restored or self._draw.random() >= self._share:
            return False
        if len(self._checks) >= MAX_CHECKS:
            self.counts.skipped += 1
            return False
        return True

    def _share_pages(self, one: Request, other: Request) -> bool:
        first = self._cache.memory.page_tokens + self._cache.memory.holdback
        same_namespace = one.prompt.namespace == other.prompt.namespace
        return same_namespace and one.tokens[:first] == other.tokens[:first]

    def _judge(self, check: Request, logits: Tensor) -> None:
        restore = self._checks.pop(check)
        off = self._off(restore.logits, logits)
        if all(self._cache.agreement.all_true([off is None])):
            self.counts.alike += 1
            return
        self.counts.diverged += 1
        if restore.known_wrong:
            return
        found = "; ".join(self._differences(restore, check.held)) or "no page of it could be found"
        pages = self._cache.quarantine(restore.request.prompt)
        self._wrong.append(restore.request)
        for other in self._checks.values():
            other.known_wrong |= self._share_pages(other.request, restore.request)
        log.error(
            "a restored prefix of %d tokens (request %d) gave other logits than computing it, "
            "off by %g: %s. %d pages are quarantined.",
            *(restore.cached_tokens, restore.request.number, off or 0.0, found, pages),
        )

    def _off(self, restored: Tensor, computed: Tensor) -> float | None:
        """How far apart the logits are; None if they are alike."""
        if self._tolerance is None:
            same = torch.equal(restored, computed)
            return None if same else float((restored - computed).abs().max())
        ours, theirs = (torch.log_softmax(row, -1) for row in (restored, computed))
        likely = (ours.exp() > LIKELY) | (theirs.exp() > LIKELY)
        likely[ours.argmax()] = likely[theirs.argmax()] = True
        off = float((ours - theirs)[likely].abs().max())
        return None if off <= self._tolerance else off

    # -- which pages ------------------------------------------------------------------------

    def _differences(self, restore: Restore, computed: Lease) -> list[str]:
        """Per pool, where what was restored differs from what was computed."""
        cache, prompt = self._cache, restore.request.prompt
        match = cache.match(prompt)
        lease = cache.reserve(match, match.tokens)
        if lease is None:
            return []
        cache.load(lease)
        try:
            for layer in sorted({layer for pool in cache.memory.pools for layer in pool.layers}):
                cache.wait(lease, layer)
            pages = min(restore.cached_tokens, match.tokens) // cache.memory.page_tokens
            return list(self._compared(lease, computed, pages))
        except TransferError as error:
            return [f"its pages could not be loaded again ({error})"]
        finally:
            cache.release(lease)

    def _compared(self, restored: Lease, computed: Lease, pages: int) -> Iterator[str]:
        cache = self._cache
        for pool in cache.memory.at_rest.pools:
            tables = [
                torch.from_numpy(cache.page_table(lease, pool.name)[:pages].astype("int64"))
                for lease in (restored, computed)
            ]
            both = ((tables[0] >= 0) & (tables[1] >= 0)).nonzero().flatten()
            slots = [table[both].to(cache.config.torch_device) for table in tables]
            places = [
                (layer, int(both[page]))
                for layer in pool.layers
                for page in self._unlike(pool, layer, slots)
            ]
            if places:
                layers = len({layer for layer, _ in places})
                numbers = sorted({page for _, page in places})
                yield (
                    f"pool {pool.name} differs in {layers} of {len(pool.layers)} layers and "
                    f"{len(numbers)} of {len(both)} pages, first in page {numbers[0]} of layer "
                    f"{min(layer for layer, page in places if page == numbers[0])}"
                )

    def _unlike(self, pool: PoolSpec, layer: int, slots: Sequence[Tensor]) -> list[int]:
        """Which of the pages differ in this layer, in what a layer sees of them."""
        unlike = torch.zeros(len(slots[0]), dtype=torch.bool)
        view = self._cache.view(pool.name, layer)
        both = [
            packing(pool.entry).unpack({name: at_slots(field, at) for name, field in view.items()})
            for at in slots
        ]
        for name in both[0]:
            ours, theirs = (values[name].flatten(1).float().cpu() for values in both)
            if self._tolerance is None:
                unlike |= (ours != theirs).any(1)
            else:
                unlike |= (ours - theirs).norm(dim=1) > self._tolerance * (
                    1e-6 + theirs.norm(dim=1)
                )
        return unlike.nonzero().flatten().tolist()
