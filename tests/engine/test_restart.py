"""An engine that ends and begins anew goes on where it was: every logprob equal to the last bit.

The conversations of `restoring` are served by two engines, one after the other, that have nothing
in common but a store. What every request has to find is checked at each admission (`restarting`),
and that it is the first engine's whole pages here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path

import pytest

from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.cache.hardware import formats
from kvtide.engine import Engine, Request, RequestParams
from kvtide.spec import ALL, Tier
from kvtide.storage import objects
from kvtide.tiers import Layout
from kvtide.transfer import host_pages
from tests.engine.restarting import PATIENT, Life, Past
from tests.engine.restoring import (
    ALIKE,
    ALL_NAMES,
    ANSWER_TOKENS,
    BRANCHES,
    FAMILIES,
    FORMS,
    HOT,
    HOT_NAMES,
    PAGE,
    ROOTS,
    SAMPLING,
    VARIANTS,
    WRITING,
    alone,
    family_of,
    model_of,
    script,
)
from tests.proofs import Proves

CHUNKS = ((64, 257), (257, 64))
BEFORE, AFTER = slice(-2, -1), slice(-1, None)
"""The turns of each life."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Two lives: how their pages are written, the tokens of a step, the host's layout in each.

    at_once  how many requests the second life serves at a time
    """

    family: str
    writing: str
    chunks: tuple[int, int]
    layouts: tuple[Layout, Layout]
    at_once: int = 4

    def __str__(self) -> str:
        layouts = "-".join(layout.name.lower() for layout in self.layouts)
        return f"{self.family}-{self.writing}-{self.chunks[0]}-{layouts}"


def cells() -> Iterator[Cell]:
    """Every form of memory with every policy, in steps of both sizes; every pair of layouts; every
    family."""
    pairs = cycle(product(Layout, Layout))
    for number, family in enumerate((*FAMILIES, *HOT)):
        chunks = cycle(CHUNKS if number % 2 else reversed(CHUNKS))
        yield Cell(family.name, "write_through", next(chunks), next(pairs), at_once=1)
        if family not in ALIKE:
            yield Cell(family.name, "write_through", next(chunks), next(pairs))
        if family in (*FORMS, *HOT):
            yield Cell(family.name, "write_through_selective", next(chunks), next(pairs))
            yield Cell(family.name, "write_back", next(chunks), next(pairs))


CELLS = list(cells())
FROM_HOST = (*VARIANTS[1:], *ALIKE)
"""Families that resume from the host before the restart. Windows alone do so from the device."""


def test_every_policy_chunk_size_and_pair_of_layouts_is_tried() -> None:
    assert {cell.layouts for cell in CELLS} == set(product(Layout, Layout))
    assert {cell.family for cell in CELLS} == {*ALL_NAMES, *HOT_NAMES}
    for family in (*FORMS, *HOT):
        mine = [cell for cell in CELLS if cell.family == family.name]
        assert {cell.writing for cell in mine} == set(WRITING)
        assert {cell.chunks for cell in mine} == set(CHUNKS)


@pytest.fixture
def past(tmp_path: Path) -> Past:
    return Past(f"file://{tmp_path}?cap=1GB&floor=1MB&sync=never")


def quick(cell: Cell) -> bool:
    """Every family once, one request at a time; and every write policy. Hot pools once."""
    other = {"llama": "write_back", "falcon_h1": "write_through_selective"}
    # Other numbers of a family that has a cell of its own.
    if " " in cell.family:
        return cell.at_once == 1 and cell.family == "deepseek_v32 hot:24"
    variant = cell.family.partition("-")[0] in {family.name for family in (*FORMS, *ALIKE)}
    once = cell.at_once == 1 and not ("-" in cell.family and variant)
    return once or other.get(cell.family) == cell.writing


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=() if quick(cell) else pytest.mark.full) for cell in CELLS],
    ids=str,
)
def test_conversations_go_on_after_a_restart_as_if_there_had_been_none(
    cell: Cell, past: Past, proves: Proves
) -> None:
    proves(family_of(cell.family).model, "storage")
    before, after = (one_life(cell, past, number) for number in range(2))
    assert before.found[Tier.STORAGE] == 0 and after.found[Tier.STORAGE] > 0
    if family_of(cell.family) in FROM_HOST:
        proves(cell.family, "host")
        assert before.found[Tier.HOST] > 0 and before.loads > 0
    if cell.at_once == 1:
        check_first_of_groups(cell.family, past, after.served)


def one_life(cell: Cell, past: Past, number: int) -> Life:
    life = Life(
        cell.family,
        past,
        chunk_tokens=cell.chunks[number],
        layouts=(Layout.PAGE_FIRST_DIRECT, cell.layouts[number]),
        write_policy=cell.writing,
    )
    at_once, rounds = ((4, BEFORE), (cell.at_once, AFTER))[number]
    for _ in life.converse(at_once, rounds=rounds, validate_every=8):
        pass
    assert life.cache.dropped[Tier.HOST] == 0, "what was dropped could not be found"
    life.end()
    return life


def check_first_of_groups(family: str, past: Past, served: Sequence[Request]) -> None:
    """The first request finds all that was computed before the restart, and in storage."""
    memory = model_of(family).memory
    histories = all(anchor.reuse.reach is ALL for anchor in memory.anchors)
    earlier = {turn.branch: turn for turn in script(family)[BEFORE][0]}
    now = script(family)[AFTER][0]
    for group in range(len(ROOTS)):
        turn = next(turn for turn in now if turn.branch // BRANCHES == group)
        request = next(request for request in served if request.params.tokens == turn.tokens)
        last = earlier[turn.branch]
        # The last generated token was never computed.
        computed = (len(last.tokens) + len(last.answer) - 1) // PAGE * PAGE
        assert request.by_tier.keys() == {Tier.STORAGE}
        found = request.by_tier[Tier.STORAGE]
        assert found == computed if histories else 0 < found <= computed


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("llama", (Layout.PAGE_FIRST_DIRECT, Layout.PAGE_FIRST_DIRECT)),
        ("gemma3", (Layout.LAYER_FIRST, Layout.PAGE_FIRST_DIRECT)),
        ("falcon_h1", (Layout.PAGE_FIRST_DIRECT, Layout.PAGE_FIRST)),
    ],
)
def test_pages_that_are_objects_as_they_lie_are_restored_alike(
    family: str,
    layouts: tuple[Layout, Layout],
    past: Past,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of larger models: stored from the place where they are, read to where they will be.

    In another layout they do not lie in one run: writer and reader need not agree.
    """
    for module in (objects, host_pages):
        monkeypatch.setattr(module, "DIRECT_BYTES", 1)
    prompt, memory = script(family)[-1][0].tokens, model_of(family).memory
    for layout, restored in zip(layouts, (False, True), strict=True):
        config = CacheConfig(
            Tokens(1024), host_layout=layout, tokens_per_checkpoint=PAGE, patience=PATIENT
        )
        cache = TieredCache(memory, config)
        cache.storage.attach(link := cache.storage.link(past.open(cache)))
        for one in formats(memory, config).values():
            in_place = link._host_pages.in_place(one, 1) is not None
            assert in_place == (layout is Layout.PAGE_FIRST_DIRECT)
        engine = Engine(model_of(family), cache, chunk_tokens=64)
        request = engine.submit(RequestParams(prompt, ANSWER_TOKENS, SAMPLING))
        while not engine.idle:
            engine.step()
        assert tuple(request.output) == alone(family, prompt, ANSWER_TOKENS)
        assert (Tier.STORAGE in request.by_tier) == restored
        assert cache.close()
