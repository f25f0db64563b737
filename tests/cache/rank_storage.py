"""What ranks of `test_ranks` play with storage: each has a store of its own.

Ranks make the same calls. What differs is what their stores have, and what goes wrong with them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from kvtide.cache import Fetch, FetchPatience, Ratio, Tier, Tokens
from kvtide.cache.hardware import formats
from kvtide.index import EveryPages, Prompt
from kvtide.spec import ALL, DType, Entry, Field, ModelMemory, PoolSpec, Reuse, with_draft
from kvtide.storage import Store, StoreError, open_store
from kvtide.testing.faulty_store import Draw, Fault, FaultyStore
from kvtide.transfer.strided import Way
from tests.cache.rank_stand import PAGE, WHOLE, Stand, World
from tests.cache.rank_worker import RandomRun
from tests.cache.stores import until
from tests.worlds import Scenario

_NUMBERS = itertools.count()
WAIT = FetchPatience("wait_complete", min_tokens=1)
HURRIED = FetchPatience("timeout", base_s=0.3, per_1k_s=0.0, min_tokens=1)
TEXT = range(33)
PAGES = 8

_DRAFT = ModelMemory(
    "draft",
    PAGE,
    (PoolSpec("kv", (0,), Entry((Field("x", (8,), DType.FP32),)), reuse=Reuse(ALL)),),
    layers=1,
)
DRAFTED = with_draft(WHOLE, _DRAFT)


class Storing:
    """A stand with a store behind it, that goes wrong on this rank on demand."""

    def __init__(self, world: World, url: str, memory: ModelMemory | None = None, **config) -> None:
        memory = memory or world.tensor_slice()
        config = {"patience": WAIT, "placement": EveryPages(1), **config}
        self.world = world
        self.stand = Stand(world, memory, **config)
        self.cache = self.stand.cache
        self.url = url
        self.store = self.attach()

    def attach(self, draw: Callable[[str], Fault | None] = lambda call: None) -> FaultyStore:
        """Attach a store; `draw` has no share before that is done."""
        inner = open_store(self.url, self.cache.storage.space)
        self.store = FaultyStore(inner, draw, slow_s=0.001, lingers_s=0.005)
        self.cache.storage.attach(self.store)
        return self.store

    @property
    def inner(self) -> Store:
        return open_store(self.url, self.cache.storage.space)

    def keys(self, prompt: Prompt, anchor: str = "kv") -> list[bytes]:
        """Of an anchor's objects, or of an optional sidecar's."""
        one = formats(self.cache.memory, self.cache.config)[anchor]
        return [one.key(*page) for page in self.cache.index.page_keys(prompt)]

    def fetch(self, tokens=TEXT, token_s: float = 0.0) -> Fetch:
        fetch = self.cache.storage.fetch(self.stand.prompt(tokens), token_s)
        assert fetch is not None
        return fetch

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            self.cache.poll()
            self.stand.agree()

    def poll_until(self, holds: Callable[[], bool]) -> None:
        """Poll in step with the others, until it holds on all of them."""
        deadline = time.monotonic() + 60
        while not all(self.world.gather(holds())):
            assert time.monotonic() < deadline, "it does not come to pass"
            self.poll()

    def settle(self) -> None:
        assert self.cache.drain(60.0)
        self.stand.agree()

    def found(self, tokens=TEXT) -> int:
        return self.cache.match(self.stand.prompt(tokens)).tokens

    def read(self, tokens=TEXT) -> int:
        """Load what is found, and look at every byte."""
        lease = self.stand.leased(self.stand.prompt(tokens))
        self.cache.load(lease)
        assert self.stand.copied(lease)
        self.settle()
        self.stand.check(lease)
        self.stand.release(lease)
        return lease.cached_tokens

    def close(self) -> None:
        self.store.heal()
        self.stand.close()
        assert self.cache.storage.join(5.0)


def _url() -> str:
    """In this process: ranks do not share it."""
    return f"memory:ranks-{next(_NUMBERS)}"


def _stored(world: World, url: str, tokens=TEXT, memory: ModelMemory | None = None) -> None:
    """Have the text in every rank's store."""
    storing = Storing(world, url, memory)
    prompt = storing.stand.keep(tokens)
    storing.settle()
    assert all(storing.inner.exists(storing.keys(prompt)))
    storing.close()


# -- fetching -------------------------------------------------------------------------------


def what_every_rank_stored_every_rank_fetches(world: World) -> None:
    url = _url()
    _stored(world, url)
    storing = Storing(world, url)
    fetches = [storing.fetch() for _ in range(3)]
    storing.settle()
    assert sorted(f.outcome for f in fetches) == ["fetched", "nothing", "nothing"]
    assert storing.read() == PAGES * PAGE
    storing.close()


def what_one_rank_has_not_no_rank_fetches(world: World) -> None:
    url = _url()
    _stored(world, url)
    storing = Storing(world, url)
    keys = storing.keys(storing.stand.prompt(TEXT))
    if world.odd_one:
        assert storing.inner.remove(keys[5:]) == PAGES - 5
    if world.rank == 0:
        assert storing.inner.remove(keys[6:]) == PAGES - 6
    fetch = storing.fetch()
    storing.settle()
    assert fetch.outcome == "fetched" and storing.read() == 5 * PAGE
    storing.close()


def what_one_rank_cannot_read_no_rank_adopts(world: World) -> None:
    """It was there when they looked, and is gone, altered or out of reach when they read."""
    ends = {
        Fault.FLIP: "partly",
        **dict.fromkeys((Fault.RAISE, Fault.EXIT, Fault.LINGER), "failed"),
    }
    for fault, end in ends.items():
        url = _url()
        _stored(world, url)
        storing = Storing(world, url)
        if world.odd_one:
            storing.store.always["read"] = fault
        fetch = storing.fetch()
        storing.settle()
        assert fetch.outcome == end and storing.found() == 0
        storing.settle()
        assert storing.stand.resident(Tier.HOST) == 0
        storing.close()


def what_one_rank_missed_is_looked_for_again_by_all(world: World) -> None:
    url = _url()
    _stored(world, url)
    storing = Storing(world, url)
    if world.odd_one:
        storing.store.next("read", Fault.MISSING)
    fetch = storing.fetch()
    storing.settle()
    assert fetch.looks == 2 and storing.read() == PAGES * PAGE
    storing.close()


def pages_that_came_on_every_rank_are_adopted_by_all(world: World) -> None:
    url = _url()
    _stored(world, url)
    storing = Storing(world, url)
    storing.cache.storage.stores[-1].link._batch_bytes = 1
    keys = storing.keys(storing.stand.prompt(TEXT))
    fetch = storing.fetch()
    until(lambda: fetch.lookup.over)
    if world.odd_one:
        storing.inner.remove(keys[4:])
    storing.settle()
    assert fetch.outcome == "partly"
    world.same(fetch.tokens)
    assert 0 < storing.read() <= 4 * PAGE
    storing.close()


def a_fetch_that_is_late_on_one_rank_is_over_on_all(world: World) -> None:
    url = _url()
    _stored(world, url)
    storing = Storing(world, url, patience=HURRIED)
    if world.odd_one:
        storing.store.next("read", Fault.BLOCK)
    fetch = storing.fetch()
    storing.poll_until(lambda: fetch.over)
    assert fetch.outcome == "late" and storing.found() == 0
    free = storing.cache.stats().pages[Tier.HOST, "kv"].free
    storing.poll(3)
    assert storing.cache.stats().pages[Tier.HOST, "kv"].free == free
    assert len(storing.cache.index.imports) == 1, "no rank gives back what one may write to"
    dist.barrier()
    storing.store.heal()
    storing.settle()
    assert not storing.cache.index.imports
    storing.close()


def a_lookup_that_is_late_on_one_rank_is_over_on_all(world: World) -> None:
    url = _url()
    _stored(world, url)
    storing = Storing(world, url, patience=HURRIED)
    if world.odd_one:
        storing.store.next("exists", Fault.BLOCK)
    fetch = storing.fetch()
    storing.poll_until(lambda: fetch.over)
    assert fetch.outcome == "late" and not storing.cache.index.imports
    storing.close()


def a_store_that_is_dead_on_one_rank_is_of_no_use_to_all(world: World) -> None:
    url = _url()
    _stored(world, url)
    storing = Storing(world, url)
    if world.odd_one:
        storing.store.always = dict.fromkeys(("exists", "read", "write"), Fault.RAISE)
    for number in range(6):
        fetch = storing.fetch()
        storing.stand.keep(range(100 * number, 100 * number + 9))
        storing.settle()
        assert fetch.outcome == ("failed" if world.odd_one else "nothing")
    assert storing.cache.storage.stats().answers != world.odd_one
    storing.close()


def what_does_not_pay_for_one_rank_is_declined_by_all(world: World) -> None:
    url = _url()
    _stored(world, url)
    storing = Storing(world, url)
    if world.odd_one:
        storing.cache.storage.stores[-1].link.read_speed.bytes_s = 1.0
    fetch = storing.fetch(token_s=1e-6)
    storing.settle()
    assert fetch.outcome == "declined"
    storing.close()


def a_draft_that_one_rank_has_not_no_rank_has(world: World) -> None:
    """Ranks that went different ways with a draft would not find together again."""
    memory = DRAFTED.slice(tensor_rank=world.rank, tensor_ranks=world.ranks)
    (draft,) = (p.name for p in memory.pools if p.follows and not p.reuse.required)
    url = _url()
    storing = Storing(world, url, memory)
    lease = storing.stand.leased(storing.stand.prompt(TEXT))
    storing.stand.compute(lease, 0)
    storing.cache.commit(lease, 33)
    storing.stand.release(lease)
    storing.settle()
    prompt = storing.stand.prompts[0]
    storing.close()
    whole = Storing(world, url, memory)
    if world.odd_one:
        del whole.inner._objects[whole.keys(prompt, draft)[3]]
    fetch = whole.fetch()
    whole.settle()
    assert fetch.outcome == "fetched"
    lease = whole.stand.leased(whole.stand.prompt(TEXT))
    whole.cache.load(lease)
    whole.settle()
    carried = whole.cache.carries(lease, draft).tolist()
    world.same(carried)
    assert carried.count(False) == 1 and not carried[3]
    whole.close()


def a_draft_of_the_last_stage_is_in_the_trees_of_all(world: World) -> None:
    tensor_ranks = world.ranks // 2
    stage, tensor_rank = divmod(world.rank, tensor_ranks)
    memory = list(DRAFTED.stages(2, tensor_rank, tensor_ranks))[stage]
    url = _url()
    _stored(world, url, memory=memory)
    storing = Storing(world, url, memory)
    fetch = storing.fetch()
    storing.settle()
    assert fetch.outcome == "fetched"
    assert storing.read() == PAGES * PAGE
    storing.close()


# -- drafts for pages that are kept without them --------------------------------------------


def _undrafted(world: World, memory: ModelMemory) -> Storing:
    """Have the text in every rank's store with its draft, and on device and host without."""
    url = _url()
    _stored(world, url, memory=memory)
    storing = Storing(world, url, memory)
    lease = storing.stand.leased(storing.stand.prompt(TEXT))
    storing.stand.compute(lease, 33, storing.stand.optional)
    storing.stand.release(lease)
    storing.settle()
    return storing


def _drafted(storing: Storing) -> list[bool]:
    lease = storing.stand.leased(storing.stand.prompt(TEXT))
    carried = storing.cache.carries(lease, "draft").tolist()
    storing.stand.check(lease)
    storing.stand.release(lease)
    storing.world.same(carried)
    return carried


def a_draft_that_one_rank_lacks_comes_on_none(world: World) -> None:
    storing = _undrafted(world, DRAFTED.slice(tensor_rank=world.rank, tensor_ranks=world.ranks))
    prompt = storing.stand.prompts[0]
    if world.odd_one:
        del storing.inner._objects[storing.keys(prompt, "draft")[3]]
    if world.rank == 0:
        storing.store.next("read", Fault.SLOW)
    storing.cache.supplements.begin(prompt)
    storing.settle()
    assert _drafted(storing) == [page != 3 for page in range(PAGES)]
    storing.close()


def a_draft_that_one_rank_cannot_read_comes_on_none(world: World) -> None:
    storing = _undrafted(world, DRAFTED.slice(tensor_rank=world.rank, tensor_ranks=world.ranks))
    for call in ("exists", "read"):
        if world.odd_one:
            storing.store.next(call, Fault.RAISE)
        storing.cache.supplements.begin(storing.stand.prompts[0])
        storing.settle()
        assert not any(_drafted(storing))
    storing.cache.supplements.begin(storing.stand.prompts[0])
    storing.settle()
    assert all(_drafted(storing))
    storing.close()


def a_draft_that_is_slow_to_one_device_is_on_none(world: World) -> None:
    storing = _undrafted(world, DRAFTED.slice(tensor_rank=world.rank, tensor_ranks=world.ranks))
    if world.odd_one:
        storing.stand.hold(Way.LOAD)
    storing.cache.supplements.begin(storing.stand.prompts[0])
    storing.poll_until(lambda: storing.cache.stats().storage.supplements == PAGES)
    storing.poll(3)
    assert not any(_drafted(storing))
    dist.barrier()
    storing.stand.let_go()
    storing.settle()
    assert all(_drafted(storing))
    storing.close()


def a_draft_of_the_last_stage_comes_in_the_trees_of_all(world: World) -> None:
    tensor_ranks = world.ranks // 2
    stage, tensor_rank = divmod(world.rank, tensor_ranks)
    storing = _undrafted(world, list(DRAFTED.stages(2, tensor_rank, tensor_ranks))[stage])
    storing.cache.supplements.begin(storing.stand.prompts[0])
    storing.settle()
    assert all(_drafted(storing))
    storing.close()


# -- storing --------------------------------------------------------------------------------


def a_slow_rank_keeps_pages_on_every_host_until_they_are_written(world: World) -> None:
    storing = Storing(world, _url(), device_size=Tokens(64 * PAGE), host_size=Ratio(0.5))
    if world.odd_one:
        storing.store.always["write"] = Fault.BLOCK
    for number in range(12):
        storing.stand.keep(range(100 * number, 100 * number + 13))
        storing.stand.idle_lanes()
        dist.barrier()
        storing.poll(2)
    waiting = len(storing.cache.index.departures)
    assert waiting > 0 and storing.cache.storage.stats().dropped_pages > 0
    storing.cache.flush(Tier.HOST)
    storing.stand.agree()
    assert storing.stand.resident(Tier.HOST) > 0
    dist.barrier()
    storing.store.heal()
    storing.settle()
    assert not storing.cache.index.departures
    storing.close()


def a_store_that_one_rank_cannot_attach_is_attached_by_none(world: World) -> None:
    storing = Storing(world, _url())
    before = storing.store
    another = FaultyStore(open_store(_url(), storing.cache.storage.space))
    if world.odd_one:
        another.next("lend", Fault.RAISE)
    refusal = ""
    try:
        storing.cache.storage.attach(another)
    except StoreError as error:
        refusal = str(error)
    assert ("another rank" in refusal) != world.odd_one and refusal
    assert another.calls["close"] == (not world.odd_one)
    prompt = storing.stand.keep(TEXT)
    storing.settle()
    assert all(before.exists(storing.keys(prompt)))
    storing.close()


def ranks_leave_a_store_together(world: World) -> None:
    url = _url()
    _stored(world, url)
    storing = Storing(world, url)
    if world.odd_one:
        storing.store.always = {"write": Fault.BLOCK, "read": Fault.BLOCK}
    fetch = storing.fetch()
    storing.poll_until(lambda: fetch.reading is not None)
    for number in range(1, 5):
        storing.stand.keep(range(100 * number, 100 * number + 13))
        storing.stand.idle_lanes()
        dist.barrier()
        storing.poll(2)
    storing.cache.storage.detach(0.0 if world.odd_one else 5.0)
    storing.poll(3)
    assert fetch.over and storing.cache.storage.stats().state == "leaving"
    dist.barrier()
    storing.store.heal()
    storing.settle()
    storing.attach()
    assert storing.found(range(100, 113)) == 12
    storing.close()


def a_store_that_is_gone_sooner_on_one_rank_takes_no_part_in_what_lands(world: World) -> None:
    """The one before it is still being left, and takes nothing on either."""
    storing = Storing(world, _url())
    first = storing.store
    first.always["write"] = Fault.BLOCK
    storing.stand.keep(TEXT)
    storing.poll_until(lambda: bool(first.met))
    storing.url = _url()
    storing.attach()
    last = storing.cache.storage.stores[-1]
    close, may_close = last.link.close, threading.Event()
    if world.odd_one:
        last.link.close = lambda timeout_s: may_close.wait(timeout_s) and close(timeout_s)
    storing.stand.hold(Way.BACKUP)
    storing.stand.keep(range(100, 133))
    storing.cache.storage.detach(0.0)
    storing.poll_until(lambda: last.gone != world.odd_one)
    storing.stand.let_go()
    storing.poll_until(lambda: not storing.cache.busy)
    may_close.set()
    first.heal()
    storing.close()


def a_prefix_in_quarantine_is_not_fetched_until_all_ranks_have_removed_it(world: World) -> None:
    url = _url()
    _stored(world, url)
    storing = Storing(world, url)
    if world.odd_one:
        storing.store.next("remove", Fault.BLOCK)
    prompt = storing.stand.prompt(TEXT)
    storing.cache.quarantine(prompt)
    storing.poll(4)
    assert storing.cache.storage.fetch(prompt) is None
    dist.barrier()
    storing.store.heal()
    storing.settle()
    fetch = storing.fetch()
    storing.settle()
    assert fetch.outcome == "nothing"
    storing.close()


# -- anything, in any order -----------------------------------------------------------------


class StoredRun(RandomRun):
    """Calls from one seed, as ever; what goes wrong with a rank's store from its own."""

    def __init__(self, storing: Storing, seed: int) -> None:
        super().__init__(storing.stand, seed)
        self.storing = storing
        self.fetches: list[Fetch] = []
        self.begun: list[Fetch] = []
        self._steps |= {
            self.fetch: 8, self.stop: 2, self.poll: 14, self.quarantine: 0.5, self.forget: 3,
            self.replace: 0.4, self.supplement: 4,
        }  # fmt: skip

    def fault(self) -> None:
        super().fault()
        own, store = self._own, self.storing.store
        draw = own.random()
        if draw < 0.2 / self.stand.world.ranks:
            store.next(own.choice(("exists", "read", "write", "remove")), Fault.BLOCK)
        elif draw < 0.5:
            store.release()
        elif draw < 0.6 and store.lingering:
            store.write_late(0xDD)

    def fetch(self) -> None:
        fetch = self.stand.cache.storage.fetch(self._prompt())
        if fetch is not None:
            self.fetches.append(fetch)
            self.begun.append(fetch)

    def supplement(self) -> None:
        leased = [turn.lease.prompt for turn in self.turns]
        supplement = self.stand.cache.supplements.begin(self._rng.choice([self._prompt(), *leased]))
        if self._rng.random() < 0.1:
            supplement.stop()

    @property
    def saw_much(self) -> bool:
        """Whether something was fetched, and fetches ended in many ways."""
        outcomes = {fetch.outcome for fetch in self.begun}
        return sum(fetch.tokens for fetch in self.begun) > 0 and len(outcomes) > 3

    def stop(self) -> None:
        if self.fetches:
            self.fetches.pop(self._rng.randrange(len(self.fetches))).stop()

    def quarantine(self) -> None:
        self.stand.cache.quarantine(self._prompt())

    def forget(self) -> None:
        for tier in (Tier.DEVICE, Tier.HOST):
            self.stand.cache.flush(tier)

    def replace(self) -> None:
        self.storing.store.heal()
        faults = [fault for fault in Fault if fault is not Fault.BLOCK]
        draw = Draw(self._own.random(), 0.0, faults)
        self.storing.attach(draw)
        draw.fraction = 0.1 / self.stand.world.ranks


def random_calls_keep_ranks_with_stores_together(world: World) -> None:
    storing = Storing(
        world,
        _url(),
        DRAFTED.slice(tensor_rank=world.rank, tensor_ranks=world.ranks),
        patience=replace(HURRIED, base_s=0.1),
        device_size=Tokens(16 * PAGE),
        host_size=Ratio(2),
        transfer_timeout_s=0.05,
    )
    run = StoredRun(storing, seed=5)
    for number in range(1, 1001):
        run.step()
        storing.stand.agree()
        # How much of it comes in time is up to the machine: it goes on until all have seen enough.
        if number >= 200 and number % 50 == 0 and all(world.gather(run.saw_much)):
            break
    assert run.saw_much, Counter(fetch.outcome for fetch in run.begun)
    storing.stand.let_go()
    storing.close()


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        what_every_rank_stored_every_rank_fetches,
        what_one_rank_has_not_no_rank_fetches,
        what_one_rank_cannot_read_no_rank_adopts,
        what_one_rank_missed_is_looked_for_again_by_all,
        pages_that_came_on_every_rank_are_adopted_by_all,
        a_fetch_that_is_late_on_one_rank_is_over_on_all,
        a_lookup_that_is_late_on_one_rank_is_over_on_all,
        a_store_that_is_dead_on_one_rank_is_of_no_use_to_all,
        what_does_not_pay_for_one_rank_is_declined_by_all,
        a_draft_that_one_rank_has_not_no_rank_has,
        a_draft_of_the_last_stage_is_in_the_trees_of_all,
        a_draft_that_one_rank_lacks_comes_on_none,
        a_draft_that_one_rank_cannot_read_comes_on_none,
        a_draft_that_is_slow_to_one_device_is_on_none,
        a_draft_of_the_last_stage_comes_in_the_trees_of_all,
        a_slow_rank_keeps_pages_on_every_host_until_they_are_written,
        a_store_that_one_rank_cannot_attach_is_attached_by_none,
        ranks_leave_a_store_together,
        a_store_that_is_gone_sooner_on_one_rank_takes_no_part_in_what_lands,
        a_prefix_in_quarantine_is_not_fetched_until_all_ranks_have_removed_it,
        random_calls_keep_ranks_with_stores_together,
    )
}
