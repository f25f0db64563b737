"""Attention to entries of a hot pool, where they lie, gives what attention to pages gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvtide.layers.backend.kernel_args import AttentionParams
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels.attention.mla import block_attention, mla_attention
from kvtide.layers.kernels.swap_in import swap_in
from kvtide.layers.step import Batch
from kvtide.spec import Field, ModelMemory, PoolSpec, Reuse
from kvtide.spec.families.pool_parts import KVDType, packed, scaled
from kvtide.tiers.buffers import Buffers
from kvtide.tiers.layout import Arrangement, Layout
from tests.layers.hot_world import Chunk, HotWorld

PAGE = 8
HEADS, DIM, ROTATED, WINDOW = 3, 24, 8, 5
STEPS: list[list[Chunk]] = [
    [(0, 27), (1, 9)],
    [(0, 1), (None, 1), (1, 1)],
    [(1, 2), (0, 1)],
    [(0, 20), (1, 1)],
]


@pytest.mark.quick(kv=[KVDType.FP8])
@pytest.mark.parametrize("kv", [KVDType.FP32, KVDType.FP8], ids=lambda kind: kind.value)
def test_latents(kv: KVDType, device: torch.device) -> None:
    entry = scaled("latent", 32, kv, Field("rope", (ROTATED,), kv.unpacked))
    world = HotWorld(PoolSpec("kv", (2,), entry, selected=4, hot=9), PAGE, 2, 8, device)
    how = AttentionParams(0.2)
    for chunks in STEPS:
        run, chosen = _written(world, chunks)
        queries = world.some(len(chosen), HEADS, 32 + ROTATED).to(device)
        resident = world.resident(run, chunks, 2)
        wanted = mla_attention(resident, _resident(world), queries, how, chosen)
        located = swap_in(run, world.place(2), chosen)
        found = mla_attention(run, world.place(2), queries, how, located)
        assert torch.equal(found, wanted)
        world.end(run, chunks)


@pytest.mark.quick(kv=[KVDType.FP8])
@pytest.mark.parametrize("kv", [KVDType.FP32, KVDType.FP8], ids=lambda kind: kind.value)
def test_compressed_entries_beside_a_window(kv: KVDType, device: torch.device) -> None:
    entry = packed(DIM, ROTATED, kv)
    pool = PoolSpec("c4", (2,), entry, tokens_per_entry=4, selected=3, hot=7)
    world = HotWorld(pool, PAGE, 2, 8, device)
    swa = PoolSpec("swa", (2,), entry, reuse=Reuse(WINDOW - 1))
    how = AttentionParams(DIM**-0.5, WINDOW)
    for chunks in STEPS:
        run, chosen = _written(world, chunks)
        window = _window(world, swa, len(chunks))
        kept = world.some(len(chosen), DIM).to(device)
        queries = world.some(len(chosen), HEADS, DIM).to(device)
        resident = _beside(world.resident(run, chunks, 2), window)
        given = queries, how, chosen
        wanted = block_attention(resident, Place(swa, 2), kept, _resident(world), *given)
        run = _beside(run, window)
        given = queries, how, swap_in(run, world.place(2), chosen)
        found = block_attention(run, Place(swa, 2), kept, world.place(2), *given)
        assert torch.equal(found, wanted)
        world.end(run, chunks)


def _written(world: HotWorld, chunks: list[Chunk]) -> tuple[ForwardPass, Tensor]:
    run = world.step(chunks)
    world.write(run, chunks, 2)
    chosen = world.choices(run, "random")
    for (number, _), rows in zip(chunks, run.sequences, strict=True):
        if number is None:
            chosen[rows.start : rows.end] = -1
    return run, chosen


def _resident(world: HotWorld) -> Place:
    return Place(replace(world.pool, hot=None), 2)


def _window(world: HotWorld, swa: PoolSpec, sequences: int) -> Mapping[str, Tensor]:
    """Random pages of a window, `longest` for each sequence of a step."""
    pages = sequences * world.longest
    memory = ModelMemory("test", PAGE, (replace(swa, layers=(0,)),), layers=1)
    arrangement = Arrangement(memory, {"swa": pages}, Layout.LAYER_FIRST)
    values = swa_bytes(world, swa, pages)
    return Buffers(arrangement, values.to(world.device)).view("swa", 0)


def swa_bytes(world: HotWorld, swa: PoolSpec, pages: int) -> Tensor:
    block = torch.zeros(pages, swa.row_bytes(PAGE), dtype=torch.uint8)
    entries = block[:, : PAGE * swa.entry.bytes].unflatten(1, (PAGE, -1))
    entries.copy_(world.packed(pages * PAGE).view(entries.shape))
    return block.flatten()


def _beside(run: ForwardPass, window: Mapping[str, Tensor]) -> ForwardPass:
    """The step with a window's pages too."""
    view, sequences, longest = run.step.view, [], len(window[next(iter(window))])
    longest //= len(run.sequences)
    for number, rows in enumerate(run.sequences):
        table = number * longest + torch.arange(longest, device=run.positions.device)
        sequences.append(replace(rows, slots={**rows.slots, "swa": table}))
    step = replace(
        run.step,
        sequences=tuple(sequences),
        batch=Batch.of(sequences, run.positions.device),
        view=lambda pool, layer: window if pool == "swa" else view(pool, layer),
    )
    return ForwardPass(step)
