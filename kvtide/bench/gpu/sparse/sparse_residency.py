"""Hot residency beside pages that are all on the device: decode, first tokens, prefill.

Models have random weights, and contexts a random KV history that no prefill computes. Requests are
served by real engines: a decode step is timed from one result to the next. What indexers select is
replaced by choices of a given overlap (`driven_choices`), or left as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from kvtide.bench.gpu.engine_bed import (
    Bed,
    alternating,
    flush,
    median_s,
    start,
    step_s,
    stop,
    ttft_s,
)
from kvtide.bench.gpu.shapes import Shape
from kvtide.bench.gpu.sparse.driven_choices import (
    OWN,
    DrivenChoices,
    OverlapFraction,
    attentions_with_indexer,
    driving,
)
from kvtide.bench.gpu.sparse.host_span import huge_fraction, narrowed
from kvtide.bench.gpu.sparse.hot_reads import HotReading, HotReads
from kvtide.byte_sizes import format_bytes
from kvtide.cache import Layout, TieredCache
from kvtide.engine import Engine, RequestParams
from kvtide.layers.packing import packing
from kvtide.spec import ModelMemory, PoolSpec, Tier
from kvtide.spec.families import KVDType
from kvtide.spec.residency import ALL_RESIDENT, Residency, hot_bytes
from kvtide.spec.sizing import bytes_for
from kvtide.tiers import Buffers
from kvtide.transfer.strided import Way

CHECKPOINTS = 4
"""Windows and states of a context have slots for so many: a running request takes up to three."""
OVERLAPS: tuple[OverlapFraction, ...] = (0.95, 0.9, 0.8, OWN)
PREFILL_OVERLAPS: tuple[OverlapFraction, ...] = (0.95, OWN)


@dataclass(frozen=True, slots=True)
class SparseShape:
    """A model and the size of its hot buffers. `what` describes the slice, for tables."""

    shape: Shape
    hot: int
    what: str
    kv: KVDType | None = KVDType.FP8

    @property
    def name(self) -> str:
        return self.shape.name

    def bed(self, device: torch.device, dtype: torch.dtype, *, hot: bool) -> Bed:
        resident = Residency(self.hot) if hot else ALL_RESIDENT
        return Bed(self.shape.build(device, dtype, self.kv, resident), device)


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """`resident`: contexts that fit the device tier if all their pages are there.

    max_hot    hot contexts, at the most
    steps      that are timed, after as many to warm up
    host_span  bytes of host memory that rows of a layer come from; None: where its pages are
    """

    context: int = 131_072
    resident: int = 16
    max_hot: int = 128
    host_bytes: int = 80 << 30
    steps: int = 32
    host_layout: Layout = Layout.PAGE_FIRST_DIRECT
    host_span: int | None = None

    @property
    def answer_tokens(self) -> int:
        return 2 * self.steps * (len(OVERLAPS) + 1) + 8

    def longest(self, memory: ModelMemory) -> int:
        """Tokens of a context when its requests end, in whole pages."""
        page = memory.page_tokens
        return -(-(self.context + self.answer_tokens + 2 * page) // page) * page

    def checkpoint_tokens(self, memory: ModelMemory) -> int:
        return max(memory.page_tokens, self.context // CHECKPOINTS)

    def device_bytes(self, memory: ModelMemory, contexts: int) -> int:
        """What an engine takes for so many contexts: pages, and hot buffers."""
        pages = self.longest(memory) // memory.page_tokens
        resident, distance = memory.in_device_pages, self.checkpoint_tokens(memory)
        return bytes_for(resident, contexts * pages, distance) + hot_bytes(memory, contexts, pages)

    def contexts(self, resident: ModelMemory, hot: ModelMemory) -> int:
        """How many hot ones fit the device bytes of the resident ones, and the host."""
        budget = self.device_bytes(resident, self.resident)
        each = self.longest(hot) * hot.history_bytes_per_token()
        max_hot = max(1, min(self.max_hot, int(self.host_bytes // each)))
        fitting = (n for n in range(max_hot, 0, -1) if self.device_bytes(hot, n) <= budget)
        return next(fitting, 1)


@dataclass(frozen=True, slots=True)
class StepResult:
    """A decode step of a batch; `overlap` of its choices with those of the step before.

    hit_rate      of choices, those that were on the device; None where all pages are
    layer_misses  entries that a layer swapped in per step, all sequences together
    """

    residency: str
    batch: int
    overlap: OverlapFraction
    seconds: float
    hit_rate: float | None = None
    layer_misses: float = 0.0
    missing_bytes: float = 0.0

    @property
    def tokens_s(self) -> float:
        return self.batch / self.seconds

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_s": self.tokens_s}


@dataclass(frozen=True, slots=True)
class SumResult:
    """A hot step beside the resident step of its batch, and beside reading what it missed.

    row_bytes_s  speed of the copies of a swap-in alone
    """

    hot: StepResult
    resident_s: float
    row_bytes_s: float

    @property
    def read_s(self) -> float:
        return self.hot.missing_bytes / self.row_bytes_s

    @property
    def of_larger(self) -> float:
        return self.hot.seconds / max(self.resident_s, self.read_s)

    @property
    def of_sum(self) -> float:
        return self.hot.seconds / (self.resident_s + self.read_s)

    @property
    def served_bytes_s(self) -> float | None:
        """Speed of rows in the served step, if all of its further time is theirs; None if it has
        none."""
        more_s = self.hot.seconds - self.resident_s
        return self.hot.missing_bytes / more_s if more_s > 0 else None

    def as_json(self) -> dict[str, Any]:
        derived = ("read_s", "of_larger", "of_sum", "served_bytes_s")
        numbers = {"all_s": self.resident_s, "row_bytes_s": self.row_bytes_s}
        return self.hot.as_json() | numbers | {name: getattr(self, name) for name in derived}


def residency_name(memory: ModelMemory) -> str:
    hot = memory.hot_pools
    return f"hot:{hot[0].hot}" if hot else "all"


# -- a random history ---------------------------------------------------------------------------


def fill(cache: TieredCache, unique_pages: int = 2048) -> None:
    """Random values in all pages of every pool, where it lives; so many of them differ."""
    memory = cache.memory
    for pool in memory.pools:
        tier = cache.hardware.device if pool.hot is None else cache.hardware.host
        some = _packed_rows(pool, memory.page_tokens, unique_pages, cache.config.torch_device)
        _repeat(tier, pool, some)


def _packed_rows(
    pool: PoolSpec, page_tokens: int, pages: int, device: torch.device
) -> torch.Tensor:
    """(pages, bytes of a row)."""
    entries = pool.row_bytes(page_tokens) // max(1, pool.entry.bytes)
    fields: dict[str, torch.Tensor] = {}
    for part in packing(pool.entry).parts:
        values = torch.randn(pages * entries, *part.logical.shape, device=device)
        if pool.tail_entries is not None:
            values = values.abs() + 1  # Compressor states hold sums of weights.
        fields |= part.pack(values)
    parts = [fields[f.name].contiguous().view(torch.uint8).flatten(1) for f in pool.entry.fields]
    return torch.cat(parts, 1).view(pages, -1) if parts else torch.empty(pages, 0)


def _repeat(tier: Buffers, pool: PoolSpec, some: torch.Tensor) -> None:
    for layer in pool.layers:
        rows = tier.rows(pool.name, layer)
        some = some.to(rows.device)
        for first in range(0, len(rows), len(some)):
            part = rows[first : first + len(some)]
            part[:, : some.shape[1]] = some[: len(part)]


def commit(cache: TieredCache, prompts: Iterable[Sequence[int]], pages: int = 2048) -> None:
    """Put pages of these prompts into the cache, all of them where they live."""
    fill(cache, pages)
    for tokens in prompts:
        lease = cache.reserve(cache.match(cache.prompt(tokens)))
        assert lease is not None, "the capacity holds all prompts"
        cache.commit(lease, len(tokens))
        cache.retain(lease)
        cache.release(lease)
        cache.poll()


@contextmanager
def driven(bed: Bed, sequences: int) -> Iterator[DrivenChoices]:
    """What engines of this bed select meanwhile, in steps of up to so many sequences."""
    pool = next(p for p in bed.model.memory.pools if p.selected is not None)
    sizes = sequences, pool.selected or 1, pool.tokens_per_entry
    choices = DrivenChoices(len(attentions_with_indexer(bed.model)), *sizes, bed.device)
    with driving(bed.model, choices):
        yield choices


# -- decode -------------------------------------------------------------------------------------


class DecodeBed:
    """An engine with so many contexts in its cache, whose requests decode in batches."""

    def __init__(
        self, bed: Bed, engine: Engine, choices: DrivenChoices, load: DecodeLoad, contexts: int
    ) -> None:
        self._bed, self._engine, self._choices, self._load = bed, engine, choices, load
        page = bed.model.memory.page_tokens
        assert load.context % page == 0, "a context has whole pages"
        vocabulary, length = bed.model.vocabulary, load.context + 1
        # `Bed.prompt` takes longer than serving it.
        random = np.random.default_rng(500).integers(0, vocabulary, (contexts, length))
        self._prompts = [tuple(tokens.tolist()) for tokens in random]
        commit(engine.cache, self._prompts, -(-load.context // page))
        flush(engine)

    @property
    def host(self) -> str:
        """The memory that rows come from, in words."""
        if self._load.host_span:
            return f"rows of a layer come from {format_bytes(self._load.host_span)}"
        data = self._engine.cache.hardware.host.data
        huge = huge_fraction(data)
        known = "not known how much of it" if huge is None else f"{huge:.0%} of it"
        return f"rows come from {format_bytes(data.numel())}, {known} in huge pages"

    def measure(self, batch: int, overlaps: Sequence[OverlapFraction]) -> Iterator[StepResult]:
        """A step of the first contexts, once for each of these."""
        answer = self._load.answer_tokens
        requests = [RequestParams(tokens, answer) for tokens in self._prompts[:batch]]
        try:
            begun = start(self._engine, requests)
            found = {sum(request.by_tier.values()) for request in begun}
            assert found == {self._load.context}, f"{found} of {self._load.context} tokens cached"
            for overlap in overlaps:
                yield self._measured(batch, overlap)
        finally:
            stop(self._engine)

    def _measured(self, batch: int, overlap: OverlapFraction) -> StepResult:
        self._choices.keep(overlap)
        bed, engine, steps = self._bed, self._engine, self._load.steps
        step_s(bed, engine, steps)
        reading = HotReading(engine)
        seconds = step_s(bed, engine, steps)
        reads = reading.per(steps)
        return StepResult(
            *(residency_name(bed.model.memory), batch, overlap, seconds),
            *(reads.hit_rate, reads.layer_misses, reads.missing_bytes),
        )


@contextmanager
def decode_bed(bed: Bed, load: DecodeLoad, contexts: int) -> Iterator[DecodeBed]:
    """With room for so many contexts; a hot one has them on the host too."""
    memory = bed.model.memory
    longest = load.longest(memory)
    capacity = contexts * longest
    with (
        driven(bed, contexts) as choices,
        bed.engine(
            capacity,
            capacity if memory.hot_pools else 0,
            max_running=contexts,
            tokens_per_checkpoint=load.checkpoint_tokens(memory),
            longest_tokens=longest,
            host_layout=load.host_layout,
        ) as engine,
    ):
        decoding = DecodeBed(bed, engine, choices, load, contexts)
        with narrowed(engine, load.host_span) if load.host_span else nullcontext():
            yield decoding


# -- first token --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FirstTokenResult:
    """Seconds from a prefix on the host to the first token.

    overlap       of a token's choices with those of the one before
    loaded_bytes  before the step, or beside it
    device_s      the same with all on the device that is loaded: the step alone
    reads         of one request, in the step
    """

    residency: str
    context: int
    new_tokens: int
    overlap: OverlapFraction
    seconds: float
    loaded_bytes: int
    device_s: float
    reads: HotReads

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def first_token(
    bed: Bed, context: int, new_tokens: int, rounds: int, overlaps: Sequence[OverlapFraction]
) -> Iterator[FirstTokenResult]:
    """Once for each overlap."""
    memory = bed.model.memory
    page = memory.page_tokens
    longest = context + new_tokens + 2 * page
    capacity = 2 * longest
    prompt = bed.prompt(context + new_tokens, 77)
    with (
        driven(bed, 2) as choices,
        bed.engine(
            capacity,
            capacity,
            max_running=2,
            tokens_per_checkpoint=max(page, context // CHECKPOINTS),
            longest_tokens=longest,
        ) as engine,
    ):
        commit(engine.cache, [prompt], -(-context // page))

        def prefix_s(*flushed: Tier) -> float:
            flush(engine, *flushed)
            seconds, request = ttft_s(engine, prompt)
            found = request.by_tier
            assert sum(found.values()) >= context - page, f"{found} of {context} tokens cached"
            assert bool(flushed) == bool(found.get(Tier.HOST)), f"the prefix was in {found}"
            return seconds

        for overlap in overlaps:
            choices.keep(overlap)
            for _ in range(2):
                prefix_s(Tier.DEVICE)
            before, reading = _loaded(engine), HotReading(engine)
            median = median_s(lambda: prefix_s(Tier.DEVICE), rounds)
            flush(engine)
            loaded, reads = (_loaded(engine) - before) // rounds, reading.per(rounds)
            device_s = median_s(prefix_s, rounds)
            what = residency_name(memory), context, new_tokens, overlap
            yield FirstTokenResult(*what, median, loaded, device_s, reads)


def _loaded(engine: Engine) -> int:
    return engine.cache.stats().moved_bytes.get(Way.LOAD.name.lower(), 0)


# -- prefill ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """Seconds of an uncached prompt, hot and with all pages on the device and no host tier.

    overlap  of a token's choices with those of the one before
    reads    of the hot one
    """

    tokens: int
    overlap: OverlapFraction
    hot_s: float
    all_s: float
    reads: HotReads

    @property
    def relative_speed(self) -> float:
        return self.all_s / self.hot_s

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"relative_speed": self.relative_speed}


def prefill(
    hot: Bed,
    resident: Bed,
    tokens: int,
    rounds: int,
    overlaps: Sequence[OverlapFraction],
    chunk_tokens: int = 8192,
) -> Iterator[PrefillResult]:
    """Once for each overlap."""
    page = hot.model.memory.page_tokens
    capacity = 2 * (tokens + 4 * page)
    sizes: dict[str, Any] = {"chunk_tokens": chunk_tokens, "max_running": 2}
    longest = tokens + 2 * page
    seeds = iter(range(20_000, 1_000_000))

    def prefill_s(bed: Bed, engine: Engine) -> float:
        flush(engine, Tier.DEVICE, Tier.HOST)
        prompt = bed.prompt(tokens, next(seeds))
        bed.synchronize()
        return ttft_s(engine, prompt)[0]

    with (
        driven(hot, 2) as ours,
        driven(resident, 2) as theirs,
        hot.engine(capacity, capacity, **sizes, longest_tokens=longest) as on,
        resident.engine(capacity, 0, **sizes) as off,
    ):
        for overlap in overlaps:
            ours.keep(overlap)
            theirs.keep(overlap)
            for _ in range(min(2, rounds)):
                prefill_s(hot, on)
                prefill_s(resident, off)
            reading = HotReading(on)
            hot_s, all_s = alternating(
                [lambda: prefill_s(hot, on), lambda: prefill_s(resident, off)], rounds
            )
            yield PrefillResult(tokens, overlap, hot_s, all_s, reading.per(rounds))
