"""Entries written by a kernel: the bytes that packing gives, in the slots that there are."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from kvtide.layers import ForwardPass, Place, Rows, Step
from kvtide.layers.kernels.kv_write import kv_write
from kvtide.layers.reference import kv_write as reference
from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec
from kvtide.spec.families.pool_parts import KVDType, by_head, packed, scaled
from kvtide.tiers import Arrangement, Buffers, Layout

PAGE = 8
STEP = [(0, 9), (13, 1), (5, 4), (0, 1)]
"""Tokens before the step and in it, of every sequence; the last is padding."""

ENTRIES: dict[str, Entry] = {
    "joined": packed(512, 64, KVDType.FP8),
    "joined, a short group and no pad": packed(510, 10, KVDType.FP8),
    "scaled": scaled("index_key", 128, KVDType.FP8),
    "scaled, a short group, beside a plain one": scaled(
        "latent", 300, KVDType.FP8, Field("rope", (16,), DType.BF16)
    ),
    **{f"by head, {kv.value}": by_head(3, 40, kv.element) for kv in KVDType},
    "plain": packed(48, 16, KVDType.BF16),
    "three": Entry(tuple(Field(name, (5,), DType.BF16) for name in "abc")),
}


class Keeping:
    """A pool with one layer that matters, and a step with sequences in some of its slots."""

    def __init__(self, entry: Entry, device: torch.device) -> None:
        self.device = device
        self.place = Place(PoolSpec("kv", (0, 1), entry), 1)
        memory = ModelMemory("toy", PAGE, (self.place.pool,), 2)
        self.arrangement = Arrangement(memory, {"kv": 9}, Layout.PAGE_FIRST)
        tables = [[4, 0], [-1, 7], [2, -1], [-1]]
        rows, start = [], 0
        for (past, count), slots in zip(STEP, tables, strict=True):
            table = torch.tensor(slots, device=device)
            rows.append(Rows(start, start + count, past, {"kv": table}))
            start += count
        self.rows, self.count = tuple(rows), start

    def values(self, dtype: torch.dtype, extreme: bool) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        found = {}
        for part in self.place.packing.parts:
            shape = (self.count, *part.logical.shape)
            value = torch.randn(shape, generator=generator)
            if extreme:
                value *= 2.0 ** torch.randint(-60, 60, (self.count, 1), generator=generator).view(
                    -1, *[1] * (len(shape) - 1)
                )
                value *= 2.0 ** torch.randint(-20, 5, shape, generator=generator)
                some = [
                    math.inf,
                    -math.inf,
                    math.nan,
                    0.0,
                    -0.0,
                    3e38,
                    -1e-40,
                    448.0,
                    464.0,
                    2.0**-10,
                ]
                flat = value.view(self.count, -1)
                for row, one in enumerate(some):
                    flat[row, row * 3 % flat.shape[1]] = one
                flat[11], flat[12] = 0.0, math.nan
            # As a part of a wider projection.
            wide = torch.cat([value, value], dim=-1).to(self.device, dtype)
            found[part.logical.name] = wide[..., : shape[-1]]
        return found

    def kept(self, how: str, values: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """All bytes after the step, and what came back."""
        block = torch.full((self.arrangement.bytes,), 0xFF, dtype=torch.uint8, device=self.device)
        buffers = Buffers(self.arrangement, block)
        at = torch.cat([torch.arange(one.past, one.total) for one in self.rows]).to(self.device)
        run = ForwardPass(Step(at, at, self.rows, PAGE, buffers.view, lambda layer: None))
        if how == "kv_write":
            return block, kv_write(run, self.place, values)
        return block, reference.kv_write(run, self.place, values)


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Bit by bit, but a NaN may be any; and eight bits have but one."""
    assert found.dtype is wanted.dtype and found.shape == wanted.shape
    if wanted.dtype.itemsize > 1:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
        there = ~wanted.isnan()
        assert torch.equal(found[there].signbit(), wanted[there].signbit())
    else:
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("extreme", [False, True], ids=["ordinary", "extreme"])
@pytest.mark.parametrize("name", ENTRIES)
def test_bytes_are_those_of_packing(
    name: str, extreme: bool, dtype: torch.dtype, device: torch.device
) -> None:
    keeping = Keeping(ENTRIES[name], device)
    values = keeping.values(dtype, extreme)
    (wanted, wanted_back), (found, back) = (
        keeping.kept(how, values) for how in ("torch", "kv_write")
    )
    ours, theirs = (Buffers(keeping.arrangement, block).view("kv", 1) for block in (found, wanted))
    for field in keeping.place.pool.entry.fields:
        assert_same(ours[field.name], theirs[field.name])
    assert back.keys() == wanted_back.keys()
    for part, value in back.items():
        assert_same(value, wanted_back[part])
    if not extreme:
        assert torch.equal(found, wanted), "a byte outside of the fields"
