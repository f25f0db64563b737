"""Swap-in by kernels: the slots and bytes that the torch reference leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvtide.layers.forward import ForwardPass
from kvtide.layers.kernels import swap_in as kernels
from kvtide.layers.kernels.swap_in import swap_in
from kvtide.layers.reference import swap_in as reference
from kvtide.spec import DType, Entry, Field, PoolSpec
from tests.layers.hot_world import Chunk, HotWorld

PAGE = 8


def pool(words: int, selected: int, hot: int, each: int = 1, layers: int = 2) -> PoolSpec:
    entry = Entry((Field("x", (words,), DType.FP32),))
    numbers = tuple(range(1, 2 * layers, 2))
    return PoolSpec("kv", numbers, entry, tokens_per_entry=each, selected=selected, hot=hot)


POOLS = {
    "words of 16 bytes": pool(8, selected=3, hot=12),
    "words of 8 bytes": pool(6, selected=3, hot=9),
    "words of 4 bytes": pool(5, selected=2, hot=7),
    "as many hot as selected": pool(4, selected=5, hot=5),
    "entries of 4 tokens": pool(2, selected=3, hot=6, each=4),
}
STEPS: list[list[Chunk]] = [
    [(0, 21), (1, 2)],
    [(0, 1), (None, 1), (1, 1)],
    [(1, 2), (0, 1), (2, 30)],
    [(2, 1), (None, 2), (0, 3), (1, 1)],
    [(0, 2), (1, 25), (2, 2)],
    [(1, 1), (2, 1), (0, 1)],
    [(0, 1), (2, 1)],
    [(2, 19), (1, 1), (0, 19)],
    [(0, 1), (2, 1)],
]


def swapped(world: HotWorld, run: ForwardPass, chosen: Tensor, layer: int) -> Tensor:
    """By kernels; slots, counts and the host are then what the reference leaves."""
    copy, host = world.snapshot()
    step = replace(run.step, hot={world.pool.name: copy})
    reference.swap_in(ForwardPass(step), world.place(layer), world.masks(run, chosen))
    before = world.hot.used.clone()
    located = swap_in(run, world.place(layer), chosen)
    hot = world.hot
    assert torch.equal(hot.used, copy.used), "the same slots are given up"
    kept = copy.used == before
    assert torch.equal(hot.held[kept], copy.held[kept])
    assert torch.equal(hot.held.sort(-1).values, copy.held.sort(-1).values)
    assert torch.equal(hot.counts, copy.counts)
    assert torch.equal(world.host, host)
    assert bool((hot.marks == -1).all()) and bool((hot.wanted == 0).all())
    return located


def played(world: HotWorld, chunks: list[Chunk], kind: str, rejected: int = 0) -> None:
    """One step of all layers, with everything that must hold after it."""
    run = world.step(chunks)
    for layer in world.pool.layers:
        world.write(run, chunks, layer)
        chosen = world.choices(run, kind)
        located = swapped(world, run, chosen, layer)
        world.check_located(run, chunks, chosen, located, layer)
        world.check_bytes(chunks, layer)
    world.end(run, chunks, rejected)


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["random", "repeats", "churn", "newest", "same"])
@pytest.mark.parametrize("name", POOLS)
def test_slots_and_bytes_are_those_of_the_reference(
    name: str, kind: str, device: torch.device
) -> None:
    world = HotWorld(POOLS[name], PAGE, 3, 8, device, gap=48)
    for chunks in STEPS:
        played(world, chunks, kind)
    if kind == "random":
        assert bool((world.hot.counts.sum(0) > 0).all()), "hits, misses and gathered entries"


@pytest.mark.quick(rejected=[2])
@pytest.mark.parametrize("rejected", [1, 2])
def test_rejected_entries_leave_their_slots(rejected: int, device: torch.device) -> None:
    world = HotWorld(pool(4, selected=4, hot=16), PAGE, 2, 8, device)
    for chunks in ([(0, 13), (1, 7)], *([(0, 3), (1, 4)] for _ in range(6))):
        played(world, list(chunks), "random", rejected)


@pytest.mark.quick(sequences=[65])
@pytest.mark.parametrize("sequences", [63, 64, 65])
def test_sequences_that_cross_a_page_at_once(sequences: int, device: torch.device) -> None:
    world = HotWorld(pool(4, selected=2, hot=16, layers=1), PAGE, sequences, 3, device)
    every_sequence: list[Chunk] = [(n, PAGE - 1) for n in range(sequences)]
    played(world, every_sequence, "random")
    for _ in range(2):
        played(world, [(n, 1) for n, _ in every_sequence], "random")


@pytest.mark.full
@pytest.mark.parametrize(("hot", "selected"), [(4096, 2048), (5000, 1500)])
def test_rows_of_served_sizes(hot: int, selected: int, device: torch.device) -> None:
    """On a GPU, 16 and 32 warps share a plan; choices of the second take several tiles."""
    world = HotWorld(pool(1, selected, hot, layers=1), 64, 3, 110, device)
    for number, tokens in enumerate((6800, 3000, 6500)):
        world.found(number, tokens)
    for kind, rejected in (("random", 0), ("random", 1), ("churn", 0), ("repeats", 1)):
        played(world, [(0, 1), (1, hot // selected), (2, 2)], kind, rejected)
    played(world, [(0, 5), (1, 1)], "random")
    assert bool((world.hot.counts.sum(0) > 0).all()), "hits, misses and gathered entries"


def test_choices_of_several_tiles(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MAX_CHOICES", 4)
    monkeypatch.setattr(kernels, "MAX_MARKED", 2)
    monkeypatch.setattr(kernels, "_MIN_SPLIT", 3)
    monkeypatch.setattr(kernels, "BLOCK_WORDS", 16)
    monkeypatch.setattr(kernels, "CTAS", 3)
    world = HotWorld(pool(5, selected=6, hot=24, layers=1), PAGE, 3, 8, device)
    for chunks in STEPS:
        played(world, chunks, "repeats")


def test_nothing_is_read_from_the_host_while_all_entries_fit(device: torch.device) -> None:
    """Neither by steps that read a hot row, nor by gathered ones before and between them."""
    world = HotWorld(pool(4, selected=4, hot=48, layers=1), PAGE, 2, 6, device)
    gathered, few = [(0, 13), (1, 14)], [(0, 3), (1, 2)]
    for chunks in (gathered, few, gathered, few, few, few, few):
        played(world, list(chunks), "random")
    counts = world.hot.counts[0].tolist()
    assert counts[0] > 0 and counts[1:] == [0, 0]


def test_an_entry_is_read_from_the_host_once_while_all_fit(device: torch.device) -> None:
    """A sequence that finds its context in the cache begins with an empty hot row."""
    world = HotWorld(pool(5, selected=4, hot=48, layers=1), PAGE, 1, 6, device)
    for chunks in ([(0, 20)], [(0, 14)], [(0, 2)], [(0, 9)], [(0, 1)], [(0, 1)]):
        if chunks == [(0, 14)]:
            world.hot.held.fill_(-1)
            world.hot.used.fill_(-1)
        played(world, list(chunks), "random")
    _, misses, gathered = world.hot.counts[0].tolist()
    assert gathered > 0 and misses + gathered <= 20


@pytest.mark.full
def test_kernels_compile_for_an_h200() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.layers.kernels.compiling"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
