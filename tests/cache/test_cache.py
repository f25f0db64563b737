"""What an engine sees of the cache: finding, reserving, restoring, and why something was missed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvtide.cache import CacheConfig, EveryPages, Lease, Namespace, Ratio, Tier, TieredCache, Tokens
from kvtide.cache.cache_stats import TransferQueue
from kvtide.tiers import Layout
from kvtide.transfer.lane import Ticket
from kvtide.transfer.strided import Way
from kvtide.transfer.transfers import TransferState
from tests.cache.building import Rig, text
from tests.cache.memories import (
    DRAFTED,
    FULL,
    OPTIONAL,
    PAGE,
    RECURRENT,
    TWO_HISTORIES,
    V4,
    V4_DRAFTED,
    WINDOW,
    every_memory,
)

# -- finding and restoring ------------------------------------------------------------------


@every_memory
def test_a_prompt_finds_what_an_earlier_one_computed(build, memory):
    rig = build(memory)
    rig.remember(text(1, 5))
    lease = rig.started(text(1, 7))
    assert lease.cached_tokens == 5 * PAGE
    assert lease.by_tier == {Tier.DEVICE: 5 * PAGE}
    assert not lease.loading and rig.misread(lease) == []


@pytest.mark.quick
@every_memory
@pytest.mark.parametrize("host", Layout)
@pytest.mark.parametrize("device", Layout)
def test_restored_pages_hold_what_was_computed_layer_by_layer(build, memory, device, host):
    rig = build(memory, layouts=(device, host))
    rig.remember_on_host(text(1, 5))
    lease = rig.started(text(1, 6))
    assert lease.cached_tokens == 5 * PAGE and lease.by_tier == {Tier.HOST: 5 * PAGE}
    assert rig.misread(lease)
    for layers in rig.cache.hardware.copier.groups:
        rig.hands[Way.LOAD].run_legs(1)
        for layer in layers:
            rig.cache.wait(lease, layer)
        assert rig.misread(lease, range(layers.stop)) == []
    assert rig.cache.poll().landed == (lease,)
    assert not lease.loading and rig.misread(lease) == []


def test_a_restored_prefix_goes_on_like_any_other(build):
    rig = build(WINDOW)
    rig.remember_on_host(text(1, 3))
    lease = rig.started(text(1, 5))
    rig.settle()
    rig.compute(lease)
    rig.cache.release(lease)
    assert rig.found(text(1, 6), Tier.DEVICE) == 5 * PAGE


@pytest.mark.quick
@pytest.mark.parametrize("pages", [1, 2, 5])
@every_memory
def test_a_prompt_of_whole_pages_leaves_one_token_to_compute(build, memory, pages):
    rig = build(memory, placement=EveryPages(1))
    rig.remember(text(1, pages, extra=2))
    assert rig.found(text(1, pages, extra=1)) == pages * PAGE
    assert rig.found(text(1, pages, extra=0)) == (pages - 1) * PAGE


def test_a_match_changes_nothing(build):
    rig = build(WINDOW)
    rig.remember(text(1, 4))
    rig.settle()
    before = rig.cache.stats(), rig.cache.index.tick
    rig.found(text(1, 4))
    rig.cache.why(rig.cache.prompt(text(2, 4)))
    assert (rig.cache.stats(), rig.cache.index.tick) == before


def test_a_match_that_is_out_of_date_is_made_again(build):
    rig = build(host=0)
    rig.remember(text(1, 4))
    match = rig.cache.match(rig.cache.prompt(text(1, 4)))
    rig.cache.flush(Tier.DEVICE)
    lease = rig.cache.reserve(match)
    assert match.tokens == 4 * PAGE and lease.cached_tokens == 0


def test_a_match_says_from_which_tier_its_tokens_would_come(build):
    rig = build()
    rig.remember(text(1, 5))
    rig.settle()
    rig.cache.index.evict(Tier.DEVICE, "kv", 2)
    match = rig.cache.match(rig.cache.prompt(text(1, 5)))
    assert match.by_tier == {Tier.DEVICE: 3 * PAGE, Tier.HOST: 2 * PAGE}
    assert rig.found(text(1, 5), Tier.DEVICE) == 3 * PAGE


def test_only_the_first_of_several_loads_is_handed_over(build, monkeypatch):
    """Requests behind it would wait for it too."""
    rig = build()
    for number in (1, 2, 3):
        rig.remember_on_host(text(number, 2))
    waited: list[Ticket] = []
    monkeypatch.setattr(Ticket, "wait_issued", lambda ticket, timeout_s: waited.append(ticket))
    first, _ = (rig.started(text(number, 3)) for number in (1, 2))
    (transfer,) = first.transfers
    assert waited == [transfer.ticket]
    rig.settle()
    rig.started(text(3, 3))
    assert len(waited) == 2


def test_only_what_the_device_lacks_is_loaded(build):
    rig = build()
    rig.remember(text(1, 5))
    rig.settle()
    rig.cache.index.evict(Tier.DEVICE, "kv", 2)
    lease = rig.started(text(1, 5))
    rig.settle()
    assert rig.cache.stats().moved_pages["load"] == 2
    assert rig.misread(lease) == []


@pytest.mark.parametrize("memory", [FULL, WINDOW, RECURRENT, V4], ids=lambda memory: memory.model)
def test_a_prefix_that_the_host_has_in_part_is_restored_as_far_as_it_goes(build, memory):
    rig = build(memory, placement=EveryPages(1))
    rig.remember_on_host(text(1, 6))
    rig.cache.index.evict(Tier.HOST, "kv", 2)
    lease = rig.started(text(1, 6))
    rig.settle()
    assert lease.cached_tokens == 4 * PAGE and rig.misread(lease) == []


def test_namespaces_never_share_a_page(build):
    rig = build()
    names = (Namespace(), Namespace(adapter="a"), Namespace(cache_salt="a"))
    for number, namespace in enumerate(names):
        assert all(rig.found(text(1, 3), namespace=other) == 0 for other in names[number:])
        rig.remember(text(1, 3), namespace=namespace)
        rig.settle()
    leases = [rig.started(text(1, 3), namespace=namespace) for namespace in names]
    assert all(lease.cached_tokens == 3 * PAGE and not rig.misread(lease) for lease in leases)
    slots = [slot for lease in leases for slot in rig.cache.page_table(lease, "kv")[:3].tolist()]
    assert len(set(slots)) == 9


def test_what_a_model_writes_through_views_is_what_a_restore_brings():
    """Without any rig: opened from a config, written and read by field."""
    cache = TieredCache(WINDOW, CacheConfig(Tokens(64), Ratio(2.0), tokens_per_checkpoint=PAGE))
    lease = cache.reserve(cache.match(cache.prompt(text(1, 3))))
    wrote = {}
    for pool, layer in (("kv", 0), ("kv", 2), ("swa", 1), ("swa", 3)):
        slots = torch.from_numpy(cache.page_table(lease, pool)[1:3]).long()
        wrote[pool, layer] = torch.randint(0, 256, (2, PAGE, WINDOW.pool(pool).entry.bytes))
        cache.view(pool, layer)["x"][slots] = wrote[pool, layer].byte()
    cache.commit(lease, 3 * PAGE)
    cache.release(lease)
    assert cache.drain(10) and cache.flush(Tier.DEVICE)
    lease = cache.reserve(cache.match(cache.prompt(text(1, 3))))
    cache.load(lease)
    for (pool, layer), expected in wrote.items():
        cache.wait(lease, layer)
        slots = torch.from_numpy(cache.page_table(lease, pool)[1:3]).long()
        assert torch.equal(cache.view(pool, layer)["x"][slots], expected.byte())
    assert cache.drain(10) and cache.validate() == []
    cache.release(lease)
    cache.close()


def test_without_a_host_tier_everything_but_restoring_works():
    cache = TieredCache(FULL, CacheConfig(Tokens(32), host_size=None))
    lease = cache.reserve(cache.match(cache.prompt(text(1, 4))))
    cache.load(lease)
    cache.commit(lease, 4 * PAGE)
    cache.release(lease)
    assert cache.match(cache.prompt(text(1, 4))).by_tier == {Tier.DEVICE: 4 * PAGE}
    assert not cache.prefetch(cache.prompt(text(1, 4)))
    assert cache.reserve(cache.match(cache.prompt(text(2, 7)))) is not None
    assert cache.drain(1) and cache.validate() == []
    assert cache.stats().skipped_backups == 0
    cache.close()


# -- reserving ------------------------------------------------------------------------------


@every_memory
def test_no_room_changes_nothing(build, memory):
    rig = build(memory, device=8)
    while rig.begin(text(1, 6)) is not None:
        pass
    before = rig.cache.stats()
    assert rig.begin(text(2, 6)) is None
    after = rig.cache.stats()
    assert (after.pages, after.in_flight, after.prompt_tokens) == (
        before.pages, before.in_flight, before.prompt_tokens,
    )  # fmt: skip
    assert after.refused == before.refused + 1


def test_there_is_room_again_after_a_release(build):
    rig = build(device=8)
    lease = rig.started(text(1, 6))
    assert rig.begin(text(2, 4)) is None
    rig.cache.release(lease)
    assert rig.begin(text(2, 4)) is not None


def test_releasing_twice_is_harmless(build):
    rig = build()
    rig.remember(text(1, 2))
    first, second = rig.started(text(1, 4)), rig.started(text(1, 4))
    rig.cache.release(first)
    rig.cache.release(first)
    assert rig.problems() == []
    rig.cache.flush(Tier.DEVICE)
    assert rig.misread(second) == []


@every_memory
def test_a_lease_grows_as_the_model_generates(build, memory):
    rig = build(memory)
    lease = rig.started(text(1, 2))
    rig.compute(lease)
    lease.append(text(1, 4)[2 * PAGE + 1 :])
    assert rig.cache.grow(lease, lease.prompt.tokens)
    rig.compute(lease)
    rig.cache.release(lease)
    assert rig.found(text(1, 4)) == 4 * PAGE


def test_promised_growth_cannot_be_taken_by_others(build):
    rig = build(device=8)
    lease = rig.started(text(1, 2, extra=0), growth_pages=4)
    assert rig.begin(text(2, 3)) is None
    lease.append(text(1, 6, extra=0)[2 * PAGE :])
    assert rig.cache.grow(lease, lease.prompt.tokens)


def test_a_lease_that_cannot_grow_is_as_it_was(build):
    rig = build(device=8)
    lease, _ = rig.started(text(1, 2)), rig.started(text(2, 4))
    lease.append(list(range(PAGE)))
    table = rig.cache.page_table(lease, "kv").tolist()
    assert not rig.cache.grow(lease, lease.prompt.tokens)
    assert rig.cache.page_table(lease, "kv").tolist() == table


# -- optional sidecars ----------------------------------------------------------------------


@pytest.mark.parametrize("memory", [DRAFTED, V4_DRAFTED])
def test_a_draft_is_there_where_it_was_computed_also_after_a_restore(build, memory):
    rig = build(memory)
    lease = rig.started(text(1, 5, extra=2))
    rig.compute(lease, 2, without=("draft",))
    rig.compute(lease, 5)
    rig.cache.release(lease)
    rig.settle()
    rig.cache.flush(Tier.DEVICE)
    lease = rig.started(text(1, 5, extra=2))
    rig.settle()
    assert rig.cache.carries(lease, "draft").tolist() == [False] * 2 + [True] * 3
    assert rig.misread(lease) == []


def test_commits_made_while_loading_keep_apart_what_each_was_made_without(build):
    rig = build(DRAFTED)
    rig.remember_on_host(text(1, 1, extra=2))
    lease = rig.started(text(1, 5, extra=2))
    assert lease.loading
    for first, end, without in ((1, 3, ("draft",)), (3, 5, ())):
        rig.write(lease, first, end, without)
        rig.cache.commit(lease, end * PAGE + 1, without)
    rig.settle()
    assert rig.cache.carries(lease, "draft").tolist() == [True, False, False, True, True]
    assert rig.misread(lease) == []


def test_an_optional_pool_that_was_given_up_does_not_shorten_a_prefix(build):
    rig = build(OPTIONAL, host=0)
    rig.remember(text(1, 4))
    rig.cache.index.evict(Tier.DEVICE, "draft", 4)
    lease = rig.started(text(1, 4))
    assert lease.cached_tokens == 4 * PAGE
    assert (rig.cache.page_table(lease, "draft")[:4] == -1).all()


# -- why not more ---------------------------------------------------------------------------


def reasons(rig: Rig, tokens: list[int], slowest: Tier = Tier.HOST) -> set[tuple[str, str]]:
    """Why a lease for these tokens found no more, as it says itself and as counted."""
    before = rig.cache.stats().misses
    lease = rig.started(tokens, slowest=slowest)
    after = rig.cache.stats().misses
    stops = {(stop.pool, stop.reason) for stop in lease.why}
    assert stops == {miss for miss in after if after[miss] == before.get(miss, 0) + 1}
    rig.cache.release(lease)
    return stops


def test_a_prompt_that_was_never_seen_says_so(build):
    rig = build(WINDOW)
    rig.remember(text(1, 2))
    unseen = "no prompt with these tokens was kept"
    assert reasons(rig, text(1, 4)) == {("kv", unseen), ("swa", unseen)}


def test_a_prompt_that_found_all_it_could_has_no_reason(build):
    rig = build(WINDOW)
    rig.remember(text(1, 2))
    assert reasons(rig, text(1, 2)) == set()


def test_pages_that_were_given_up_are_named(build):
    rig = build(TWO_HISTORIES, host=0)
    rig.remember(text(1, 4))
    rig.cache.index.evict(Tier.DEVICE, "other", 3)
    assert reasons(rig, text(1, 4)) == {("other", "pages were given up")}


def test_pages_that_are_arriving_are_named(build):
    rig = build()
    rig.remember_on_host(text(1, 4))
    rig.started(text(1, 4))
    assert reasons(rig, text(1, 4), Tier.DEVICE) == {("kv", "pages are still arriving")}


def test_a_missing_checkpoint_is_named(build):
    rig = build(RECURRENT)
    rig.remember(text(1, 4))
    parting = text(1, 2, extra=0) + text(2, 2)
    assert reasons(rig, parting) == {("state", "no checkpoint was kept further on")}


def test_why_says_the_same_without_a_lease(build):
    rig = build(RECURRENT)
    rig.remember(text(1, 4))
    prompt = rig.cache.prompt(text(1, 2, extra=0) + text(2, 2))
    lease = rig.cache.reserve(rig.cache.match(prompt))
    fresh = build(RECURRENT)
    fresh.remember(text(1, 4))
    assert tuple(fresh.cache.why(prompt)) == lease.why


# -- flushing and prefetching ---------------------------------------------------------------


@every_memory
def test_flushing_the_device_leaves_the_host_to_restore_from(build, memory):
    rig = build(memory)
    rig.remember(text(1, 4))
    rig.settle()
    pages = rig.cache.stats().pages
    resident = sum(pages[Tier.DEVICE, anchor.name].resident for anchor in memory.anchors)
    assert rig.cache.flush(Tier.DEVICE) == resident
    assert rig.found(text(1, 4), Tier.DEVICE) == 0
    assert rig.found(text(1, 4)) == 4 * PAGE
    lease = rig.started(text(1, 4))
    rig.settle()
    assert rig.misread(lease) == []


def test_flushing_the_host_leaves_the_device(build):
    rig = build()
    rig.remember(text(1, 4))
    rig.settle()
    assert rig.cache.flush(Tier.HOST) == 4
    assert rig.found(text(1, 4)) == 4 * PAGE


def test_flushing_spares_what_is_in_use_and_what_is_on_its_way(build):
    rig = build()
    rig.remember_on_host(text(1, 2))
    rig.remember(text(2, 3))
    rig.settle()
    loading, reading = rig.started(text(1, 2)), rig.started(text(2, 3))
    assert rig.cache.flush(Tier.DEVICE) == 0
    assert rig.cache.flush(Tier.HOST) == 3
    rig.settle()
    assert rig.misread(loading) == [] and rig.misread(reading) == []


@every_memory
def test_a_prefetch_makes_a_later_request_wait_for_nothing(build, memory):
    rig = build(memory)
    rig.remember_on_host(text(1, 4))
    assert rig.cache.prefetch(rig.cache.prompt(text(1, 4)))
    rig.settle()
    lease = rig.started(text(1, 4))
    assert lease.by_tier == {Tier.DEVICE: 4 * PAGE} and not lease.loading
    assert rig.misread(lease) == []


def test_a_prefetch_that_no_request_follows_holds_nothing(build):
    rig = build(WINDOW)
    rig.remember_on_host(text(1, 4))
    assert rig.cache.prefetch(rig.cache.prompt(text(1, 4)))
    rig.settle()
    assert not rig.cache.index.leases
    assert rig.cache.flush(Tier.DEVICE) == 6


def test_a_request_joins_a_prefetch_that_is_under_way(build):
    rig = build()
    rig.remember_on_host(text(1, 4))
    rig.cache.prefetch(rig.cache.prompt(text(1, 4)))
    lease = rig.started(text(1, 4))
    assert lease.loading
    rig.settle()
    assert rig.cache.stats().moved_pages["load"] == 4
    assert rig.misread(lease) == []


def test_there_is_nothing_to_prefetch_where_all_is_on_the_device(build):
    rig = build(WINDOW)
    rig.remember(text(1, 4))
    rig.settle()
    assert not rig.cache.prefetch(rig.cache.prompt(text(1, 4)))
    assert not rig.cache.prefetch(rig.cache.prompt(text(2, 4)))


@pytest.mark.parametrize("swa", [3, 4])
def test_a_prefetch_evicts_nothing(build, swa):
    """One page of history is missing, and two of the window: the window decides."""
    rig = build(WINDOW, device={"kv": 16, "swa": swa})
    rig.remember(text(1, 2))
    rig.settle()
    rig.cache.index.evict(Tier.DEVICE, "swa", 2)
    rig.cache.index.evict(Tier.DEVICE, "kv", 1)
    rig.remember(text(2, 3, extra=0))
    rig.settle()
    assert rig.cache.prefetch(rig.cache.prompt(text(1, 2))) == (swa == 4)
    rig.settle()
    assert rig.found(text(2, 3), Tier.DEVICE) == 3 * PAGE


def test_a_window_alone_is_prefetched_too(build):
    rig = build(WINDOW)
    rig.remember(text(1, 4))
    rig.settle()
    rig.cache.index.evict(Tier.DEVICE, "swa", 4)
    assert rig.cache.prefetch(rig.cache.prompt(text(1, 4)))
    rig.settle()
    assert rig.found(text(1, 4), Tier.DEVICE) == 4 * PAGE


# -- looking --------------------------------------------------------------------------------


def test_statistics_count_tokens_by_tier_and_transfers_by_end(build):
    rig = build(V4_DRAFTED)
    rig.remember_on_host(text(1, 4))
    lease = rig.started(text(1, 4))
    rig.settle()
    rig.cache.release(lease)
    stats = rig.cache.stats()
    assert stats.prompt_tokens == 2 * len(text(1, 4))
    assert stats.cached_tokens == {Tier.HOST: 4 * PAGE}
    assert stats.transfers == {("backup", "landed"): 1, ("load", "landed"): 1}
    pages = {"kv": 4, "swa": 1}
    moved = sum(count * V4_DRAFTED.slot_bytes(anchor) for anchor, count in pages.items())
    assert stats.moved_pages == {"load": 5, "backup": 5}
    assert stats.moved_bytes == {"load": moved, "backup": moved}
    assert (stats.in_flight, stats.overdue, stats.refused) == (0, 0, 0)
    assert stats.lane_failures == {"load": 0, "backup": 0}
    of_pools = {(way, pool): n for way in ("load", "backup") for pool, n in pages.items()}
    assert stats.moved_pool_pages == of_pools
    assert {way: one.count for way, one in stats.transfer_seconds.items()} == {
        "load": 1,
        "backup": 1,
    }


def test_statistics_show_transfers_that_are_reserved_and_in_flight(build):
    rig = build()
    rig.remember(text(1, 3))
    queued = rig.cache.stats().queues
    assert queued["backup"] == TransferQueue(reserved=1, in_flight=0, pages=3)
    assert queued["load"] == TransferQueue()
    rig.cache.poll()
    assert rig.cache.stats().queues["backup"] == TransferQueue(0, in_flight=1, pages=3)
    rig.settle()
    assert rig.cache.stats().queues["backup"] == TransferQueue()


def test_a_transfers_time_is_that_from_its_submission_to_the_poll_that_lands_it(build):
    rig = build()
    clock = iter((100.0, 100.02))
    rig.cache._in_flight._transfers._clock = lambda: next(clock)
    rig.remember(text(1, 2))
    rig.cache.poll()
    rig.hands[Way.BACKUP].run()
    rig.cache.poll()
    seen = rig.cache.stats().transfer_seconds["backup"]
    assert seen.count == 1 and seen.total_s == pytest.approx(0.02)


def test_statistics_count_pages_that_are_pinned_and_pages_that_were_evicted(build):
    rig = build()
    rig.remember_on_host(text(1, 4))
    assert rig.cache.stats().evicted_pages[Tier.DEVICE, "kv"] == 4
    lease = rig.started(text(1, 4))
    rig.settle()
    pages = rig.cache.stats().pages[Tier.DEVICE, "kv"]
    assert (pages.resident, pages.pinned) == (4, 4)
    rig.cache.release(lease)
    assert rig.cache.stats().pages[Tier.DEVICE, "kv"].pinned == 0


def test_a_poll_tells_once_that_a_lease_is_ready(build):
    rig = build()
    rig.remember_on_host(text(1, 2))
    lease = rig.started(text(1, 4))
    assert rig.cache.poll().landed == ()
    rig.hands[Way.LOAD].run()
    assert rig.cache.poll().landed == (lease,)
    rig.compute(lease)
    landed = []
    while rig.cache.stats().in_flight:
        rig.hands[Way.BACKUP].run()
        landed += rig.cache.poll().landed
    assert landed == [] and rig.cache.stats().transfers["backup", "landed"] == 2


def test_draining_says_whether_all_is_over(build):
    rig = build()
    rig.remember(text(1, 2))
    assert not rig.cache.drain(0.001)
    rig.settle()
    assert rig.cache.drain(0.001)


def damages(other: Lease) -> dict[str, dict[str, object]]:
    """Damage to a lease or to its transfer, by the sentence that names it."""
    arrival = other.transfers[0].holds
    return {
        "two transfers bring the same arrival": {"transfer": {"holds": arrival}},
        "an arrival is expected that no transfer brings": {"transfer": {"holds": None}},
        "a transfer brings an arrival that the index does not expect": {
            "transfer": {"holds": replace(arrival)}
        },
        "is in flight and still open": {"transfer": {"holds": None}},
        "is landed and still open": {"transfer": {"state": TransferState.LANDED}},
        "its prefix is not at home": {"lease": {"transfers": []}},
        "a commit that nothing will make happen": {
            "lease": {"transfers": [], "pending": [(2 * PAGE, ())]}
        },
        "is not known to the index": {"lease": {"_index_lease": other._index_lease}},
    }


def test_what_does_not_fit_together_is_named(build, monkeypatch):
    rig = build()
    rig.remember_on_host(text(1, 2))
    rig.remember_on_host(text(2, 2))
    lease, other = rig.started(text(1, 2)), rig.started(text(2, 2))
    owners = {"lease": lease, "transfer": lease.transfers[0]}
    for sentence, damage in damages(other).items():
        with monkeypatch.context() as broken:
            for owner, changes in damage.items():
                for name, value in changes.items():
                    broken.setattr(owners[owner], name, value)
            assert any(sentence in violation for violation in rig.cache.validate()), sentence
        assert rig.cache.validate() == []
