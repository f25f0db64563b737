"""`--verify-restores`: some restored prefixes are recomputed while serving, and compared.

    a request resumes from a cached prefix ──sampled──▶ the oracle keeps its first logits
        a check is queued: the same prompt, computed in scratch pages
            └─▶ logits and pages are compared: alike, or a divergence

The oracle compares the logits after the prompt, and each restored page with the page that the check
computed for the same tokens. Logits show what the model read; pages show bytes that attention
hardly weighs. A page that has left the device meanwhile is not brought back to be compared.

A divergence is counted and logged with the pools whose pages differ. All that shares pages with the
prefix is quarantined. Requests that run on it are retracted and compute their tokens anew, so that
no further token comes from it. Tokens that were sent before stay sent.

Deterministic arithmetic gives equal bits, and alike means equal. Otherwise the order of summation
depends on the batch, and alike means within `RestoreBounds` (docs/INVARIANTS.md says how they came
about).
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvtide.cache import Lease, Match, TieredCache
from kvtide.engine.request import Request, RequestParams
from kvtide.layers.packing import at_slots, packing
from kvtide.spec import Encoding, ModelMemory, PoolSpec, Tier

MAX_CHECKS = 4
"""Checks that may wait or run at once: checks must not double the load of a busy server."""

MIN_PRIORITY = -(1 << 40)

LIKELY = 0.01
"""Logits of tokens with a lower probability are not compared within bounds."""

MIN_ROW = 16
"""Elements of a row at least, so that their mean difference says how far off the next one may be.
Trailing axes are joined until a row has as many."""

COMPARED_ELEMENTS = 1 << 22
"""Elements of a field that are compared at a time: bounds the memory of a comparison."""

SCALE_DTYPE = torch.float8_e8m0fnu


@dataclass(frozen=True, slots=True)
class RestoreBounds:
    """How far a restored prefix may be off the recomputed one, where sums are ordered differently.

    logprob  the log-probability of a likely token after the prompt, in nats
    outlier  `Deviation.outlier` of a page
    drift    `Deviation.drift` of a page
    eps      of what the model computes in
    """

    logprob: float
    outlier: float
    drift: float
    eps: float

    def widened(self) -> RestoreBounds:
        """As far above what was measured as the factors say."""
        return RestoreBounds(
            self.logprob * FACTOR, self.outlier * FACTOR, self.drift * DRIFT_FACTOR, self.eps
        )


FACTOR = 2.0
"""How far the bounds of log-probabilities and outliers lie above what was measured."""
DRIFT_FACTOR = 1.2
"""The same for drift. A row whose scale is halved drifts by 0.5, and must be found."""

MEASURED = {
    torch.float32: RestoreBounds(logprob=0.001, outlier=9.3, drift=0.4, eps=2.0**-23),
    torch.bfloat16: RestoreBounds(logprob=0.025, outlier=9.3, drift=0.4, eps=2.0**-7),
    torch.float16: RestoreBounds(logprob=0.025, outlier=9.3, drift=0.4, eps=2.0**-10),
}
"""The largest differences of 23 configurations in bf16 (`gpu/restore_bounds`). Other precisions
take their outlier and drift, which are relative; fp16 its log-probability too. In fp32 five
families stay below 5e-5 nats, an outlier of 3.2 and a drift of 0.002 on a CPU."""

PACKED_LOGPROB = 0.2
"""The largest log-probability difference seen where pools are packed in eight bits: an element next
to a rounding boundary changes by a whole step, and a selection by an entry."""


ROUNDED_EPS = 2.0**-3
"""`eps` of pages that a store keeps with three bits of mantissa (`?codec=fp8`)."""


def bounds_of(
    memory: ModelMemory, dtype: torch.dtype, *, rounded_pages: bool = False
) -> RestoreBounds:
    """The bounds for a model that computes in `dtype` and keeps this memory.

    `rounded_pages`: a store rounds them to eight bits. They are as far off as pages that are packed
    in eight bits, so the same bounds hold.
    """
    measured = MEASURED[dtype]
    if rounded_pages:
        measured = replace(measured, logprob=PACKED_LOGPROB, eps=max(measured.eps, ROUNDED_EPS))
    elif any(pool.entry.encoding is not Encoding.PLAIN for pool in memory.pools):
        measured = replace(measured, logprob=PACKED_LOGPROB)
    return measured.widened()


log = logging.getLogger("kvtide")


@dataclass(slots=True)
class Restore:
    """A prefix that a request resumed from, and the logits after its prompt.

    known_wrong  it shares pages with a prefix that was quarantined since
    """

    request: Request
    cached_tokens: int
    logits: Tensor
    known_wrong: bool = False


@dataclass(slots=True)
class Checks:
    """Counted since the start.

    skipped      restores that were sampled while too many checks waited
    logits_only  checks, alike or not, whose restored pages had left the device
    """

    alike: int = 0
    diverged: int = 0
    skipped: int = 0
    logits_only: int = 0


class PoolPages(NamedTuple):
    """The pages of a pool that both sides have: their numbers, and by layer which ones differ."""

    pool: PoolSpec
    pages: Tensor
    unlike: Tensor

    def __str__(self) -> str:
        layers = self.unlike.any(1).nonzero().flatten().tolist()
        columns = self.unlike.any(0).nonzero().flatten().tolist()
        first = int(self.unlike[:, columns[0]].nonzero()[0])
        return (
            f"pool {self.pool.name} differs in {len(layers)} of {len(self.pool.layers)} layers and "
            f"{len(columns)} of {len(self.pages)} pages, first in page "
            f"{int(self.pages[columns[0]])} of layer {self.pool.layers[first]}"
        )


class RestoreOracle:
    """`fraction` of restores are checked; `bounds` None means to the last bit."""

    def __init__(
        self, cache: TieredCache, fraction: float, bounds: RestoreBounds | None, seed: int = 0
    ) -> None:
        self.counts = Checks()
        self._cache = cache
        self._fraction = fraction
        self._bounds = bounds
        self._random = random.Random(seed)
        self._checks: dict[Request, Restore] = {}
        self._wrong: list[Request] = []

    def look(
        self,
        requests: Sequence[Request],
        logits: Tensor,
        submit: Callable[[RequestParams], Request],
    ) -> frozenset[Request]:
        """Take the logits after these requests' tokens; return which requests are checks.

        Checks that have ended are judged, and requests that resumed from a prefix are sampled.
        """
        checks = frozenset(request for request in requests if request in self._checks)
        for request, row in zip(requests, logits, strict=True):
            if request in checks:
                self._judge(request, row)
            elif self._is_sampled(request):
                self._begin(request, row, submit)
        return checks

    def misled(self, running: Sequence[Request], but: Sequence[Request]) -> list[Request]:
        """Requests, without `but`, that run on a prefix quarantined since the last call."""
        wrong, self._wrong = self._wrong, []
        return [
            request
            for request in running
            if request not in but and any(self._share_pages(request, other) for other in wrong)
        ]

    def _is_sampled(self, request: Request) -> bool:
        restored = request.by_tier and not request.output
        if not restored or self._random.random() >= self._fraction:
            return False
        if len(self._checks) >= MAX_CHECKS:
            self.counts.skipped += 1
            return False
        return True

    def _begin(
        self, request: Request, logits: Tensor, submit: Callable[[RequestParams], Request]
    ) -> None:
        """Queue a check. It keeps its windows and states where the request resumed."""
        cached = sum(request.by_tier.values())
        check = submit(
            RequestParams(request.params.tokens, 0, recompute=True, priority=MIN_PRIORITY)
        )
        check.prompt.checkpoints = (cached // self._cache.memory.page_tokens,)
        self._checks[check] = Restore(request, cached, logits.clone())

    def _share_pages(self, one: Request, other: Request) -> bool:
        first = self._cache.memory.page_tokens + self._cache.memory.holdback
        same_namespace = one.prompt.namespace == other.prompt.namespace
        return same_namespace and one.tokens[:first] == other.tokens[:first]

    # -- the verdict ------------------------------------------------------------------------

    def _judge(self, check: Request, logits: Tensor) -> None:
        restore = self._checks.pop(check)
        off = self._off(restore.logits, logits)
        differences = self._differences(restore, check.held)
        if all(self._cache.agreement.all_true([off is None and not differences])):
            self.counts.alike += 1
            return
        self.counts.diverged += 1
        if restore.known_wrong:
            return
        found = "; ".join(map(str, differences)) or "none of its pages on the device differ"
        pages = self._cache.quarantine(restore.request.prompt)
        self._wrong.append(restore.request)
        for other in self._checks.values():
            other.known_wrong |= self._share_pages(other.request, restore.request)
        log.error(
            "a restored prefix of %d tokens (request %d) is not what computing it gives: logits "
            "are off by %g; %s. %d pages are quarantined.",
            *(restore.cached_tokens, restore.request.number, off or 0.0, found, pages),
        )

    def _off(self, restored: Tensor, computed: Tensor) -> float | None:
        """How far apart the logits are; None if they are alike."""
        if self._bounds is None:
            same = torch.equal(restored, computed)
            return None if same else float((restored - computed).abs().max())
        off = logprob_off(restored, computed)
        return None if off <= self._bounds.logprob else off

    def _differences(self, restore: Restore, computed: Lease) -> list[PoolPages]:
        """The pools in which a restored page differs from the computed one.

        The device is read once, when all pools have been compared there.
        """
        cache = self._cache
        if cache.memory.hot_pools:
            cache.wait_for_steps()  # Their pages are read on the host.
        match = cache.match(restore.request.prompt, Tier.DEVICE)
        self.counts.logits_only += match.tokens < restore.cached_tokens
        compared = []
        for pool in compared_pools(cache.memory):
            pages, slots = common_pages(cache, pool, match, computed, restore.cached_tokens)
            if len(pages):
                unlike = [self._unlike(pool, layer, slots) for layer in pool.layers]
                compared.append(PoolPages(pool, pages, torch.stack(unlike)))
        if not compared:
            return []
        verdicts = torch.cat([pool.unlike.flatten() for pool in compared]).cpu()
        sizes = [pool.unlike.numel() for pool in compared]
        return [
            pool._replace(unlike=mine.view(pool.unlike.shape))
            for pool, mine in zip(compared, verdicts.split(sizes), strict=True)
            if mine.any()
        ]

    def _unlike(self, pool: PoolSpec, layer: int, slots: Tensor) -> Tensor:
        """Which of the pages differ in this layer, in what a layer reads of them."""
        view, device = self._cache.home_view(pool.name, layer), self._cache.config.torch_device
        unlike = [self._unlike_block(pool, view, some) for some in blocks(view, slots)]
        return torch.cat(unlike).to(device)

    def _unlike_block(self, pool: PoolSpec, view: Mapping[str, Tensor], slots: Tensor) -> Tensor:
        unlike = torch.zeros(slots.shape[1], dtype=torch.bool, device=slots.device)
        for pair in field_pairs(pool, view, slots).values():
            if self._bounds is None:
                bits = [values.flatten(1).view(torch.uint8) for values in pair]
                unlike |= (bits[0] != bits[1]).any(1)
            else:
                off = deviation(*pair, max(self._bounds.eps, pool_eps(pool)))
                unlike |= ~(off.outlier <= self._bounds.outlier)  # Also where it is not a number.
                unlike |= ~(off.drift <= self._bounds.drift)
        return unlike


# -- comparing -----------------------------------------------------------------------------------


def logprob_off(restored: Tensor, computed: Tensor) -> float:
    """The largest difference of the log-probability of a likely token, or of a side's argmax."""
    one, other = (torch.log_softmax(row.float(), -1) for row in (restored, computed))
    likely = (one.exp() > LIKELY) | (other.exp() > LIKELY)
    likely[one.argmax()] = likely[other.argmax()] = True
    return float((one - other)[likely].abs().max())


def compared_pools(memory: ModelMemory) -> list[PoolSpec]:
    """Pools whose restored pages can be compared.

    Optional pools are left out: a page may lack them, and no token depends on them.
    """
    return [pool for pool in memory.at_rest.pools if pool.layers and pool.reuse.required]


def common_pages(
    cache: TieredCache, pool: PoolSpec, match: Match, computed: Lease, tokens: int
) -> tuple[Tensor, Tensor]:
    """The pages of the first `tokens` that both sides have at home, and their slots.

    Slots are two rows: of the restored pages and of the computed ones.
    """
    pages = tokens // cache.memory.page_tokens
    tables = torch.full((2, pages), -1)
    sides = cache.matched_slots(match, pool.name), cache.page_table(computed, pool.name)
    for table, side in zip(tables, sides, strict=True):
        table[: len(side)] = torch.from_numpy(side[:pages].astype("int64"))
    numbers = (tables >= 0).all(0).nonzero().flatten()
    on = torch.device("cpu") if pool.home is Tier.HOST else cache.config.torch_device
    return numbers, tables[:, numbers].to(on)


def blocks(view: Mapping[str, Tensor], slots: Tensor) -> list[Tensor]:
    """The slots in parts whose fields have few enough elements to be compared at a time."""
    largest = max(math.prod(field.shape[1:]) for field in view.values())
    return list(slots.split(max(1, COMPARED_ELEMENTS // largest), 1))


def field_pairs(
    pool: PoolSpec, view: Mapping[str, Tensor], slots: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """By field, what a layer reads of the restored and of the computed pages: (pages, …)."""
    packed = packing(pool.entry)
    restored, computed = (
        packed.unpack({name: at_slots(field, side) for name, field in view.items()})
        for side in slots
    )
    return {name: (restored[name], computed[name]) for name in restored}


def pool_eps(pool: PoolSpec) -> float:
    """The `eps` of the coarsest values of a pool."""
    kept = (getattr(torch, field.dtype.torch_name) for field in pool.entry.fields)
    values = (dtype for dtype in kept if dtype.is_floating_point and dtype is not SCALE_DTYPE)
    return max(torch.finfo(dtype).eps for dtype in values)


class Deviation(NamedTuple):
    """How far restored pages are off the computed ones; one number a page.

    A row is one vector of an entry (see MIN_ROW). Both numbers are the largest of the page.

    outlier  an element's difference, over the mean difference of the others in its row plus eps/4
             of the element or of the row's root mean square, whichever is larger. Noise moves all
             elements of a row alike; a flipped bit moves one.
    drift    the root mean square of a row's differences, over that of the row or of the page,
             whichever is larger. A wrong row has about 1.
    """

    outlier: Tensor
    drift: Tensor


def deviation(restored: Tensor, computed: Tensor, eps: float) -> Deviation:
    """Compare pages of one field."""
    ours, theirs = _rows(restored), _rows(computed)
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    off = torch.where(same, 0.0, (ours - theirs).abs())
    size = theirs.nan_to_num(0.0, 0.0, 0.0).abs()
    row = _rms(size, -1)
    others = (off.sum(-1, keepdim=True) - off) / max(1, off.shape[-1] - 1)
    noise = others.clamp(min=0.0) + eps / 4 * torch.maximum(size, row)
    outlier = torch.where(same, 0.0, off / noise)
    drift = torch.where(same.all(-1, keepdim=True), 0.0, _rms(off, -1) / row.maximum(_rms(row, -2)))
    return Deviation(_largest(outlier), _largest(drift))


def _rows(values: Tensor) -> Tensor:
    """(pages, rows, elements of a row)"""
    while values.dim() > 2 and values.shape[-1] < MIN_ROW:
        values = values.flatten(-2)
    return values.float().flatten(1, -2) if values.dim() > 2 else values.float().unsqueeze(1)


def _rms(values: Tensor, axis: int) -> Tensor:
    return values.square().mean(axis, keepdim=True).sqrt()


def _largest(values: Tensor) -> Tensor:
    """Of each page; not a number where one is none."""
    return values.flatten(1).amax(1)
