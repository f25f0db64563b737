"""How much a request finds, where that is known in advance: to the token.

That each admission finds what it should is checked in all tests of restoring (`restoring.Ledger`
and the naive index). Here are the cases in which every family has to find every whole page.
"""

from __future__ import annotations

import random
from itertools import product

import pytest

from kvtide.cache import EveryPages
from kvtide.spec import Tier
from tests.engine.restoring import ALL_NAMES, HOT_NAMES, NAMES, PAGE, Stand, memory_of, text


def _reaches(family: str) -> list[int]:
    """How many pages each of its windows and states reaches back."""
    anchors = memory_of(family).anchors
    return [reach for one in anchors if (reach := one.reuse.reach_pages(PAGE))]


WINDOWS = {name: max(reaches) for name in NAMES if (reaches := _reaches(name))}
"""Families with windows or states, and how many pages these reach back."""


def _keeping(family: str, every_pages: int) -> Stand:
    """A checkpoint at every so many pages, and as many slots of every kind as of histories."""
    distance = PAGE * WINDOWS[family]
    return Stand(family, placement=EveryPages(every_pages), tokens_per_checkpoint=distance)


@pytest.mark.quick(family=[*NAMES, "deepseek_v32 hot:24", "deepseek_v4 hot:7"])
@pytest.mark.parametrize(
    ("family", "extra"),
    [
        *product((*NAMES, *HOT_NAMES), (0, 1, PAGE - 1)),
        *((n, 1) for n in ALL_NAMES if n not in NAMES),
    ],
)
def test_a_repeated_prompt_finds_its_whole_pages_on_the_device_and_on_the_host(
    family: str, extra: int
) -> None:
    stand = Stand(family)
    tokens = text(random.Random(5), 5 * PAGE + extra)
    whole = (len(tokens) - 1) // PAGE * PAGE  # The last token's logits are asked for.
    first = stand.answer(tokens, 2)
    if not extra and _reaches(family):
        # The checkpoint at its end leaves no token to compute: the one before it is used.
        stand.answer(tokens, 2)
    again = stand.answer(tokens, 2)
    assert first.by_tier == {} and again.by_tier == {Tier.DEVICE: whole}
    stand.settle()
    stand.cache.flush(Tier.DEVICE)
    restored = stand.answer(tokens, 2)
    assert restored.by_tier == {Tier.HOST: whole}
    stand.end()


@pytest.mark.quick(family=["falcon_h1"])
@pytest.mark.parametrize("family", WINDOWS)
def test_with_a_checkpoint_at_every_page_all_requests_find_every_shared_page(family: str) -> None:
    stand = _keeping(family, every_pages=1)
    for _ in stand.converse():
        pass
    assert len(stand.cache.found) >= 27 and stand.found[Tier.HOST] > 0
    assert [found for found, _ in stand.cache.found] == [shared for _, shared in stand.cache.found]
    stand.end()


@pytest.mark.quick(family=["gpt_oss"])
@pytest.mark.parametrize("family", WINDOWS)
def test_with_a_checkpoint_at_every_third_page_no_request_finds_less_than_that(family: str) -> None:
    stand = _keeping(family, every_pages=3)
    for _ in stand.converse():
        pass
    step = 3 * PAGE
    assert all(found >= shared // step * step for found, shared in stand.cache.found)
    stand.end()
