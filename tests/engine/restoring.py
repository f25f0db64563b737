"""What the proof of restoring stands on: conversations, their answers, and a cache that is watched.

`script` is what is asked: the same conversations for all, so that what a fresh engine without
a cache answers (`alone`) is computed once per family and compared with many times.

`Stand` serves them from memory so small that pages come and go all the time, and makes whatever is
wrong about that show: slots without an owner are full of poison; copies are done by hand, as late
as a layer's `wait` allows or when a seeded draw says so, and hence the same in every run; every
admission is compared with two records of what should be found.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache as cached
from pathlib import Path
from typing import Any

import torch

from kvtide.cache import CacheConfig, Hardware, Lease, Match, Progress, TieredCache, Tokens
from kvtide.cache.hardware import hot_shapes
from kvtide.engine import Engine, Request, RequestParams, SampledToken, SamplingParams
from kvtide.engine.speculation.drafter import Drafter
from kvtide.index import Placement
from kvtide.index.events import Event, EventKind
from kvtide.index.keys import TOKEN_BYTES
from kvtide.models import Model
from kvtide.spec import ALL, ModelMemory, Tier
from kvtide.spec.families import KVDType, declare
from kvtide.spec.residency import Residency
from kvtide.testing.naive import NaiveIndex
from kvtide.tiers import Arrangement, Buffers, HotBuffers, Layout, capacity_pages
from kvtide.transfer.copy_jobs import Copier
from kvtide.transfer.strided import Way
from kvtide.transfer.timeline import HostTimeline
from kvtide.transfer.transfers import TransferState
from tests.cache.building import POISON, TIERS, HandLane, PoisonedSlots, Rows
from tests.grids import everything
from tests.models.tiny import VOCABULARY, config_of, ours

PAGE = 16
SAMPLING = SamplingParams(logprobs=3)


@dataclass(frozen=True, slots=True)
class Family:
    """`name` as in `tests.models.tiny.CONFIGS`, `tokens_per_checkpoint` as in `CacheConfig`.

    "deepseek_v32 hot:25" is deepseek_v32 with hot buffers of 25 entries.
    """

    name: str
    tokens_per_checkpoint: int = 64

    @property
    def model(self) -> str:
        """The config: its answers are the same with every residency."""
        return self.name.partition(" ")[0]

    @property
    def residency(self) -> Residency:
        return Residency.parse(self.name.partition(" ")[2] or "all")


FORMS = (
    Family("llama"),  # Nothing but a history.
    Family("gpt_oss"),  # Windows beside it.
    Family("falcon_h1"),  # States beside it.
    Family("deepseek_v4"),  # Compressed streams and windows, and state within a page.
)
"""One family of each form of memory. They are tried in every combination of policy, layout and
chunk size, and in all that can happen beside."""

VARIANTS = (
    Family("mistral-windows", tokens_per_checkpoint=44),  # No history: windows are all it has.
    Family("gemma3-scaled-rope"),  # A window of four pages.
    Family("gpt_oss-plain-rope-tight-clamp"),  # A window of less than a page.
    Family("falcon_h1-norm-first-no-conv"),  # A state without a convolution's tail.
    Family("lfm2"),  # A convolution's tail without a state.
    Family("kimi_linear"),  # A state beside latents.
    Family("glm_moe_dsa-shared"),  # Index keys on some layers only.
)
"""The same forms with other numbers. They are tried with every policy in every layout, with chunk
sizes in turns, and in all that can happen beside."""

ALIKE = (
    Family("bamba"),
    Family("deepseek_v2"),
    Family("deepseek_v3"),
    Family("deepseek_v32"),
    Family("gemma2"),
    Family("gemma3"),
    Family("glm4_moe_lite"),
    Family("glm_moe_dsa"),
    Family("granitemoehybrid"),
    Family("mistral"),
    Family("mixtral"),
    Family("nemotron_h"),
    Family("qwen2"),
    Family("qwen3"),
    Family("qwen3_5"),
    Family("qwen3_5_moe"),
    Family("qwen3_moe"),
    Family("qwen3_next"),
    Family("smollm3"),
)
"""All other families. A new one is covered by a line here: it is tried with every policy, every
layout and both chunk sizes, not in every combination of them."""

HOT = (
    Family("deepseek_v32 hot:24"),  # Latents; as many as one query selects.
    Family("glm_moe_dsa-shared hot:64"),  # Layers that read the selection of another.
    Family("glm_moe_dsa hot:512"),  # Whole conversations fit.
    Family("deepseek_v4 hot:7"),  # Entries of several tokens, beside windows and open entries.
)
"""Families whose selected pools live on the host, with few entries of running requests on the
device. They are tried like VARIANTS."""

INTERRUPTED = (Family("deepseek_v32"),)
"""Further ones with all turns: of latents with an indexer only the keys are loaded if they are hot,
so that little is there to interrupt."""

FAMILIES = (*FORMS, *VARIANTS, *ALIKE)
NAMES = tuple(family.name for family in (*FORMS, *VARIANTS))
ALL_NAMES = tuple(family.name for family in FAMILIES)
HOT_NAMES = tuple(family.name for family in HOT)
WRITING = ("write_through", "write_through_selective", "write_back")


def family_of(name: str) -> Family:
    """One that is listed, or one of them with another residency."""
    named = Family(name)
    known = {family.name: family for family in (*FAMILIES, *HOT)}
    return known.get(name) or replace(known[named.model], name=name)


SHARED: list[Model] = []
"""By many tests, and changed by none."""


@cached
def memory_of(family: str) -> ModelMemory:
    """That of `model_of`, declared without building the model: cheap enough for collection."""
    named = family_of(family)
    config = json.loads(config_of(named.model).to_json_string())
    name = config["model_type"]
    memory = declare(config, model=name, page_tokens=PAGE, kv_dtype=KVDType.FP32)
    return named.residency.of(memory)


@cached
def model_of(family: str) -> Model:
    named = family_of(family)
    built = ours(named.model, page_tokens=PAGE, deterministic=True, resident=named.residency)
    SHARED.append(built)
    assert SHARED[-1].memory == memory_of(family)
    return SHARED[-1]


# -- what is asked, and the answers ------------------------------------------------------------

ROOTS = (262, 90, 40)
"""Tokens that the branches of each group share. The first takes steps of 64 five times, of 257
twice."""

BRANCHES = 3
TURNS = 3
TURNS_ALIKE = 2
"""Of families whose form of memory another one has; in the quick run, of most of `VARIANTS`."""
ANSWER_TOKENS = 4
MAX_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and what has to come out."""

    branch: int
    tokens: tuple[int, ...]
    answer: tuple[SampledToken, ...]


def text(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, VOCABULARY) for _ in range(count))


@cached
def alone(
    family: str, tokens: tuple[int, ...], count: int, sampling: SamplingParams = SAMPLING
) -> tuple[SampledToken, ...]:
    """The answer of an engine that has never seen anything, and computes the prompt at once.

    All of its memory is resident, also where `family` has another residency.
    """
    if family_of(family).model != family:
        return alone(family_of(family).model, tokens, count, sampling)
    model = model_of(family)
    cache = TieredCache(model.memory, CacheConfig(Tokens(1024), None, tokens_per_checkpoint=16))
    engine = Engine(model, cache, chunk_tokens=1024)
    request = engine.submit(RequestParams(tokens, count, sampling))
    while not engine.idle:
        engine.step()
    assert request.by_tier == {}
    cache.close()
    return tuple(request.output)


def together(family: str, prompts: Sequence[tuple[int, ...]]) -> list[tuple[SampledToken, ...]]:
    """The same for all prompts in one batch, without the prefix cache: in deterministic arithmetic
    an answer does not depend on the batch."""
    model = model_of(family)
    cache = TieredCache(model.memory, CacheConfig(Tokens(8192), None, tokens_per_checkpoint=16))
    engine = Engine(model, cache, chunk_tokens=4096)
    params = [RequestParams(tokens, ANSWER_TOKENS, SAMPLING, recompute=True) for tokens in prompts]
    requests = [engine.submit(each) for each in params]
    while not engine.idle:
        engine.step()
    assert all(request.by_tier == {} for request in requests)
    cache.close()
    return [tuple(request.output) for request in requests]


@cached
def script(family: str) -> tuple[tuple[Turn, ...], ...]:
    """Three groups of three branches, turn by turn, each turn in an order of its own.

    Its answers take longer than most tests do, so one process computes them for all of a run. They
    are the same with every residency.
    """
    if family_of(family).model != family:
        return script(family_of(family).model)
    written = Path(os.environ["KVTIDE_TEST_RUN"], f"{family}.script")
    if not written.exists():
        own = written.with_suffix(f".{os.getpid()}")
        own.write_bytes(pickle.dumps(_script(family)))
        own.replace(written)
    turns: tuple[tuple[Turn, ...], ...] = pickle.loads(written.read_bytes())
    return turns


def _script(family: str) -> tuple[tuple[Turn, ...], ...]:
    rng = random.Random(7)
    long = (*FORMS, *((*VARIANTS, *INTERRUPTED) if everything() else VARIANTS[:1]))
    prompts = [
        root + text(rng, 13) for root in (text(rng, n) for n in ROOTS) for _ in range(BRANCHES)
    ]
    turns = []
    for _ in range(TURNS if family_of(family) in long else TURNS_ALIKE):
        answers = together(family, prompts)
        asked = [Turn(*each) for each in zip(range(len(prompts)), prompts, answers, strict=True)]
        turns.append(tuple(rng.sample(asked, len(asked))))
        prompts = [
            turn.tokens + tuple(sampled.token for sampled in turn.answer) + text(rng, 8)
            for turn in asked
        ]
    return tuple(turns)


# -- what should be found ----------------------------------------------------------------------


class Ledger:
    """What was computed, in prefixes of tokens: all that a cache that drops nothing can find.

    pages   every whole page, and how many different pages follow it
    ends    where a step ended at the end of a page: states are snapshots of just these moments
    kept    where a request left a checkpoint: the placement wanted one, or it went on from there
    leased  where a request resumed
    partings  whether `write_back` had room to keep windows and states where conversations part
    """

    def __init__(self) -> None:
        self.pages: Counter[bytes] = Counter()
        self.ends: set[bytes] = set()
        self.kept: set[bytes] = set()
        self.leased: set[bytes] = set()
        self.partings = True

    def computed(self, body: bytes, tokens: int) -> None:
        whole = tokens // PAGE
        for page in range(1, whole + 1):
            if _prefix(body, page) not in self.pages:
                self.pages[_prefix(body, page)] = 0
                self.pages[_prefix(body, page - 1)] += 1
        if tokens % PAGE == 0:
            self.ends.add(_prefix(body, whole))

    def bounds(self, memory: ModelMemory, writing: str, body: bytes) -> tuple[int, int]:
        """The least and the most tokens that a prompt must find if the host drops nothing.

        They are equal for whole histories, unless the policy leaves pages without a copy:
        `write_through_selective` keeps what was found, and `write_back` of windows and states those
        where a conversation ends, and if there was room where it parts from others. Of windows and
        states, what a request needs to go on may be found before it has gone on.
        """
        stops, maximum = self._stops(memory), self.common(body)
        if any(pool.reuse.stride is not None for pool in memory.pools):
            maximum = self._deepest(body, self.ends)
        if writing == "write_through_selective":
            return self._deepest(body, self.leased), maximum
        if writing == "write_back" and stops is not self.pages:
            kept = (lambda after: after != 1) if self.partings else (lambda after: not after)
            stops = {stop for stop in stops if kept(self.pages[stop])}
        return self._deepest(body, stops), maximum

    def common(self, body: bytes) -> int:
        """All whole pages that a prompt has in common with anything that was computed."""
        return self._deepest(body, self.pages)

    def _stops(self, memory: ModelMemory) -> Collection[bytes]:
        """Where a request has left all that a resume needs."""
        if all(pool.reuse.reach is ALL for pool in memory.anchors):
            return self.pages
        return self.kept

    def left(self, lease: Lease) -> None:
        """What the lease has computed up to here has the checkpoints that were wanted."""
        inner, body = lease._index_lease, lease.prompt.body
        stops = (stop for stop in inner.wanted if inner.pinned_at < stop <= inner.boundary)
        self.kept.update(_prefix(body, stop) for stop in stops)

    def passed(self, lease: Lease, before: int) -> None:
        """Where a lease parts it found no checkpoint; if it had no room for one, there is none.

        Of `write_back`, which keeps none where no prompt has parted yet.
        """
        inner, body = lease._index_lease, lease.prompt.body
        branches = (branch for branch in inner.branches if before < branch <= inner.boundary)
        for branch in branches:
            if branch not in inner.wanted:
                self.kept.discard(_prefix(body, branch))

    @staticmethod
    def _deepest(body: bytes, among: Collection[bytes]) -> int:
        """The deepest of these boundaries in a prompt that leaves a token to compute, in tokens."""
        limit = (len(body) // TOKEN_BYTES - 1) // PAGE
        return PAGE * max(p for p in range(limit + 1) if p == 0 or _prefix(body, p) in among)


def _prefix(body: bytes, pages: int) -> bytes:
    return body[: pages * PAGE * TOKEN_BYTES]


class AtWork(HostTimeline):
    """A device that is still `at_work` on a step, and so on what that waits for, when a request
    looks how far copies have come."""

    at_work = False

    def passed(self, event: object) -> bool:
        return not self.at_work


class WatchedCache(TieredCache):
    """Its copies are done by hand, and each admission has to find what it should.

    naive    which pages are readable where, by the events; judges by the definition
    ledger   what was computed; knows nothing of pages that were given up
    dropped  pages that ceased to be readable, by tier
    found    what each admission found, beside all whole pages it had in common with others
    breaks   whether the next load that a request waits for breaks halfway
    """

    def __init__(
        self, memory: ModelMemory, config: CacheConfig, rng: random.Random, **options: Any
    ) -> None:
        super().__init__(memory, config, **options)
        self.naive = NaiveIndex(memory, self.storage.space)
        self.ledger = Ledger()
        self.dropped: Counter[Tier] = Counter()
        self.found: list[tuple[int, int]] = []
        self.breaks = False
        self.hands = self.hardware.copier.lanes
        self.hands[Way.LOAD].timeline = self._device = AtWork()
        self._fenced = False
        self._rng, self._late = rng, copy.deepcopy(rng)
        self.index.subscribe(self._hear)

    def _hear(self, event: Event) -> list[bytes]:
        """Returns the names of the event's pages."""
        names = self.naive.hear(event)
        if event.kind is EventKind.REMOVED:
            self.dropped[event.tier] += len(names)
        return names

    def poll(self) -> Progress:
        """Some of what was submitted is done by now."""
        for hand in self.hands.values():
            hand.run(self._rng.randint(0, len(hand.jobs)))
        self._device.at_work, self._fenced = self._fenced and self._late.random() < 0.5, False
        try:
            return super().poll()
        finally:
            self._device.at_work = False

    def fence(self, step: Iterable[Lease] | None = None) -> None:
        """A step comes, and a poll before it is over."""
        super().fence(step)
        self._fenced = True

    def wait(self, lease: Lease, layer: int) -> None:
        """A layer's bytes come when it cannot go on without them, and none of the next layer's."""
        hand, leg = self.hands[Way.LOAD], self.hardware.copier.leg_of(layer)
        flying = [
            transfer for transfer in lease.transfers if transfer.state is TransferState.IN_FLIGHT
        ]
        for transfer in flying:
            while not hand.arrived(transfer.ticket, leg):
                if self.breaks:
                    self.breaks = False
                    hand.run_halfway()
                else:
                    hand.run_legs(1)
        super().wait(lease, layer)

    def break_load(self) -> None:
        """A load in flight breaks halfway, or else the next one that a request waits for."""
        if self.hands[Way.LOAD].jobs:
            self.hands[Way.LOAD].run_halfway()
        else:
            self.breaks = True

    def _commit(self, lease: Lease, tokens: int, without: Any) -> None:
        self.ledger.computed(lease.prompt.body, tokens)
        before = lease.committed_pages
        super()._commit(lease, tokens, without)
        if self.config.write_policy == "write_back":
            self.ledger.passed(lease, before)
        self.ledger.left(lease)

    def retain(self, lease: Lease) -> None:
        super().retain(lease)
        self.ledger.left(lease)

    def reserve(self, match: Match, *args: Any, **more: Any) -> Lease | None:
        expected = self._expected(match)
        bounds = self.ledger.bounds(self.memory, self.config.write_policy, match.prompt.body)
        lease = super().reserve(match, *args, **more)
        if lease is None:
            return None
        found = sum(lease.by_tier.values())
        assert (found, dict(lease.by_tier)) == (lease.cached_tokens, expected)
        if match.slowest is Tier.HOST:
            assert bounds[0] <= found <= bounds[1], (bounds, found, lease.why)
            self.found.append((found, self.ledger.common(match.prompt.body)))
        self.ledger.leased.add(_prefix(match.prompt.body, found // PAGE))
        return lease

    def _expected(self, match: Match) -> dict[Tier, int]:
        """Tokens by the fastest tier that has them, by the definition of a resumable boundary."""
        tokens = torch.frombuffer(bytearray(match.prompt.body), dtype=torch.int32).tolist()
        boundary = self.naive.boundary(tokens, slowest=match.slowest)
        keys = self.naive.page_keys(tokens)[:boundary]
        histories = [pool.name for pool in self.memory.anchors if pool.reuse.reach is ALL]
        if not histories:
            keys, histories = keys[-1:] * boundary, [self.memory.anchors[0].name]
        found = Counter(
            next(tier for tier in Tier if key in self.naive.readable[tier, histories[0]])
            for key in keys
        )
        return {tier: pages * PAGE for tier, pages in found.items()}


# -- serving them ------------------------------------------------------------------------------


def converse(
    family: str, engine: Engine, at_once: int = 4, rounds: slice = slice(None)
) -> Iterator[list[Request]]:
    """Serve the script, or some rounds of it, so many requests at a time.

    Yields them after every step. Tokens are compared at once, so that also requests that are cut
    off gave no wrong token.
    """
    for turns in script(family)[rounds]:
        todo, pending, steps = list(turns), [], 0
        while todo or pending:
            steps += 1
            assert steps < MAX_STEPS, "a request waits for ever"
            while todo and len(pending) < at_once:
                turn = todo.pop(0)
                ask = RequestParams(turn.tokens, len(turn.answer), SAMPLING)
                pending.append((turn, engine.submit(ask)))
            engine.step()
            for turn, request in pending:
                output = tuple(request.output)
                assert output == turn.answer[: len(output)], (turn.branch, request.number)
                assert request.finish is None or output == turn.answer, (
                    turn.branch,
                    request.number,
                )
            yield [request for _, request in pending]
            pending = [pair for pair in pending if pair[1].finish is None]


class Stand:
    """An engine on memory that holds a third of what is asked of it, and the host many times that.

    Layers arrive one by one.
    """

    def __init__(
        self,
        family: str,
        *,
        seed: int = 0,
        chunk_tokens: int = 64,
        device_tokens: int = 448,
        layouts: tuple[Layout, Layout] = (Layout.PAGE_FIRST_DIRECT, Layout.PAGE_FIRST_DIRECT),
        tokens_per_checkpoint: int | None = None,
        placement: Placement | None = None,
        watched: type[WatchedCache] = WatchedCache,
        drafter: Drafter | None = None,
        draft_tokens: int = 1,
        **options: Any,
    ) -> None:
        self.family = family
        self.rng = random.Random(seed)
        model = model_of(family)
        distance = tokens_per_checkpoint or family_of(family).tokens_per_checkpoint
        sizes = (Tokens(device_tokens), Tokens(8 * device_tokens))
        self.blocks = [
            _poisoned(Arrangement(kept, _slots(kept, size, distance, tier), layout))
            for kept, size, layout, tier in zip(
                (model.memory, model.memory.at_rest), sizes, layouts, TIERS, strict=True
            )
        ]
        config = CacheConfig(*sizes, tokens_per_checkpoint=distance, **options)
        hot = _hot_buffers(model.memory, config, self.blocks)
        legs = [range(layer, layer + 1) for layer in range(model.memory.end_layer)]
        self.hands = {way: HandLane() for way in Way}
        self.cache = watched(
            model.memory,
            config,
            self.rng,
            placement=placement,
            hardware=Hardware(*self.blocks, Copier(*self.blocks, self.hands, legs), hot=hot),
        )
        self._rows = {tier: Rows(block) for tier, block in zip(TIERS, self.blocks, strict=True)}
        for cell in self.cache.index.tree.cells:
            if cell.tier in TIERS:
                anchor = model.memory.anchors[cell.anchor].name
                cell.slots = PoisonedSlots(cell.slots.capacity, self._rows[cell.tier], anchor)
        self.engine = Engine(
            model,
            self.cache,
            chunk_tokens=chunk_tokens,
            drafter=drafter,
            draft_tokens=draft_tokens,
            fixed_drafts=True,
        )
        self.served: list[Request] = []
        self.max_running = 0

    def answer(self, tokens: tuple[int, ...], count: int = ANSWER_TOKENS) -> Request:
        """Serve one request by itself."""
        request = self.engine.submit(RequestParams(tokens, count, SAMPLING))
        while not self.engine.idle:
            self.engine.step()
            assert self.cache.validate() == []
        assert tuple(request.output) == alone(self.family, tokens, count)
        return request

    def converse(
        self, at_once: int = 4, validate_every: int = 1, rounds: slice = slice(None)
    ) -> Iterator[list[Request]]:
        """Serve the script; after every step the caller may meddle with the requests."""
        for number, requests in enumerate(converse(self.family, self.engine, at_once, rounds)):
            assert number % validate_every or self.cache.validate() == []
            self.check_hot_rows()
            for request in self.engine.scheduler.running:
                assert request.held.committed_pages * PAGE <= request.computed, "found too early"
            self.max_running = max(self.max_running, len(self.engine.scheduler.running))
            self.served += [request for request in requests if request not in self.served]
            yield requests

    def check_hot_rows(self) -> None:
        """Every entry in a hot row is that of the host's page.

        Then what no step may read any more is spoiled: the pages of the step before, and slots
        without an entry.
        """
        for name, hot in self.cache.hardware.hot.items():
            for request in self.engine.scheduler.running:
                if request.computed > request.held.cached_tokens:  # Else its row is another's yet.
                    check_hot_row(self.cache, request, name)
            hot.pages[hot.shape.first_ring :] = POISON

    @property
    def found(self) -> Counter[Tier]:
        """Tokens that requests found, by tier."""
        return sum((Counter(request.by_tier) for request in self.served), Counter())

    @property
    def loads(self) -> int:
        return self.cache.stats().transfers.get(("load", "landed"), 0)

    def settle(self) -> None:
        """Do all copies, and those that follow from them."""
        while self.cache.busy:
            for hand in self.hands.values():
                hand.run(len(hand.jobs))
            self.cache.poll()

    def end(self) -> None:
        """No hold is left; what is flushed leaves nothing behind; nothing is written elsewhere."""
        tree = self.cache.index.tree
        assert self.engine.idle
        self.settle()
        assert not tree.leases and not tree.arrivals and not self.cache.busy
        assert self.cache.index.hot_rows[0] == 0
        for count in self.cache.stats().pages.values():
            assert count.free + count.resident == count.capacity
        for tier in TIERS:
            self.cache.flush(tier)
        for (tier, anchor), count in self.cache.stats().pages.items():
            assert (count.resident, count.free) == (0, count.capacity), (tier, anchor)
            assert self._rows[tier].poisoned(anchor, slice(None)), (tier, anchor)
        assert tree.nodes == 0 and not tree.roots and self.cache.validate() == []
        self.cache.close()


def check_hot_row(cache: TieredCache, request: Request, pool: str) -> None:
    """Of entries whose tokens were computed: behind them there may be those of rejected drafts."""
    hot, row = cache.hardware.hot[pool], cache.hot_row(request.held)
    table = torch.from_numpy(cache.page_table(request.held, pool).astype("int64"))
    size, entry = hot.page_entries, hot.pool.entry.bytes
    slots = hot.pages[: hot.shape.first_ring, : size * entry]
    slots = slots.unflatten(0, (hot.shape.layers, hot.shape.rows, -1))
    computed = request.computed // hot.pool.tokens_per_entry
    for number, layer in enumerate(hot.pool.layers):
        held = hot.held[number, row].long()
        entries = held[(held >= 0) & (held < computed)]
        assert len(entries.unique()) == len(entries), "an entry in two hot slots"
        there = slots[number, row].reshape(-1, entry)[: len(held)][(held >= 0) & (held < computed)]
        pages = cache.hardware.host.rows(pool, layer)[:, : size * entry].unflatten(1, (size, -1))
        assert bool((table[entries // size] >= 0).all()), "a hot entry without a page"
        assert torch.equal(there, pages[table[entries // size], entries % size]), (layer, row)


def _slots(
    memory: ModelMemory, size: Tokens, tokens_per_checkpoint: int, tier: Tier
) -> dict[str, int]:
    """Slots by anchor; the device has none of hot pools."""
    there = memory.in_device_pages if tier is Tier.DEVICE else memory
    slots = capacity_pages(there, size, tokens_per_checkpoint=tokens_per_checkpoint)
    return {anchor.name: slots.get(anchor.name, 0) for anchor in memory.anchors}


def _poisoned(arrangement: Arrangement) -> Buffers:
    return Buffers(arrangement, torch.full((arrangement.bytes,), POISON, dtype=torch.uint8))


def _hot_buffers(
    memory: ModelMemory, config: CacheConfig, blocks: Sequence[Buffers]
) -> dict[str, HotBuffers]:
    """Poisoned like all memory."""
    pages = {tier: dict(block.arrangement.slots) for tier, block in zip(TIERS, blocks, strict=True)}
    shapes = hot_shapes(memory, config, pages)
    buffers = {
        name: HotBuffers(memory.pool(name), shape, PAGE, torch.device("cpu"))
        for name, shape in shapes.items()
    }
    for hot in buffers.values():
        hot.pages.fill_(POISON)
    return buffers
