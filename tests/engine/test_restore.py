"""What comes back from the host is what was computed: every logprob equal to the last bit.

Three groups of conversations with three branches each run interleaved on a device so small that
their pages are moved to the host and back many times; each answer is compared with that of an
engine that never saw anything. `restoring` has the conversations and the families; how much each
request has to find is checked there, at every admission.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

import pytest

from kvtide import models
from kvtide.cache import CacheConfig, Ratio, TieredCache, Tokens
from kvtide.engine import Engine, RequestParams
from kvtide.spec import ALL, Tier
from kvtide.tiers import Layout
from tests.engine.restoring import (
    ALIKE,
    ALL_NAMES,
    ANSWER_TOKENS,
    FORMS,
    HOT_NAMES,
    NAMES,
    VARIANTS,
    WRITING,
    Stand,
    alone,
    converse,
    family_of,
    model_of,
    script,
)
from tests.grids import covered, everything
from tests.models.tiny import family_of as model_type
from tests.proofs import Proves

MIN_LOADS = {"write_through": 8, "write_through_selective": 2, "write_back": 6}
MIN_LOADS_BY_FORM = {
    name: {"write_through": 14, "write_through_selective": 6, "write_back": 12}
    for name in ("llama", "gpt_oss", "falcon_h1")
}
"""A history by itself, with windows, with states: they leave most to resume from."""

CHUNKS = (64, 257)
DENSE = ("gemma3", "mistral", "qwen2", "qwen3")
"""Of those that are alike, the quickest."""
TOGETHER = (*(family.name for family in VARIANTS), *DENSE)
QUICK_TOGETHER = ("mistral-windows", "lfm2", *DENSE[2:])
"""In the quick run, the others of their forms are restored by `test_restart`."""
APART = tuple(family.name for family in ALIKE if family.name not in DENSE)
"""In the quick run, `test_restart` restores these from the host."""
QUICK_HOT = (("deepseek_v32 hot:24", "write_back", Layout.PAGE_FIRST_DIRECT, 64),)
"""The other hot families are in the quick run of `test_restore_found` and `test_hot_residency`."""


def with_chunks(number: int, cells: Iterable[tuple[str, Layout]]) -> Iterator[tuple[object, ...]]:
    """Chunk sizes in turns."""
    for step, cell in enumerate(cells):
        yield *cell, CHUNKS[(number + step) % 2]


CELLS = [
    *covered(product((family.name for family in FORMS), WRITING, Layout, CHUNKS)),
    *covered(
        (name, *cell)
        for number, name in enumerate(QUICK_TOGETHER)
        for cell in with_chunks(number, product(WRITING, Layout))
    ),
    *(
        pytest.param(name, *cell, marks=pytest.mark.full)
        for number, name in enumerate(TOGETHER)
        if name not in QUICK_TOGETHER
        for cell in with_chunks(number, product(WRITING, Layout))
    ),
    *(
        pytest.param(name, *cell, marks=pytest.mark.full)
        for number, name in enumerate(APART)
        for cell in with_chunks(number, zip(WRITING, Layout, strict=True))
    ),
    *(
        pytest.param(name, *cell, marks=() if (name, *cell) in QUICK_HOT else pytest.mark.full)
        for number, name in enumerate(HOT_NAMES)
        for cell in with_chunks(number, product(WRITING, Layout))
    ),
]


def test_every_family_with_a_forward_pass_is_here() -> None:
    assert {model_type(name) for name in ALL_NAMES} == models.FAMILIES.keys()


@pytest.mark.quick(family=[family.name for family in FORMS])
@pytest.mark.parametrize("family", ALL_NAMES)
def test_the_wanted_answers_are_those_that_each_prompt_gets_alone(family: str) -> None:
    """They are computed together. The quick run asks for the shortest prompts."""
    turns = sorted(script(family)[-1], key=lambda turn: len(turn.tokens))
    for turn in turns if everything() else turns[:3]:
        assert turn.answer == alone(family, turn.tokens, ANSWER_TOKENS)


@pytest.mark.parametrize(("family", "writing", "layout", "chunk_tokens"), CELLS)
def test_answers_are_those_of_an_engine_without_a_cache(
    family: str, writing: str, layout: Layout, chunk_tokens: int, proves: Proves
) -> None:
    proves(family_of(family).model, "host")
    stand = Stand(
        family,
        chunk_tokens=chunk_tokens,
        layouts=(Layout.PAGE_FIRST_DIRECT, layout),
        write_policy=writing,
    )
    for _ in stand.converse(validate_every=4):
        pass
    assert stand.loads >= MIN_LOADS_BY_FORM.get(family, MIN_LOADS)[writing]
    assert stand.cache.dropped[Tier.DEVICE] >= _pages_that_fit(stand.cache)
    assert stand.found[Tier.HOST] > 0 and stand.found[Tier.DEVICE] > 0
    assert stand.cache.dropped[Tier.HOST] == 0 and stand.max_running > 1
    stand.end()


def _pages_that_fit(cache: TieredCache) -> int:
    """Of the histories, or of windows and states if there are none, in the tier that steps read."""
    anchors = cache.memory.anchors
    histories = [anchor for anchor in anchors if anchor.reuse.reach is ALL]
    return min(cache.index.capacity(each.home, each.name) for each in histories or anchors)


@pytest.mark.quick(family=["gpt_oss", "falcon_h1"])
@pytest.mark.parametrize("family", NAMES)
def test_nor_do_threads_that_copy_beside_the_model_change_a_bit(family: str) -> None:
    model = model_of(family)
    distance = family_of(family).tokens_per_checkpoint
    config = CacheConfig(Tokens(448), host_size=Ratio(8), tokens_per_checkpoint=distance)
    cache = TieredCache(model.memory, config)
    for _ in converse(family, Engine(model, cache, chunk_tokens=100)):
        assert cache.validate() == []
    assert cache.stats().transfers["load", "landed"] > 0
    cache.close()


@pytest.mark.quick(family=["llama"])
@pytest.mark.parametrize("family", NAMES)
def test_the_two_chunk_sizes_cut_the_long_prompts_differently(family: str) -> None:
    steps = {}
    prompt = max((turn.tokens for turn in script(family)[0]), key=len)
    for chunk_tokens in CHUNKS:
        stand = Stand(family, chunk_tokens=chunk_tokens)
        request = stand.engine.submit(RequestParams(prompt, 1))
        steps[chunk_tokens] = 0
        while not stand.engine.idle:
            stand.engine.step()
            steps[chunk_tokens] += 1
        assert request.by_tier == {}
        stand.end()
    assert 2 <= steps[257] < steps[64]
