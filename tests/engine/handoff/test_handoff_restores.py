"""Every family: a prompt prefilled by one engine and decoded by another gives the same answer."""

from __future__ import annotations

import random

import pytest

from kvtide.engine import Request
from kvtide.engine.handoff.handoff_state import HandoffState
from kvtide.spec import Tier
from tests.cache.building import POISON
from tests.engine.handoff.handing_over import expected, family_pair, tokens_of
from tests.engine.restoring import ALL_NAMES, FORMS, HOT_NAMES, PAGE, text


@pytest.mark.quick(family=[*(family.name for family in FORMS), "deepseek_v32 hot:24"])
@pytest.mark.parametrize("family", [*ALL_NAMES, *HOT_NAMES])
def test_answers_are_those_of_one_engine(family: str) -> None:
    rng, pair = random.Random(3), family_pair(family)
    root = text(rng, 70)
    for length in (5 * PAGE + 3, 6 * PAGE, 6 * PAGE + 1, 7 * PAGE - 1):
        prompt = root + text(rng, length - len(root))
        request = pair.answer(prompt)
        assert tokens_of(request) == expected(family, prompt)
        handoff = request.handoff
        assert handoff is not None and handoff.state is HandoffState.DECODING, handoff
        assert handoff.first == request.output[0]
        pair.settle()
    pair.close()


@pytest.mark.quick(family=["deepseek_v4 hot:7"])
@pytest.mark.parametrize("family", HOT_NAMES)
def test_pages_of_hot_pools_land_on_the_host_and_stay_there(family: str) -> None:
    """Between the landing and the first step the device has nothing of them, and later entries of
    its hot buffers alone, which steps select."""
    pair = family_pair(family, prefill_name=family)
    cache, scheduler = pair.decode.cache, pair.decode.scheduler
    hot = [pool.name for pool in cache.memory.hot_pools]
    looked, admitted = list[HandoffState](), scheduler.on_admitted

    def on_the_device() -> int:
        stats = cache.stats()
        pages = [stats.pages[Tier.DEVICE, name].resident for name in hot]
        return sum(pages) + sum(stats.moved_pool_pages.get(("load", name), 0) for name in hot)

    def look(request: Request) -> None:
        assert request.handoff is not None
        looked.append(request.handoff.state)
        admitted(request)
        assert cache.drain(30) and request.computed == len(prompt)
        assert not on_the_device()
        for buffers in cache.hardware.hot.values():
            assert bool((buffers.pages == POISON).all())

    scheduler.on_admitted = look
    for buffers in cache.hardware.hot.values():
        buffers.pages.fill_(POISON)
    prompt = text(random.Random(3), 6 * PAGE + 3)
    assert tokens_of(pair.answer(prompt)) == expected(family, prompt)
    assert hot and looked == [HandoffState.LANDED] and not on_the_device()
    loaded = cache.stats().moved_pages["load"]
    assert (loaded > 0) == any(pool.name not in hot for pool in cache.memory.at_rest.pools)
    assert all(int(each.counts[:, 1].sum()) > 0 for each in cache.hardware.hot.values())
    pair.settle()
    pair.close()
