"""Replays: every token is accounted for, and every byte that moves has a reason."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.index import Arrival, Index, IndexLease
from kvtide.planner import traces, workloads
from kvtide.planner.hit_curve import hit_curve
from kvtide.planner.replay import LINKS, Rates, Report, Setup, replay, size_tiers
from kvtide.planner.traces import TraceRequest
from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec, Reuse, Tier, catalog

TRACES = Path(__file__).parents[3] / "shared" / "traces"
PAGE = 4


def pool(name: str, size: int, reuse: Reuse | None = None) -> PoolSpec:
    """`size` bytes per page."""
    entry = Entry((Field("x", (size,), DType.UINT8),))
    return PoolSpec(name, (0,), entry, PAGE, reuse=reuse or Reuse())


KV, WINDOW, STATE = pool("kv", 160), pool("swa", 112, Reuse(5)), pool("state", 800, Reuse(1, PAGE))
FULL = ModelMemory("full", PAGE, (KV,), layers=1)
HYBRID = ModelMemory("hybrid", PAGE, (KV, WINDOW), layers=1)
RECURRENT = ModelMemory("recurrent", PAGE, (KV, STATE), layers=1)
WINDOWS = ModelMemory("windows", PAGE, (WINDOW,), layers=1)


def prompt(text: str) -> list[int]:
    """A page for every letter."""
    return [ord(letter) * PAGE + i for letter in text for i in range(PAGE)]


def requests(*prompts: list[int]) -> list[TraceRequest]:
    return [TraceRequest(0.0, np.array(p, dtype=np.int32), 0) for p in prompts]


def serve(memory: ModelMemory, pages: tuple[int, ...], *texts: str) -> Report:
    """Replay prompts of one page per letter and one token more; `pages` of every pool per tier."""
    tiers = dict(zip(Tier, pages, strict=False))
    capacity = {t: {a.name: count for a in memory.anchors} for t, count in tiers.items()}
    return replay(Setup(memory, capacity, "lru"), requests(*([*prompt(t), 1] for t in texts)))


# -- one request after another --------------------------------------------------------------


def test_repeated_prompt_is_found_on_the_device_and_nothing_is_loaded() -> None:
    report = serve(FULL, (9, 9, 9), "abc", "abc")
    assert report.hit_tokens == {Tier.DEVICE: 3 * PAGE, Tier.HOST: 0, Tier.STORAGE: 0}
    assert report.moved_bytes == {"load": 0, "backup": 480, "fetch": 0, "store": 480}
    assert report.prompt_tokens == 2 * (3 * PAGE + 1)


def test_the_last_token_is_always_computed() -> None:
    report = replay(Setup(FULL, {Tier.DEVICE: {"kv": 9}}), requests(prompt("ab"), prompt("ab")))
    assert report.saved_tokens == PAGE


def test_what_the_device_gave_up_is_loaded_from_the_host() -> None:
    report = serve(FULL, (4, 9), "abc", "xyz", "abc")
    assert report.hit_tokens == {Tier.DEVICE: 0, Tier.HOST: 3 * PAGE}
    assert report.moved_bytes == {"load": 480, "backup": 960}


def test_what_the_host_gave_up_is_fetched_and_then_loaded() -> None:
    report = serve(FULL, (4, 3, 20), "abc", "xyz", "abc")
    assert report.hit_tokens == {Tier.DEVICE: 0, Tier.HOST: 0, Tier.STORAGE: 3 * PAGE}
    assert report.moved_bytes == {"load": 480, "backup": 960, "fetch": 480, "store": 960}


def test_prefix_spread_over_tiers_counts_for_each_what_it_had() -> None:
    # "xy" pushes the deep end of "abcd" off the device; the host still has all of it.
    report = serve(FULL, (6, 20), "abcd", "xy", "abcd")
    found = report.hit_tokens
    assert found[Tier.DEVICE] > 0
    assert found[Tier.HOST] > 0
    assert sum(found.values()) == 4 * PAGE
    assert report.moved_bytes["load"] == found[Tier.HOST] // PAGE * 160


def test_moved_bytes_count_every_pool_by_its_own_size() -> None:
    # The window reaches 5 tokens: two pages at the end of each prompt.
    assert serve(HYBRID, (9, 9), "abcd").moved_bytes["backup"] == 4 * 160 + 2 * 112


def test_prompt_longer_than_the_device_is_counted_and_leaves_nothing() -> None:
    report = serve(FULL, (3, 9), "abcdef", "ab", "ab")
    assert report.unfit_requests == 1
    assert report.requests == 3
    assert report.saved_tokens == 2 * PAGE
    assert report.resident_pages == {(Tier.DEVICE, "kv"): 2, (Tier.HOST, "kv"): 2}


def test_fetch_without_room_is_counted_and_the_prompt_served_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = Index.copy

    def no_fetch(self: Index, lease: IndexLease, source: Tier, target: Tier) -> Arrival | None:
        return None if source is Tier.STORAGE else copy(self, lease, source, target)

    monkeypatch.setattr(Index, "copy", no_fetch)
    report = serve(FULL, (4, 3, 20), "abc", "xyz", "abc")
    assert report.skipped_copies == {"fetch": 1}
    assert report.saved_tokens == 0
    assert report.unfit_requests == 0


def test_misses_name_the_pool_the_reason_and_the_tokens() -> None:
    # "abx" shares two pages with "abcd", but no window was kept there.
    report = serve(HYBRID, (20,), "abcd", "abx")
    assert [(m.pool, m.requests, m.tokens) for m in report.misses] == [
        ("kv", 1, 4 * PAGE),
        ("swa", 1, 4 * PAGE),
        ("swa", 1, 2 * PAGE),
    ]
    assert report.saved_tokens == 0


def test_windows_alone_count_the_whole_prefix_they_let_resume() -> None:
    report = serve(WINDOWS, (9,), "abcdef", "abcdefg")
    assert report.hit_tokens == {Tier.DEVICE: 6 * PAGE}


# -- times ----------------------------------------------------------------------------------


def test_seconds_are_tokens_and_bytes_over_the_assumed_rates() -> None:
    report = serve(FULL, (4, 3, 20), "abc", "xyz", "abc")
    rates = Rates(6.0, link_bytes_s=160.0, storage_read_bytes_s=80.0, storage_write_bytes_s=64.0)
    assert report.prefill_saved_s(rates) == 12 / 6
    assert [report.link_s(link, rates) for link in LINKS] == [3.0, 6.0, 6.0, 15.0]
    assert report.waited_s(rates) == 3.0 + 6.0
    assert report.saved_s(rates) == 2.0 - 9.0


# -- always ---------------------------------------------------------------------------------

texts = st.lists(st.text("ab", min_size=1, max_size=6), max_size=20)
sizes = st.lists(st.integers(3, 9), min_size=1, max_size=3).map(tuple)


@settings(max_examples=60)
@given(st.sampled_from([FULL, HYBRID, RECURRENT, WINDOWS]), sizes, texts)
def test_counts_balance_whatever_is_replayed(
    memory: ModelMemory, pages: tuple[int, ...], served: list[str]
) -> None:
    report = serve(memory, pages, *served)
    assert 0 <= report.saved_tokens <= report.prompt_tokens
    assert report.hit_rate == pytest.approx(sum(map(report.tier_hit_rate, report.hit_tokens)))
    assert all(count >= 0 for count in report.evicted_pages.values())
    for (tier, _), count in report.resident_pages.items():
        assert count <= pages[tier]
    if memory is FULL and len(pages) > 1 and not report.unfit_requests:
        below = sum(report.hit_tokens[tier] for tier in list(report.hit_tokens)[1:])
        assert report.moved_bytes["load"] == below // PAGE * 160
    assert report == serve(memory, pages, *served), "a replay is the same each time"


def test_room_for_everything_finds_all_that_was_seen_before() -> None:
    trace = workloads.parse("agent:sessions=4")
    memory = catalog.resolve("qwen3-8b")
    capacity = size_tiers(memory, {Tier.DEVICE: 10**15}, trace)
    report = replay(Setup(memory, capacity), trace)
    assert report.hit_rate == hit_curve(trace, memory.page_tokens).best_hit_rate
    assert set(report.evicted_pages.values()) == {0}


def test_a_tier_of_petabytes_gets_no_more_slots_than_the_trace_has_pages() -> None:
    trace = workloads.parse("chat:users=2,turns=2")
    tiers = size_tiers(catalog.resolve("qwen3-8b"), {Tier.DEVICE: 10**15, Tier.HOST: 0}, trace)
    assert list(tiers) == [Tier.DEVICE]
    assert tiers[Tier.DEVICE]["kv"] <= trace.prompt_tokens // 64 + trace.requests


@pytest.mark.full
def test_public_trace_replays_faster_than_20000_requests_a_minute() -> None:
    path = TRACES / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip(f"no public trace at {path}")
    trace = traces.load(path)
    memory = catalog.resolve("deepseek-v4-flash")
    tiers = {Tier.DEVICE: 20 * 10**9, Tier.HOST: 100 * 10**9, Tier.STORAGE: 400 * 10**9}
    setup = Setup(memory, size_tiers(memory, tiers, trace))
    begun = time.process_time()
    report = replay(setup, itertools.islice(trace, 3000))
    assert report.requests / (time.process_time() - begun) > 20_000 / 60
