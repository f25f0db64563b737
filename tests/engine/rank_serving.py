"""What every rank of `test_ranks` plays: models, and engines over them, beside a single rank's.

The same code runs in the test itself, as one rank alone (`Solo`), for what has to come out. Nothing
here needs `transformers`: checkpoints lie in the world's folder.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtide.cache import (
    CacheConfig,
    FetchPatience,
    Hardware,
    Ranks,
    TieredCache,
    Tokens,
)
from kvtide.cache.hardware import formats
from kvtide.cache.rank_agreement import Agreement, Alone
from kvtide.engine import Engine, RankTopology, Request, RequestParams, SamplingParams
from kvtide.engine.rank_topology import LEADER
from kvtide.engine.restore_oracle import RestoreOracle
from kvtide.models import Model, build
from kvtide.models.checkpoint import open_checkpoint
from kvtide.spec import Tier
from kvtide.spec.families import KVDType
from kvtide.spec.residency import Residency
from kvtide.storage import open_store
from kvtide.testing.faults import FaultyBackend
from kvtide.testing.faulty_store import Draw, Fault, FaultyStore
from kvtide.transfer.copy_jobs import Copier
from kvtide.transfer.lane import Lane
from kvtide.transfer.strided import Reference, Way
from kvtide.transfer.timeline import HostTimeline
from tests import worlds
from tests.models.playing import Player

PAGE = 16
VOCABULARY = 211
SAMPLING = SamplingParams(logprobs=3)
CLOSE = 1e-5
"""How far what tensor ranks compute may be off: they add in another order."""

CHUNKS = (37, 1, 1, 20)
PROMPT = 90
FIRST, SECOND = slice(0, 6), slice(6, 12)
"""The turns of all conversations."""
MAX_STEPS = 20_000


class Grid(worlds.World):
    """Ranks in so many stages, of so many tensor ranks each."""

    def __init__(self, rank: int, ranks: int, folder: Path, stages: int) -> None:
        super().__init__(rank, ranks, folder)
        self.topology = RankTopology.joined(stages, ranks // stages)
        self.expected: dict[str, Any] = torch.load(folder / "expected", weights_only=False)

    def agreement(self) -> Agreement:
        return Ranks(timeout_s=20.0)

    @property
    def exact(self) -> bool:
        return self.topology.tensor.count == 1


class Solo:
    """One rank alone."""

    rank, ranks, odd_one, topology = 0, 1, True, RankTopology()

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def agreement(self) -> Agreement:
        return Alone()

    def same(self, value: object) -> None:
        pass


Place = Grid | Solo


def resident(name: str) -> str:
    """The model of a name like "deepseek_v32 hot:24"."""
    return name.partition(" ")[0]


def model_at(place: Place, name: str) -> Model:
    saved = open_checkpoint(place.folder / "models" / resident(name))
    return build(
        saved.config,
        saved.weights,
        page_tokens=PAGE,
        kv_dtype=KVDType.FP32,
        deterministic=True,
        stage=place.topology.stage,
        stages=place.topology.stages,
        ranks=place.topology.tensor,
        resident=Residency.parse(name.partition(" ")[2] or "all"),
    )


def text(seed: int, count: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1, VOCABULARY) for _ in range(count))


# -- models --------------------------------------------------------------------------------------


def logits(place: Place, name: str) -> Tensor:
    """Of every token: a prompt in chunks, and decodes."""
    return Player(model_at(place, name), topology=place.topology).prefill(text(1, PROMPT), *CHUNKS)


def a_model_says_what_one_rank_says(grid: Grid, name: str) -> None:
    expected, found = grid.expected["logits", name], logits(grid, name)
    if grid.exact:
        assert torch.equal(found, expected)
    else:
        assert (found - expected).abs().max() <= CLOSE, (found - expected).abs().max()
    grid.same(found.sum())


# -- engines -------------------------------------------------------------------------------------

Answer = list[tuple[int, float, tuple[tuple[int, float], ...]]]


@dataclass(frozen=True, slots=True)
class Served:
    """What a request was answered, and where its prompt was found."""

    answer: Answer
    by_tier: dict[Tier, int]


class Stand:
    """A rank's engine on memory that holds a part of what is asked, and the host all of it.

    Copies are slow or break on this rank on demand.
    """

    def __init__(self, place: Place, name: str, share: float = 0.0, **options: Any) -> None:
        self.place = place
        model, agreement = model_at(place, name), place.agreement()
        config = CacheConfig(
            Tokens(20 * PAGE),
            Tokens(100 * PAGE),
            tokens_per_checkpoint=64,
            patience=FetchPatience("wait_complete", min_tokens=1),
        )
        config = replace(config, **options)
        hardware = Hardware.open(model.memory, config, agreement)
        hardware.copier.close(1.0)
        self.broken: set[int] = set()
        self.backend = FaultyBackend(Reference(), halves=self.broken)
        backends = {Way.LOAD: self.backend, Way.BACKUP: Reference()}
        lanes = {way: Lane(way.name, HostTimeline(), backends[way]) for way in Way}
        legs = [range(layer, layer + 1) for layer in model.memory.own_layers]
        copier = Copier(hardware.device, hardware.host, lanes, legs)
        self.cache = TieredCache(
            model.memory,
            config,
            agreement=agreement,
            hardware=replace(hardware, copier=copier),
        )
        self.oracle = RestoreOracle(self.cache, share, None) if share else None
        self.engine = Engine(
            model, self.cache, chunk_tokens=40, oracle=self.oracle, topology=place.topology
        )

    def serve(
        self,
        prompts: Sequence[tuple[int, ...]],
        at_once: int = 3,
        before: Callable[[], None] = lambda: None,
    ) -> list[Served]:
        """So many at a time; `before` happens before every step, on this rank alone."""
        todo, asked, steps = list(prompts), list[Request](), 0
        while todo or not self.engine.idle:
            steps += 1
            assert steps < MAX_STEPS, "a request waits for ever"
            while todo and sum(request.finish is None for request in asked) < at_once:
                asked.append(self.engine.submit(RequestParams(todo.pop(0), 4, SAMPLING)))
            before()
            self.engine.step()
            self.place.same(self.tree(asked))
        return [
            Served([(c.token, c.logprob, c.top) for c in request.output], dict(request.by_tier))
            for request in asked
        ]

    def converse(self, before: Callable[[], None] = lambda: None) -> list[Served]:
        """All conversations; the device is empty when their second turns come."""
        served = self.serve(conversations()[:6], before=before)
        assert self.cache.drain(20.0)
        self.cache.flush(Tier.DEVICE)
        return served + self.serve(conversations()[6:], before=before)

    def tree(self, asked: Sequence[Request]) -> object:
        """All in which ranks must not differ."""
        cache, scheduler = self.cache, self.engine.scheduler
        return (
            cache.index.tick,
            [(tier.name, name, n) for (tier, name), n in cache.stats().pages.items()],
            cache.stats().in_flight,
            [(request.number, request.computed, request.tokens) for request in scheduler.running],
            [(request.number, request.state, request.by_tier) for request in asked],
        )

    def count(self, way: str, end: str) -> int:
        return self.cache.stats().transfers.get((way, end), 0)

    def end(self) -> None:
        self.backend.hold.set()
        assert self.cache.drain(20.0)
        assert self.cache.validate() == []
        self.place.same(self.tree(()))
        assert self.cache.close()


def conversations() -> list[tuple[int, ...]]:
    """Two turns of six conversations that share beginnings: more than the device holds."""
    roots = [text(seed, count) for seed, count in ((1, 70), (2, 45), (3, 100))]
    branches = [root + text(10 + n, 9) for n, root in enumerate((*roots, *roots))]
    return [*branches, *(branch + text(30 + n, 12) for n, branch in enumerate(branches))]


def answers(place: Place, name: str) -> list[Served]:
    stand = Stand(place, name)
    served = stand.converse()
    stand.end()
    return served


def compare(grid: Grid, served: Sequence[Served], expected: Sequence[Served]) -> None:
    for ours, theirs in zip(served, expected, strict=True):
        if grid.exact:
            assert ours.answer == theirs.answer
            continue
        assert [one[0] for one in ours.answer] == [one[0] for one in theirs.answer]
        off = [abs(a[1] - b[1]) for a, b in zip(ours.answer, theirs.answer, strict=True)]
        assert max(off) <= CLOSE, off


def conversations_are_answered_as_by_one_rank(grid: Grid, name: str) -> None:
    """Pages leave the device and come back, and every restore is checked on the way."""
    stand = Stand(grid, name, share=1.0)
    compare(grid, stand.converse(), grid.expected["answers", name])
    assert stand.count("load", "landed") > 0 and stand.count("load", "failed") == 0
    assert stand.oracle is not None
    checks = stand.oracle.counts
    assert checks.alike > 0 and checks.diverged == 0, checks
    stand.end()


def a_prefix_that_many_bring_at_once_is_computed_once(grid: Grid, name: str) -> None:
    stand, root = Stand(grid, name, device_size=Tokens(40 * PAGE)), text(4, 4 * PAGE)
    prompts = [(*root, n, *text(60 + n, 8)) for n in range(1, 5)]
    served = stand.serve(prompts, at_once=4)
    assert [sum(one.by_tier.values()) for one in served] == [0, *[4 * PAGE] * 3]
    compare(grid, stand.serve(prompts, at_once=1), served)
    stand.end()


def a_rank_whose_loads_break_misleads_no_other(grid: Grid, name: str) -> None:
    stand, rng = Stand(grid, name), random.Random(5)

    def fault() -> None:
        if grid.odd_one and rng.random() < 0.4:
            stand.broken.add(stand.backend.legs + rng.randrange(2))

    compare(grid, stand.converse(fault), grid.expected["answers", name])
    assert stand.count("load", "failed") > 0
    stand.end()


def a_rank_whose_loads_come_late_holds_no_other_for_long(grid: Grid, name: str) -> None:
    stand, rng = Stand(grid, name, transfer_timeout_s=0.05), random.Random(6)
    overdue = set[int]()

    def fault() -> None:
        overdue.add(stand.cache.stats().overdue)
        hold = stand.backend.hold
        if grid.odd_one:
            hold.clear() if rng.random() < 0.3 else hold.set()

    compare(grid, stand.converse(fault), grid.expected["answers", name])
    assert max(overdue) > 0
    stand.end()


# -- storage -------------------------------------------------------------------------------------


def lives(place: Place, name: str, url: str) -> list[Served]:
    """An engine, and another one that has nothing of it but what was stored."""
    life(place, name, url, FIRST)
    return life(place, name, url, SECOND)


def life(place: Place, name: str, url: str, half: slice) -> list[Served]:
    """An engine that has nothing of others but what is stored."""
    stand = Stand(place, name)
    stand.cache.storage.attach(open_store(url, stand.cache.storage.space))
    served = stand.serve(conversations()[half], at_once=1)
    stand.end()
    return served


def stored_at(place: Place, name: str) -> str:
    folder = place.folder / "stored" / f"{name.replace(' hot:', '-hot-')}-{place.ranks}"
    return f"file://{folder}?cap=1GB&floor=1MB&sync=never"


def an_engine_that_begins_anew_restores_what_one_rank_would(grid: Grid, name: str) -> None:
    found, expected = lives(grid, name, stored_at(grid, name)), grid.expected["lives", name]
    compare(grid, found, expected)
    assert [one.by_tier for one in found] == [one.by_tier for one in expected]
    assert sum(one.by_tier.get(Tier.STORAGE, 0) for one in found) > 0


def a_rank_whose_store_fails_misleads_no_other(grid: Grid, name: str) -> None:
    """What it does not bring is computed, by all."""
    url = stored_at(grid, name)
    lives(grid, name, url)
    patience = FetchPatience("timeout", base_s=0.2, per_1k_s=0.0, min_tokens=1)
    stand = Stand(grid, name, patience=patience)
    faults = (Fault.RAISE, Fault.SLOW, Fault.MISSING, Fault.FLIP, Fault.BLOCK)
    draw = Draw(3, 0.5 if grid.odd_one else 0.0, faults)
    store = FaultyStore(open_store(url, stand.cache.storage.space), draw, slow_s=0.3)
    fraction, draw.fraction = draw.fraction, 0.0
    stand.cache.storage.attach(store)
    draw.fraction = fraction
    for half in (slice(0, 6), slice(6, 12)):
        served = stand.serve(conversations()[half], before=store.release)
        compare(grid, served, grid.expected["answers", name][half])
        stand.cache.flush(Tier.DEVICE)
        stand.cache.flush(Tier.HOST)
    assert not grid.odd_one or store.met
    draw.fraction = 0.0
    store.release()
    stand.end()


def objects_of_all_slices_lie_side_by_side(grid: Grid, name: str) -> None:
    """In one space, under keys of their own."""
    cache = Stand(grid, name).cache
    assert {*grid.gather(cache.storage.space)} == {grid.expected["space", name]}
    keys = [one.key(bytes(32)) for one in formats(cache.memory, cache.config).values()]
    assert len({key for some in grid.gather(keys) for key in some}) == grid.ranks * len(keys)


# -- other shapes --------------------------------------------------------------------------------


def _restores_as_expected(grid: Grid, name: str, served: Sequence[Served]) -> None:
    expected = grid.expected["lives", name]
    compare(grid, served, expected)
    assert [one.by_tier for one in served] == [one.by_tier for one in expected]
    assert sum(one.by_tier.get(Tier.STORAGE, 0) for one in served) > 0


def ranks_find_what_one_rank_stored(grid: Grid, name: str) -> None:
    url = stored_at(grid, name).replace("/stored/", "/stored-by-one/")
    if grid.rank == LEADER:
        life(Solo(grid.folder), name, url, FIRST)
    grid.same("stored")
    _restores_as_expected(grid, name, life(grid, name, url, SECOND))


def one_rank_finds_what_ranks_stored(grid: Grid, name: str) -> None:
    url = stored_at(grid, name).replace("/stored/", "/stored-by-ranks/")
    life(grid, name, url, FIRST)
    grid.same("stored")
    if grid.rank == LEADER:
        _restores_as_expected(grid, name, life(Solo(grid.folder), name, url, SECOND))
    grid.same("restored")


def words_of_any_length_are_heard(grid: Grid, name: str) -> None:
    for length in (0, 1, 1016, 1017, 1_000_000):
        words = random.Random(length).randbytes(length)
        if grid.rank == LEADER:
            grid.topology.broadcast_command(words)
        else:
            assert grid.topology.receive_command() == words


ON_MODELS = (a_model_says_what_one_rank_says,)
ON_ENGINES = (
    conversations_are_answered_as_by_one_rank,
    a_prefix_that_many_bring_at_once_is_computed_once,
    an_engine_that_begins_anew_restores_what_one_rank_would,
)
ON_ONE_ENGINE = (
    a_rank_whose_loads_break_misleads_no_other,
    a_rank_whose_loads_come_late_holds_no_other_for_long,
    a_rank_whose_store_fails_misleads_no_other,
    objects_of_all_slices_lie_side_by_side,
    words_of_any_length_are_heard,
)
ON_STORES = (ranks_find_what_one_rank_stored, one_rank_finds_what_ranks_stored)

COMPARED = {
    "logits": (a_model_says_what_one_rank_says,),
    "answers": (
        conversations_are_answered_as_by_one_rank,
        a_rank_whose_loads_break_misleads_no_other,
        a_rank_whose_loads_come_late_holds_no_other_for_long,
        a_rank_whose_store_fails_misleads_no_other,
    ),
    "lives": (
        an_engine_that_begins_anew_restores_what_one_rank_would,
        ranks_find_what_one_rank_stored,
        one_rank_finds_what_ranks_stored,
    ),
    "space": (objects_of_all_slices_lie_side_by_side,),
}
"""What one rank computes, and the scenarios that compare with it."""


def expected(folder: Path, cases: Collection[tuple[str, str]]) -> dict[Any, Any]:
    """What one rank computes for these families and scenarios: alone, and deterministic.

    Its answers are those of resident pools, also where ranks have hot ones.
    """
    solo = Solo(folder)
    compute: dict[str, Callable[[str], object]] = {
        "logits": lambda name: logits(solo, name),
        "answers": lambda name: answers(solo, resident(name)),
        "lives": lambda name: lives(solo, name, stored_at(solo, name)),
        "space": lambda name: Stand(solo, name).cache.storage.space,
    }
    needed = {
        (kind, name)
        for kind, scenarios in COMPARED.items()
        for name, scenario in cases
        if scenario in {one.__name__ for one in scenarios}
    }
    return {(kind, name): compute[kind](name) for kind, name in sorted(needed)}


def scenarios(
    models: Sequence[str], engines: Sequence[str], stores: Sequence[str]
) -> dict[str, worlds.Scenario]:
    played = [
        *((scenario, name) for name in models for scenario in ON_MODELS),
        *((scenario, name) for name in engines for scenario in ON_ENGINES),
        *((scenario, name) for name in engines[:1] for scenario in ON_ONE_ENGINE),
        *((scenario, name) for name in stores for scenario in ON_STORES),
    ]
    return {f"{name}: {one.__name__}": partial(one, name=name) for one, name in played}
