"""Which requests wait for storage, for how long, and which do not."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import cache as cached
from itertools import count
from typing import Any

import pytest

from kvtide.cache import (
    CacheConfig,
    EveryPages,
    FetchPatience,
    StorageStats,
    TieredCache,
    Tokens,
)
from kvtide.engine import Engine, Request, RequestParams, RequestState
from kvtide.spec import Tier
from kvtide.testing.naive import NaiveIndex
from tests.cache.gated import Gated, one_page_at_a_time
from tests.engine.restarting import PATIENT, Past, object_key
from tests.engine.restoring import PAGE, SAMPLING, alone, model_of, text

PAGES = 12
ANSWER = 3
PROMPTS = tuple(text(random.Random(seed), PAGES * PAGE + 5) for seed in range(4))
FOUND = {Tier.STORAGE: PAGES * PAGE}

_NUMBERS = count()


CHECKPOINT_PAGES = 4


class Served:
    """An engine over what others stored."""

    def __init__(self, family: str, past: Past, **options: Any) -> None:
        model = model_of(family)
        sizes = options.pop("sizes", (Tokens(1024), Tokens(4096)))
        max_running = options.pop("max_running", 8)
        gates, keys = options.pop("gates", ()), options.pop("keys", None)
        settings = {"tokens_per_checkpoint": PAGE, "patience": PATIENT, **options}
        self.family = family
        placement = EveryPages(CHECKPOINT_PAGES)
        self.cache = TieredCache(model.memory, CacheConfig(*sizes, **settings), placement=placement)
        self.store = Gated(past.open(self.cache), gates, keys)
        self.cache.storage.attach(self.store)
        self.engine = Engine(model, self.cache, chunk_tokens=64, max_running=max_running)

    def submit(self, tokens: tuple[int, ...], **more: Any) -> Request:
        return self.engine.submit(RequestParams(tokens, ANSWER, SAMPLING, **more))

    def until(self, wanted: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Step until it is as wanted."""
        deadline = time.monotonic() + timeout_s
        while not wanted():
            assert time.monotonic() < deadline, "it never came to be"
            self.engine.step()
            assert self.cache.validate() == []
            if not self.engine.computed:
                time.sleep(0.0005)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.engine.step()
            time.sleep(0.001)

    def right(self, *requests: Request) -> None:
        """They are through, with the output of an engine without a cache."""
        self.until(lambda: all(request.finish is not None for request in requests))
        for request in requests:
            assert tuple(request.output) == alone(self.family, request.params.tokens, ANSWER)

    @property
    def stats(self) -> StorageStats:
        found = self.cache.storage.stats()
        assert found is not None
        return found

    def close(self) -> None:
        self.store.gate.set()
        assert self.cache.close()
        assert not self.cache.index.imports and not self.cache.index.departures


Opener = Callable[..., Served]


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Opens engines; all are closed in the end, whatever they waited for."""
    found: list[Served] = []

    def open_one(*arguments: Any, **options: Any) -> Served:
        found.append(Served(*arguments, **options))
        return found[-1]

    yield open_one
    for served in found:
        served.close()


@cached
def stored(family: str = "llama", prompts: tuple[tuple[int, ...], ...] = PROMPTS) -> Past:
    """A store with all pages of these prompts. Tests may add others to it."""
    past = Past(f"memory:waiting-{next(_NUMBERS)}")
    served = Served(family, past, sizes=(Tokens(1024), Tokens(8192)))
    for prompt in prompts:
        served.right(served.submit(prompt))
    served.close()
    return past


def keys_from(served_past: Past, family: str, tokens: tuple[int, ...], page: int) -> set[bytes]:
    """The keys of a prompt's objects from a page on."""
    memory = model_of(family).memory
    cache = TieredCache(memory, CacheConfig(Tokens(256)))
    pages = NaiveIndex(memory, cache.storage.space).stored_keys(tokens)[page:]
    assert cache.close()
    return {object_key(key, anchor.name) for key in pages for anchor in memory.anchors}


# -- best_effort -------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["exists", "read"])
def test_with_best_effort_no_request_waits_for_a_store_that_keeps_its_calls(
    call: str, opened: Opener
) -> None:
    served = opened(
        "llama", stored(), gates=(call,), patience=FetchPatience("best_effort", min_tokens=1)
    )
    request = served.submit(PROMPTS[0])
    steps = 0
    while request.state is RequestState.WAITING:
        served.engine.step()
        steps += 1
    assert steps <= 3, "one to ask, one to learn that it may go on, one to go on"
    served.right(request)
    assert request.by_tier == {} and not served.store.gate.is_set()
    assert served.stats.fetches == {"late": 1}


def test_with_best_effort_many_that_come_together_wait_no_longer_than_one(opened: Opener) -> None:
    served = opened(
        "llama", stored(), gates=("exists",), patience=FetchPatience("best_effort", min_tokens=1)
    )
    requests = [served.submit(prompt) for prompt in PROMPTS]
    for _ in range(3):
        served.engine.step()
    assert all(request.state is RequestState.RUNNING for request in requests)
    served.right(*requests)


def test_with_best_effort_what_came_while_others_had_their_turn_is_used(opened: Opener) -> None:
    served = opened(
        "llama", stored(), max_running=1, patience=FetchPatience("best_effort", min_tokens=1)
    )
    other = served.submit(text(random.Random(99), 40 * PAGE))
    served.until(lambda: other.state is RequestState.RUNNING)
    request = served.submit(PROMPTS[0])
    served.until(lambda: request.settled)
    assert request.state is RequestState.WAITING and other.finish is None
    served.right(other, request)
    assert request.by_tier == FOUND


# -- timeout -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
def test_when_the_time_is_up_a_request_goes_on_with_what_has_come(
    family: str, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_page_at_a_time(monkeypatch)
    past, came = stored(family, PROMPTS[:1]), PAGES // 2
    patience = FetchPatience("timeout", base_s=0.4, per_1k_s=0.0, min_tokens=1)
    keys = keys_from(past, family, PROMPTS[0], came)
    served = opened(family, past, gates=("read",), keys=keys, patience=patience)
    began = time.monotonic()
    request = served.submit(PROMPTS[0])
    served.until(lambda: request.state is RequestState.RUNNING)
    assert 0.4 <= time.monotonic() - began < 30
    served.right(request)
    found = request.by_tier[Tier.STORAGE]
    assert found == came * PAGE if family == "llama" else 0 < found <= came * PAGE
    assert served.stats.fetches == {"late": 1}


# -- wait_complete -----------------------------------------------------------------------------


def test_with_wait_complete_a_request_waits_until_all_has_come(opened: Opener) -> None:
    served = opened("llama", stored(), gates=("read",))
    request = served.submit(PROMPTS[0])
    served.until(lambda: served.store.asked["read"] > 0)
    served.steps(50)
    assert request.state is RequestState.WAITING
    served.store.gate.set()
    served.right(request)
    assert request.by_tier == FOUND and served.stats.fetches == {"fetched": 1}


def test_a_request_that_waits_for_storage_keeps_no_other_waiting(opened: Opener) -> None:
    served = opened("llama", stored(), gates=("read",))
    first = served.submit(PROMPTS[0], priority=5)
    served.until(lambda: served.store.asked["read"] > 0)
    others = [served.submit(text(random.Random(seed), 3 * PAGE + 1)) for seed in (50, 51, 52)]
    served.right(*others)
    assert first.state is RequestState.WAITING and not first.settled
    served.store.gate.set()
    served.right(first)
    assert first.by_tier == FOUND


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing_behind(opened: Opener) -> None:
    served = opened("llama", stored(), gates=("read",))
    request = served.submit(PROMPTS[0])
    served.until(lambda: served.store.asked["read"] > 0)
    served.engine.abort(request)
    served.steps(3)
    tree = served.cache.index.tree
    assert len(tree.imports) == 1, "the store still writes to these slots"
    served.store.gate.set()
    assert served.cache.drain(10)
    assert not tree.imports and not tree.leases and tree.nodes == 0
    free = served.cache.stats().pages[Tier.HOST, "kv"]
    assert free.free == free.capacity


# -- whether it pays ---------------------------------------------------------------------------


def test_what_takes_longer_to_fetch_than_to_compute_is_computed(opened: Opener) -> None:
    served = opened("llama", stored())
    served.right(first := served.submit(PROMPTS[0]))
    assert first.by_tier == FOUND, "the speed of the store is not known yet"
    assert served.stats.read_bytes_s is not None

    served.engine.token_s = 1e-12
    speed = served.stats.read_bytes_s
    served.right(declined := served.submit(PROMPTS[1]))
    assert declined.by_tier == {} and served.stats.fetches == {"fetched": 1, "declined": 1}
    assert served.stats.read_bytes_s > speed, "it would never be tried again"

    served.engine.token_s = 10.0
    served.right(fetched := served.submit(PROMPTS[2]))
    assert fetched.by_tier == FOUND


# -- how much ----------------------------------------------------------------------------------


def test_fetches_take_no_more_than_half_of_the_host(opened: Opener) -> None:
    host = 32
    served = opened("llama", stored(), sizes=(Tokens(1024), Tokens(host * PAGE)), gates=("read",))
    requests = [served.submit(prompt) for prompt in PROMPTS]
    imports, max_taken = served.cache.index.imports, 0
    for _ in range(50):
        served.steps(1)
        max_taken = max(max_taken, sum(len(one.taken) for one in imports.values()))
    assert PAGES < max_taken <= host // 2
    served.store.gate.set()
    served.right(*requests)
    found = [request.by_tier.get(Tier.STORAGE, 0) for request in requests]
    assert found[0] == PAGES * PAGE and 0 < found[1] < PAGES * PAGE


def test_a_prompt_longer_than_half_of_the_host_is_fetched_in_part(opened: Opener) -> None:
    long = text(random.Random(77), 30 * PAGE + 1)
    past, host = stored(prompts=(long,)), 40
    served = opened("llama", past, sizes=(Tokens(1024), Tokens(host * PAGE)))
    served.right(request := served.submit(long))
    half = host // 2
    assert half - 30 // 8 <= request.by_tier[Tier.STORAGE] // PAGE <= half
