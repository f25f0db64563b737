"""Sizing: what fits is used, nothing more, and windows get their share."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec, Reuse, SpecError, catalog
from kvtide.spec.residency import HotShape, served_hot
from kvtide.spec.sizing import (
    bytes_for,
    largest_batch,
    longest_context,
    pages_for,
    requests_in,
    running_bytes,
)


def pool(name: str, size: int, reuse: Reuse | None = None, follows: str | None = None) -> PoolSpec:
    """One entry of `size` bytes per page of 16 tokens."""
    entry = Entry((Field("x", (size,), DType.UINT8),)) if size else Entry(())
    layers = (0,) if size else ()
    return PoolSpec(name, layers, entry, 16, follows=follows, reuse=reuse or Reuse())


def memory(*pools: PoolSpec) -> ModelMemory:
    return ModelMemory("m", 16, pools, layers=1)


KV, WINDOW = pool("kv", 1600), pool("swa", 480, Reuse(17))
STATE = pool("state", 11200, Reuse(1, stride=16))
FREE = pool("kv", 0)
MEMORIES = {
    "history": memory(KV),
    "window beside history": memory(KV, WINDOW),
    "state beside history": memory(KV, STATE),
    "window beside a zero-byte anchor": memory(FREE, WINDOW),
    "window alone": memory(WINDOW),
    "zero-byte anchor with a sidecar": memory(FREE, pool("c4", 144, follows="kv"), WINDOW),
}


def cost(of: ModelMemory, pages: dict[str, int]) -> int:
    return sum(of.slot_bytes(anchor) * count for anchor, count in pages.items())


@given(st.sampled_from(list(MEMORIES)), st.integers(0, 10**7), st.integers(16, 10**4))
def test_pages_fit_and_one_more_page_of_tokens_would_not(
    name: str, total: int, per_checkpoint: int
) -> None:
    declared = MEMORIES[name]
    assume(total >= bytes_for(declared, 1, per_checkpoint))
    pages = pages_for(declared, total, per_checkpoint)
    assert cost(declared, pages) <= total
    if "kv" in pages:
        assert bytes_for(declared, pages["kv"] + 1, per_checkpoint) > total
    else:
        # A page of tokens brings at most the two pages that the window reaches over.
        assert total - cost(declared, pages) < 2 * 480 or pages["swa"] == 3


def test_history_alone_takes_every_page_that_fits() -> None:
    assert pages_for(MEMORIES["history"], 17_599) == {"kv": 10}


def test_windows_get_one_checkpoint_of_their_reach_per_distance() -> None:
    pages = pages_for(MEMORIES["window beside history"], 16 * 10**6, tokens_per_checkpoint=160)
    # 17 tokens reach over two pages; a checkpoint every ten pages.
    assert pages["swa"] == pages["kv"] * 2 // 10
    assert pages["kv"] == 9434


def test_a_small_tier_still_holds_what_one_request_needs_to_run() -> None:
    pages = pages_for(MEMORIES["window beside history"], 16_000)
    assert pages == {"kv": 8, "swa": 6}


def test_zero_byte_anchor_is_bounded_by_what_its_windows_cost() -> None:
    pages = pages_for(
        MEMORIES["window beside a zero-byte anchor"], 48_000, tokens_per_checkpoint=16
    )
    assert pages["swa"] == 100
    assert pages["kv"] == 50


def test_windows_without_a_history_fill_the_tier() -> None:
    pages = pages_for(MEMORIES["window alone"], 48_000)
    assert pages == {"swa": 100}


def test_a_tier_too_small_for_a_page_of_every_pool_names_the_least() -> None:
    min_bytes = bytes_for(MEMORIES["state beside history"], 1)
    assert min_bytes == 1600 + 3 * 11200
    with pytest.raises(SpecError, match=r"35,199 bytes do not hold .* use at least 35,200"):
        pages_for(MEMORIES["state beside history"], min_bytes - 1)
    assert pages_for(MEMORIES["state beside history"], min_bytes) == {"kv": 1, "state": 3}


def test_memory_without_a_byte_is_refused() -> None:
    with pytest.raises(SpecError, match="no pool keeps a byte"):
        pages_for(memory(FREE), 10)


def test_distance_of_no_tokens_is_refused() -> None:
    with pytest.raises(SpecError, match="at least 1"):
        pages_for(MEMORIES["history"], 1000, 0)


@pytest.mark.parametrize("name", catalog.names())
def test_built_in_models_use_nearly_all_of_a_large_tier(name: str) -> None:
    declared = catalog.resolve(name)
    total = 10**13
    used = cost(declared, pages_for(declared, total))
    assert 0.99 * total < used <= total


# -- requests that run together ---------------------------------------------------------------


def test_requests_take_their_history_and_three_times_what_they_resume_from() -> None:
    declared = MEMORIES["window beside history"]
    assert running_bytes(declared, 1, 10) == 10 * 1600 + 3 * 2 * 480
    assert running_bytes(declared, 7, 10) == 7 * running_bytes(declared, 1, 10)


@pytest.mark.parametrize("total", [0, 18_879, 18_880, 100_000, 10**9])
def test_the_longest_context_and_the_largest_batch_fit_and_one_more_would_not(total: int) -> None:
    declared = MEMORIES["window beside history"]
    tokens = longest_context(declared, total)
    assert tokens is not None
    pages = tokens // 16
    assert not pages or running_bytes(declared, 1, pages) <= total
    assert running_bytes(declared, 1, pages + 1) > total
    requests = largest_batch(declared, 160, total)
    assert requests == total // (10 * 1600 + 3 * 2 * 480)


def test_a_context_that_takes_no_more_when_it_grows_has_no_longest() -> None:
    assert longest_context(MEMORIES["window alone"], 3 * 2 * 480) is None
    assert longest_context(MEMORIES["window alone"], 3 * 2 * 480 - 1) == 0
    assert largest_batch(memory(FREE), 160, 0) is None


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5", "deepseek-v4-flash"])
def test_hot_requests_take_device_pages_hot_buffers_and_one_gather_region(name: str) -> None:
    resident = catalog.resolve(name)
    hot = served_hot(resident, 4096)
    (pool,) = hot.hot_pools
    shape = HotShape.of(pool, hot.page_tokens, 3, 500)
    taken = running_bytes(hot, 3, 500)
    assert taken == running_bytes(hot.in_device_pages, 3, 500) + shape.bytes
    assert taken - running_bytes(hot, 2, 500) == running_bytes(hot, 2, 500) - running_bytes(
        hot, 1, 500
    )
    for total in (16 * 10**9, 64 * 10**9):
        batches = [largest_batch(m, 128 * 1024, total) or 0 for m in (resident, hot)]
        longest = [longest_context(m, total) or 0 for m in (resident, hot)]
        assert batches[0] < batches[1]
        assert longest[0] < longest[1]


def test_requests_that_run_in_pages_need_histories_windows_and_states() -> None:
    pages = {"kv": 100, "swa": 60, "state": 12}
    assert requests_in(MEMORIES["history"], pages, 64) == 25
    assert requests_in(MEMORIES["history"], pages, 65) == 20, "the last page in part"
    # A window of 17 tokens reaches over two pages: six with those of the steps after.
    assert requests_in(MEMORIES["window beside history"], pages, 64) == 10
    assert requests_in(MEMORIES["window beside history"], pages, 16) == 20, "its own page, and two"
    assert requests_in(MEMORIES["state beside history"], pages, 64) == 4
    assert requests_in(MEMORIES["history"], {"kv": 3}, 64) == 0


@given(st.sampled_from(["history", "state beside history"]), st.integers(1, 400))
def test_requests_that_run_in_pages_fit_their_bytes(name: str, tokens: int) -> None:
    """As `largest_batch`, which divides bytes as one batch needs them."""
    declared, page = MEMORIES[name], 16
    count = requests_in(declared, {"kv": 1000, "state": 1000}, tokens)
    need = running_bytes(declared, 1, -(-tokens // page))
    held = sum(declared.slot_bytes(anchor.name) * 1000 for anchor in declared.anchors)
    assert count * need <= held
