"""Events are a complete account: a listener to all knows what is readable where."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from kvtide.index import POLICIES, Event, EventKind, EveryPages, Namespace
from kvtide.index.keys import pack
from kvtide.spec import Tier
from kvtide.testing.naive import NaiveIndex
from tests.index.building import build, compute, keep, readable
from tests.index.memories import ALL_MEMORIES, FULL, PAGE
from tests.index.traffic import Traffic

STEPS = 4000 if os.environ.get("KVTIDE_LONG_TESTS") else 150
SEED = int(os.environ.get("KVTIDE_SEED", "0"))


@pytest.mark.quick
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("name", sorted(ALL_MEMORIES))
def test_events_bytes_and_tree_agree_under_traffic(name: str, policy: str) -> None:
    traffic = Traffic(ALL_MEMORIES[name], SEED, policy)
    for number in range(STEPS):
        verb = traffic.step()
        assert traffic.problems() == [], f"seed {SEED}, step {number}: {verb}"
    traffic.end()
    assert traffic.index.validate() == [], f"seed {SEED}"
    assert traffic.index.tree.nodes == 0 and not traffic.index.tree.roots
    assert not any(traffic.naive.readable.values())


@pytest.mark.parametrize("name", sorted(ALL_MEMORIES))
def test_traffic_with_checkpoints_everywhere_agrees_too(name: str) -> None:
    traffic = Traffic(ALL_MEMORIES[name], SEED, placement=EveryPages(2))
    for number in range(STEPS):
        verb = traffic.step()
        assert traffic.problems() == [], f"seed {SEED}, step {number}: {verb}"


def test_traffic_does_enough_to_mean_something() -> None:
    """A random test that never gets to commit or land would prove nothing."""
    traffic = Traffic(ALL_MEMORIES["window"], 0)
    heard: list[Event] = []
    traffic.index.subscribe(heard.append)
    for _ in range(500):
        traffic.step()
    for kind in EventKind:
        for tier in Tier:
            assert sum(e.kind is kind and e.tier is tier for e in heard) >= 5, (kind, tier)


def test_traffic_meets_what_hiding_is_about() -> None:
    met: Counter[str] = Counter()
    for seed in range(4):
        traffic = Traffic(ALL_MEMORIES["window"], seed)
        for _ in range(500):
            before = {id(running): running.lease.boundary for running in traffic.running}
            traffic.step()
            hidden = [running for running in traffic.running if running.hidden]
            met["hidden leases"] += len(hidden)
            met["they commit"] += any(r.lease.boundary > before.get(id(r), 99) for r in hidden)
            held = [flying for flying in traffic.flying if flying.hidden]
            met["hidden pages in flight"] += len(held)
            tops = {
                (running.namespace, tuple(running.tokens[:PAGE]))
                for running in hidden
                if running.lease.boundary
            }
            met["the same tokens twice"] += any(
                (running.namespace, tuple(running.tokens[:PAGE])) in tops
                for running in traffic.running
                if running.lease.boundary and not running.hidden
            )
    assert min(met.values()) >= 5 and len(met) == 4, met


def test_an_event_has_slots_and_tokens_of_its_pages_and_names_the_page_before() -> None:
    index, heard = build(FULL), []
    index.subscribe(heard.append)
    text = list(range(5 * PAGE))
    lease = compute(index, text[: 2 * PAGE])
    lease.prompt.extend(text[2 * PAGE :])
    index.reserve(lease, 5 * PAGE)
    index.commit(lease, 5 * PAGE)
    table = index.page_table(lease, "kv").tolist()
    first, second = heard
    assert first.kind is second.kind is EventKind.STORED
    assert first.slots.tolist() == table[:2] and first.tokens == pack(text[: 2 * PAGE])
    assert first.above is None and first.namespace == Namespace()
    assert second.above == (first.cell, table[1]) and second.slots.tolist() == table[2:]
    assert second.tokens == pack(text[2 * PAGE :])
    index.release(lease)
    index.evict(Tier.DEVICE, "kv", 2)
    assert heard[-1].kind is EventKind.REMOVED and heard[-1].slots.tolist() == table[3:]
    assert [event.number for event in heard] == [1, 2, 3]


@pytest.mark.parametrize("name", sorted(ALL_MEMORIES))
def test_a_listener_that_begins_late_knows_as_much_as_one_that_heard_everything(name: str) -> None:
    traffic = Traffic(ALL_MEMORIES[name], SEED)
    for number in range(STEPS):
        traffic.step()
        traffic.naive.end_step()
        if number % 10 == 0:
            late = NaiveIndex(traffic.memory)
            for event in readable(traffic.index):
                assert event.number == traffic.index.tree.events.number
                late.hear(event)
            assert late.readable == traffic.naive.readable, f"seed {SEED}, step {number}"


def test_nothing_is_hashed_for_events(monkeypatch: pytest.MonkeyPatch) -> None:
    index = build(FULL)
    index.subscribe(lambda event: None)
    monkeypatch.setattr("kvtide.index.keys.chain", None)
    keep(index, range(20))
    assert index.clear(Tier.DEVICE) == 5
