"""The reference of swap-in: an LRU that never gives up a choice, and attention that cannot tell."""

from __future__ import annotations

import random

import pytest
import torch

from kvtide.layers.backend.kernel_args import AttentionParams
from kvtide.layers.forward import Place
from kvtide.layers.reference.mla import mla_attention
from kvtide.layers.reference.swap_in import plan, swap_in
from kvtide.spec import Field, PoolSpec
from kvtide.spec.families.pool_parts import KVDType, scaled
from tests.layers.hot_world import Chunk, HotWorld

PAGE = 8


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_is_that_of_a_list_in_the_order_of_use(seed: int) -> None:
    """Against slots in a plain list, least recently used first."""
    rng = random.Random(seed)
    size, past = rng.choice([4, 9, 16]), 0
    held, used = torch.full((size,), -1), torch.full((size,), -1)
    slots: list[int | None] = [None] * size
    uses = [-1] * size
    for clock in range(1, 80):
        total = past + rng.randint(0, 3)
        wanted = rng.sample(range(total), min(total, rng.randint(0, size)))
        chosen = torch.tensor([*wanted, *wanted[:2], -1, -1], dtype=torch.int64)
        found = plan(held, used, chosen, past, total, clock)

        for slot, entry in enumerate(slots):
            if entry is None or entry >= past:
                slots[slot], uses[slot] = None, -1
        known = {entry for entry in slots if entry is not None}
        misses = sorted(e for e in wanted if e < past and e not in known)
        new = sorted(range(past, total), key=lambda e: e not in wanted)
        free = [slot for slot in range(size) if slots[slot] is None or slots[slot] not in wanted]
        free.sort(key=lambda slot: uses[slot])
        uses = [clock if slots[s] in wanted else uses[s] for s in range(size)]
        for slot, entry in zip(free, [*misses, *new], strict=False):
            slots[slot], uses[slot] = entry, clock

        assert found.held.tolist() == [-1 if entry is None else entry for entry in slots]
        assert found.used.tolist() == uses
        assert found.misses.tolist() == misses
        assert found.hits == len(wanted) - len(misses)
        assert set(wanted) <= set(found.held.tolist())
        held, used, past = found.held, found.used, total - rng.randint(0, 2) if total > 2 else total


@pytest.mark.quick
@pytest.mark.parametrize("kv", [KVDType.FP32, KVDType.BF16, KVDType.FP8], ids=lambda k: k.value)
@pytest.mark.parametrize("hot", [5, 6, 13, 64])
def test_attention_cannot_tell_a_hot_pool_from_a_resident_one(
    hot: int, kv: KVDType, device: torch.device
) -> None:
    """Over random steps of prefill, decode and rejected drafts, to the bit."""
    entry = scaled("latent", 32, kv, Field("rope", (8,), kv.unpacked))
    pool = PoolSpec("kv", (0, 3), entry, selected=5, hot=hot)
    world, rng = HotWorld(pool, PAGE, 3, 9, device, gap=32), random.Random(hot)
    how = AttentionParams(0.2)
    for _ in range(25):
        chunks: list[Chunk] = [
            (number, count)
            for number, one in enumerate(world.sequences)
            if (count := min(rng.choice([0, 1, 1, 2, 11]), 9 * PAGE - one.past)) > 0
        ]
        chunks.append((None, 1))
        run = world.step(chunks)
        for layer in pool.layers:
            world.write(run, chunks, layer)
            masks = world.masks(run, world.choices(run, rng.choice(["random", "churn", "same"])))
            place, resident = world.place(layer), world.resident(run, chunks, layer)
            swap_in(run, place, masks)
            world.check_bytes(chunks, layer)
            kept = _kept(world, chunks, layer)
            queries = world.some(len(run.positions), 2, 40).to(device)
            block = rng.choice([1, 4])
            given = queries, kept, how, masks, block
            found = mla_attention(run, place, *given)
            wanted = mla_attention(resident, Place(_all(pool), layer), *given)
            assert torch.equal(found[:-1], wanted[:-1])
        world.end(run, chunks, rejected=rng.choice([0, 0, 1]))


def test_entries_that_no_query_selected_are_zeros(device: torch.device) -> None:
    entry = scaled("latent", 32, KVDType.FP8, Field("rope", (8,), KVDType.FP8.unpacked))
    world = HotWorld(PoolSpec("kv", (0,), entry, selected=2, hot=4), PAGE, 1, 4, device)
    for count in (10, 1):
        chunks: list[Chunk] = [(0, count)]
        run = world.step(chunks)
        world.write(run, chunks, 0)
        masks = world.masks(run, world.choices(run, "same"))
        swap_in(run, world.place(0), masks)
        world.end(run, chunks)
    found = run.read_entries(world.place(0), run.sequences[0])
    assert found["latent"].shape == (10, 32)
    assert found["latent"][:2].ne(0).any(1).all() and not found["latent"][2:].any()


def _all(pool: PoolSpec) -> PoolSpec:
    return PoolSpec(pool.name, pool.layers, pool.entry, selected=pool.selected)


def _kept(world: HotWorld, chunks: list[Chunk], layer: int) -> dict[str, torch.Tensor]:
    """The step's own entries as they read back."""
    parts = []
    for number, count in chunks:
        none = torch.zeros(count, world.pool.entry.bytes, dtype=torch.uint8)
        parts.append(none if number is None else world.sequences[number].entries[layer][-count:])
    rows, fields, at = torch.cat(parts), {}, 0
    for field in world.pool.entry.fields:
        values = rows[:, at : at + field.bytes].contiguous()
        fields[field.name] = values.view(getattr(torch, field.dtype.torch_name)).to(world.device)
        at += field.bytes
    return world.place(layer).packing.unpack(fields)
