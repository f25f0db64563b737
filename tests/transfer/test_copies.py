"""The proof of tiers and copies: bytes that go out come back, and no other byte moves.

Every family, every pair of layouts, every backend that the table of backends has for the device
under test. Blocks are random and have guard bands; a naive model does the same copies row by row,
and in the end all bytes of both blocks must be the model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import numpy as np
import pytest
import torch

from kvtide.spec import PageMove, Slots, Tier
from kvtide.spec.families import supported
from kvtide.tiers.layout import Layout
from kvtide.transfer.backends import CELLS, open_copier
from kvtide.transfer.copy_jobs import Copier
from kvtide.transfer.copy_kernel import Kernel
from kvtide.transfer.lane import Lane
from kvtide.transfer.strided import Way
from kvtide.transfer.timeline import HostTimeline
from tests.transfer.memories import (
    CONFIGS,
    LAYOUT_PAIRS,
    MEMORIES,
    Tiers,
    memories,
    pick,
    some_slots,
)

TIMEOUT_S = 60.0
INTERPRETED = "interpreted_kernel"
COUNTS = (63, 64, 65)
PAGES_OF_64 = memories(64)
LAYOUTS = (Layout.LAYER_FIRST, Layout.PAGE_FIRST_DIRECT)
"""What one pair of layouts is enough for: the usual one on either side."""


Layouts = tuple[Layout, Layout]
"""Of the device and of the host."""


MANY_PAGES = ("llama", "qwen3_next", "deepseek_v32", "deepseek_v4_stage")

# An interpreted kernel is slow, so it gets a few of each: every kind of piece.
KERNEL_MEMORIES = ("llama", "glm_moe_dsa_fp8", "nemotron_h", "deepseek_v4_stage", "gpt_oss_draft")
CASES = {
    "memory_name": (MEMORIES, KERNEL_MEMORIES),
    "many_pages_of": (MANY_PAGES, ("llama",)),
}
"""A test's argument → the names it is run with, and those it is run with when interpreted."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Backends of the device under test, as the table of backends has them, and all layouts."""
    kind = metafunc.config.getoption("device")
    backends = {name: layouts for (on, name), layouts in CELLS.items() if on == kind}
    if kind == "cpu":
        backends |= {INTERPRETED: frozenset(Layout)}
    for argument in CASES.keys() & set(metafunc.fixturenames):
        every, few = CASES[argument]
        rows = [(b, name) for b in backends for name in (few if b == INTERPRETED else every)]
        if "layouts" in metafunc.fixturenames:
            cells = [
                (*row, pair) for row in rows for pair in LAYOUT_PAIRS if pair[1] in backends[row[0]]
            ]
            ids = ["-".join((b, name, *(one.value for one in pair))) for b, name, pair in cells]
            metafunc.parametrize(("backend", argument, "layouts"), cells, ids=ids)
        else:
            metafunc.parametrize(("backend", argument), rows, ids=["-".join(row) for row in rows])


@contextmanager
def opened(backend: str, tiers: Tiers) -> Iterator[Copier]:
    """A copier with real lanes; the tiers are filled after it has opened, for `auto` measures."""
    if backend == INTERPRETED:
        kernel = Kernel(torch.device("cpu"))
        lanes = {way: Lane(way.name.lower(), HostTimeline(), kernel) for way in Way}
        copier = Copier(tiers.device, tiers.host, lanes)
    else:
        copier = open_copier(backend, tiers.device, tiers.host)
    try:
        yield copier
    finally:
        assert copier.close(TIMEOUT_S)
    assert [lane.failures for lane in copier.lanes.values()] == [0, 0]


def seeded(*words: object) -> np.random.Generator:
    return np.random.default_rng(crc32(repr(words).encode()))


def copy_pages(copier: Copier, tiers: Tiers, way: Way, moves: list[PageMove]) -> None:
    ticket = copier.copy(way, moves, TIMEOUT_S)
    for leg in range(len(copier.groups) if way is Way.LOAD else 1):
        ticket.wait(leg)
    for move in moves:
        tiers.expect(move)


def page_move(way: Way, anchor: str, source: Slots, target: Slots) -> PageMove:
    return PageMove(anchor, way.source, way.target, source, target)


# -- pages ----------------------------------------------------------------------------------


def there_and_back(
    tiers: Tiers, copier: Copier, rng: np.random.Generator, pages: dict[str, int]
) -> None:
    """Back pages up, spoil them on the device, load them into other slots, look at every byte."""
    tiers.fill(rng)
    backups, loads, originals = [], [], {}
    for anchor, count in pages.items():
        on_device = pick(rng, tiers.device.arrangement.slots[anchor], 2 * count)
        on_host = pick(rng, tiers.host.arrangement.slots[anchor], count)
        backups.append(page_move(Way.BACKUP, anchor, on_device[:count], on_host))
        loads.append(page_move(Way.LOAD, anchor, on_host, on_device[count:]))
        originals[anchor] = tiers.kept(anchor, on_device[:count])
    copy_pages(copier, tiers, Way.BACKUP, backups)
    for move in backups:
        tiers.poison(Tier.DEVICE, move.anchor, move.source_slots)
    copy_pages(copier, tiers, Way.LOAD, loads)
    # Read as a model would, behind nothing but the waits.
    back = {move.anchor: tiers.kept(move.anchor, move.target_slots) for move in loads}
    tiers.assert_as_expected()
    for anchor in pages:
        assert all(map(torch.equal, back[anchor], originals[anchor]))


@pytest.mark.quick
def test_pages_come_back_byte_equal_and_nothing_else_changes(
    backend: str, memory_name: str, layouts: Layouts, device: torch.device
) -> None:
    memory = MEMORIES[memory_name]
    slots = some_slots(memory, 7), some_slots(memory, 4)
    tiers = Tiers(memory, layouts, device, slots)
    with opened(backend, tiers) as copier:
        pages = {anchor.name: 3 + number for number, anchor in enumerate(memory.anchors)}
        there_and_back(tiers, copier, seeded(backend, memory_name, layouts), pages)


@pytest.mark.parametrize("count", COUNTS)
def test_so_many_pages_come_back_whole(
    backend: str, many_pages_of: str, count: int, device: torch.device
) -> None:
    memory = PAGES_OF_64[many_pages_of]
    slots = some_slots(memory, 2 * count + 1), some_slots(memory, count + 1)
    tiers = Tiers(memory, LAYOUTS, device, slots)
    with opened(backend, tiers) as copier:
        pages = {anchor.name: count for anchor in memory.anchors}
        there_and_back(tiers, copier, seeded(backend, many_pages_of, count), pages)


def test_the_memories_here_are_of_every_family() -> None:
    assert sorted(CONFIGS) == supported()
    assert set(CONFIGS) <= set(MEMORIES)


def test_pages_of_a_sidecar_go_with_their_anchors_and_not_alone(device: torch.device) -> None:
    """A move of `swa` leaves the pages at the same slot numbers of `kv` and its draft alone."""
    memory = MEMORIES["gpt_oss_draft"]
    tiers = Tiers(memory, LAYOUTS, device, (some_slots(memory, 4), some_slots(memory, 4)))
    with opened(_any_backend(device), tiers) as copier:
        tiers.fill(seeded("sidecar"))
        before = {p.name: tiers.host.rows(p.name, p.layers[0]).clone() for p in memory.pools}
        slots = np.arange(4, dtype=np.int32)
        copy_pages(copier, tiers, Way.BACKUP, [page_move(Way.BACKUP, "swa", slots, slots)])
        tiers.assert_as_expected()
        changed = {
            p.name: not torch.equal(tiers.host.rows(p.name, p.layers[0]), before[p.name])
            for p in memory.pools
        }
    assert changed == {"kv": False, "draft": False, "swa": True}


def test_a_backup_carries_what_was_queued_on_the_device_before_it(device: torch.device) -> None:
    memory = MEMORIES["llama"]
    tiers = Tiers(memory, LAYOUTS, device, ({"kv": 4}, {"kv": 4}))
    slots = np.arange(4, dtype=np.int32)
    with opened(_any_backend(device), tiers) as copier:
        tiers.fill(seeded("queued"))
        if device.type == "cuda":
            torch.cuda._sleep(50_000_000)
        tiers.poison(Tier.DEVICE, "kv", slots)
        copy_pages(copier, tiers, Way.BACKUP, [page_move(Way.BACKUP, "kv", slots, slots)])
        tiers.assert_as_expected()


def _any_backend(device: torch.device) -> str:
    return next(name for on, name in CELLS if on == device.type)
