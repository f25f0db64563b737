"""The proof of tiers and copies: bytes that go out come back, and no other byte moves.

Every family, every pair of layouts, every backend that the table of backends has for the device
under test. Blocks are random and have guard bands; a naive model does the same copies row by row
or entry by entry, and in the end all bytes of both blocks must be the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import gcd
from zlib import crc32

import numpy as np
import pytest
import torch

from kvtide.spec import EntryMove, ModelMemory, PageMove, PoolSpec, Slots, Tier
from kvtide.spec.families import supported
from kvtide.tiers.layout import Layout
from kvtide.transfer.backends import CELLS, open_copier
from kvtide.transfer.copier import Copier
from kvtide.transfer.kernel import Kernel
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


Pool = tuple[ModelMemory, PoolSpec]


def one_of_each(kind: Callable[[PoolSpec], object]) -> dict[str, Pool]:
    """Of all pools with 64-token pages, the first of every kind."""
    found: dict[object, tuple[str, Pool]] = {}
    for name, memory in PAGES_OF_64.items():
        for pool in memory.at_rest.pools:
            if pool.layers:
                found.setdefault(kind(pool), (f"{name}-{pool.name}", (memory, pool)))
    return dict(found.values())


POOLS_IN_ALL_LAYOUTS = one_of_each(
    lambda pool: (gcd(16, pool.entry.bytes), pool.entries_per_page(64), pool.is_anchor)
)
POOLS = POOLS_IN_ALL_LAYOUTS | one_of_each(
    lambda pool: (pool.entry.bytes, pool.entries_per_page(64))
)
MANY_PAGES = ("llama", "qwen3_next", "deepseek_v32", "deepseek_v4_stage")

# An interpreted kernel is slow, so it gets a few of each: every kind of piece, every word.
KERNEL_MEMORIES = ("llama", "glm_moe_dsa_fp8", "nemotron_h", "deepseek_v4_stage", "gpt_oss_draft")
KERNEL_POOLS = (
    "deepseek_v4_published_heads-c4",
    "deepseek_v4_published_heads-c4_index",
    "deepseek_v4_published_heads-c4_state",
    "kimi_linear-state",
)
CASES = {
    "memory_name": (MEMORIES, KERNEL_MEMORIES),
    "pool_name": (POOLS, KERNEL_POOLS),
    "laid_out_pool": (POOLS_IN_ALL_LAYOUTS, KERNEL_POOLS),
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


def copy_entries(copier: Copier, tiers: Tiers, way: Way, moves: list[EntryMove]) -> None:
    copier.copy_entries(way, moves, TIMEOUT_S).wait(0)
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


# -- entries --------------------------------------------------------------------------------


def entry_moves(
    tiers: Tiers, pool: PoolSpec, rng: np.random.Generator, count: int
) -> tuple[EntryMove, EntryMove]:
    """Entries out of random places to random places of the host, and back to others still."""
    entries = pool.entries_per_page(tiers.memory.page_tokens)
    anchor = pool.follows or pool.name
    at_device = pick(rng, tiers.device.arrangement.slots[anchor] * entries, 2 * count)
    at_host = pick(rng, tiers.host.arrangement.slots[anchor] * entries, count)
    (here, first), (there, second) = (
        np.divmod(at, np.int32(entries)) for at in (at_device, at_host)
    )
    out = EntryMove(pool.name, Tier.DEVICE, Tier.HOST, here[:count], first[:count], there, second)
    back = EntryMove(pool.name, Tier.HOST, Tier.DEVICE, there, second, here[count:], first[count:])
    return out, back


def entries_there_and_back(
    backend: str, pool_name: str, layouts: Layouts, device: torch.device, count: int
) -> None:
    memory, pool = POOLS[pool_name]
    pages = -(-count // pool.entries_per_page(64)) + 1
    anchor = pool.follows or pool.name
    slots = some_slots(memory, 1) | {anchor: 2 * pages}, some_slots(memory, 1) | {anchor: pages}
    tiers = Tiers(memory, layouts, device, slots)
    rng = seeded(backend, pool_name, layouts, count)
    with opened(backend, tiers) as copier:
        tiers.fill(rng)
        out, back = entry_moves(tiers, pool, rng, count)
        assert len(out.source_slots) == len(back.target_slots) == count
        copy_entries(copier, tiers, Way.BACKUP, [out])
        tiers.poison(Tier.DEVICE, anchor, np.unique(out.source_slots))
        copy_entries(copier, tiers, Way.LOAD, [back])
        tiers.assert_as_expected()


@pytest.mark.quick
@pytest.mark.parametrize("count", [0, 1, *COUNTS])
def test_so_many_entries_come_back_and_their_neighbours_stay(
    backend: str, pool_name: str, count: int, device: torch.device
) -> None:
    entries_there_and_back(backend, pool_name, LAYOUTS, device, count)


@pytest.mark.quick
def test_entries_are_found_in_every_layout(
    backend: str, laid_out_pool: str, layouts: Layouts, device: torch.device
) -> None:
    entries_there_and_back(backend, laid_out_pool, layouts, device, count=9)


def test_the_pools_here_have_entries_as_published_and_of_every_word() -> None:
    sizes = {pool.entry.bytes for _, pool in POOLS.values()}
    assert {584, 132, 656} <= sizes
    assert {gcd(16, size) for size in sizes} == {4, 8, 16}
    kinds = {(pool.tail_entries, pool.tokens_per_entry) for _, pool in POOLS.values()}
    assert {(None, 1), (1, 1), (None, 4), (None, 64)} <= kinds


def test_entries_of_several_pools_go_in_one_submission(device: torch.device) -> None:
    memory = PAGES_OF_64["deepseek_v4_stage"]
    tiers = Tiers(memory, LAYOUTS, device, (some_slots(memory, 6), some_slots(memory, 3)))
    rng = seeded("several pools")
    with opened(_any_backend(device), tiers) as copier:
        tiers.fill(rng)
        pairs = [
            entry_moves(tiers, memory.pool(name), rng, 3) for name in ("c4", "c4_index", "swa")
        ]
        copy_entries(copier, tiers, Way.BACKUP, [out for out, _ in pairs])
        copy_entries(copier, tiers, Way.LOAD, [back for _, back in pairs])
        tiers.assert_as_expected()


def test_64_entries_are_not_taken_for_pages_nor_pages_for_entries(device: torch.device) -> None:
    """The same slots, 64 of them: as a page move 64 rows change, as an entry move 64 entries."""
    memory = PAGES_OF_64["llama"]
    tiers = Tiers(memory, LAYOUTS, device, ({"kv": 64}, {"kv": 64}))
    slots, zeros = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    row, entry = memory.pool("kv").row_bytes(64), memory.pool("kv").entry.bytes
    with opened(_any_backend(device), tiers) as copier:

        def bytes_changed() -> int:
            return int((tiers.host.data != 255).sum())

        tiers.device.data.zero_()
        tiers.host.data.fill_(255)
        move = EntryMove("kv", Tier.DEVICE, Tier.HOST, slots, zeros, slots, zeros)
        copier.copy_entries(Way.BACKUP, [move], TIMEOUT_S).wait(0)
        _settle(device)
        assert bytes_changed() == 64 * 4 * entry
        pages = PageMove("kv", Tier.DEVICE, Tier.HOST, slots, slots)
        copier.copy(Way.BACKUP, [pages], TIMEOUT_S).wait(0)
        _settle(device)
        assert bytes_changed() == 64 * 4 * row == tiers.host.data.numel()
        with pytest.raises(AttributeError):
            copier.copy(Way.BACKUP, [move], TIMEOUT_S)  # type: ignore[list-item]
        with pytest.raises(AttributeError):
            copier.copy_entries(Way.BACKUP, [pages], TIMEOUT_S)  # type: ignore[list-item]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
