"""Norms and rotations by kernel: what the torch code gives, in its dtype."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvtide.layers import ForwardPass, Place, Rows, Step
from kvtide.layers.elementwise import rms_norm
from kvtide.layers.kernels.rope import norm_rope_write, rope, rope_back
from kvtide.layers.reference.kv_write import kv_write
from kvtide.layers.rope import Rope, rotate_interleaved
from kvtide.spec import ModelMemory, PoolSpec
from kvtide.spec.families.pool_parts import KVDType, packed
from kvtide.tiers import Arrangement, Buffers, Layout

PAGE, EPS = 4, 1e-6


@dataclass(frozen=True)
class Case:
    heads: int
    dim: int
    rotary: int


CASES = {"heads": Case(3, 24, 8), "all of a head": Case(2, 16, 16), "one": Case(1, 132, 20)}
LARGE = {"queries": Case(64, 512, 64), "index": Case(64, 128, 64)}


def some(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def turns_of(case: Case, positions: Tensor) -> Tensor:
    return Rope(0.5 ** torch.arange(case.rotary // 2, device=positions.device))(positions)


def wanted(x: Tensor, turns: Tensor, eps: float | None, back: bool) -> Tensor:
    if eps is not None:
        x = rms_norm(x, torch.ones((), device=x.device), eps)
    if back:
        turns = torch.stack([turns[:, 0], -turns[:, 1]], dim=1)
    return rotate_interleaved(x, turns)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """In half precision a sum on the verge may be rounded the other way, and turning gives what one
    of a pair is off to both: by one step of its length."""
    assert found.dtype is expected.dtype
    if found.dtype is torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:
        pairs, off = (t.float().unflatten(-1, (-1, 2)) for t in (expected, found - expected))
        assert bool((off.abs() <= 2**-7 * pairs.norm(dim=-1, keepdim=True)).all())
        assert (found != expected).float().mean() < 0.01


@pytest.mark.quick
@pytest.mark.parametrize(
    ("back", "eps"),
    [(False, None), (False, EPS), (True, None)],
    ids=["there", "normed, there", "back"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*CASES, *LARGE])
def test_heads_are_turned_as_the_torch_code_turns_them(
    case: str, dtype: torch.dtype, back: bool, eps: float | None, device: torch.device
) -> None:
    if case in LARGE and device.type != "cuda":
        pytest.skip("an interpreter would take minutes: --device cuda")
    shape = {**CASES, **LARGE}[case]
    positions = torch.arange(3, 3 + (700 if case in LARGE else 5), device=device)
    turns = turns_of(shape, positions)
    wide = some(len(positions), shape.heads, shape.dim + 8).to(device, dtype)
    part, beside = wide[..., : shape.dim], wide[..., shape.dim :].clone()
    expected = wanted(part, turns, eps, back)
    found = rope_back(part, turns) if back else rope(part, turns, eps)
    assert_near(found, expected)
    assert torch.equal(wide[..., shape.dim :], beside)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv", list(KVDType), ids=lambda kind: kind.value)
@pytest.mark.parametrize("case", [Case(1, 40, 8), Case(1, 512, 64)], ids=["short", "published"])
def test_keys_are_kept_as_the_torch_code_keeps_them(
    case: Case, kv: KVDType, dtype: torch.dtype, device: torch.device
) -> None:
    place = Place(PoolSpec("kv", (0,), packed(case.dim, case.rotary, kv)), 0)
    arrangement = Arrangement(
        ModelMemory("toy", PAGE, (place.pool,), 1), {"kv": 6}, Layout.PAGE_FIRST
    )
    tables = {"kv": torch.tensor([2, -1, 0], device=device)}
    at = torch.arange(2, 9, device=device)
    keys, weight = (
        some(7, case.dim).to(device, dtype),
        (1 + some(case.dim, seed=2)).to(device, dtype),
    )
    kept, pages = [], []
    for by_kernel in (True, False):
        block = torch.full((arrangement.bytes,), 0xFF, dtype=torch.uint8, device=device)
        view = Buffers(arrangement, block).view
        run = ForwardPass(Step(at, at, (Rows(0, 7, 2, tables),), PAGE, view, lambda layer: None))
        turns = turns_of(case, at)
        if by_kernel:
            kept.append(norm_rope_write(run, place, keys, (weight, EPS), turns).float())
        else:
            turned = rotate_interleaved(rms_norm(keys, weight, EPS), turns)
            kept.append(kv_write(run, place, {"kv": turned})["kv"].float())
        pages.append(place.packing.unpack(view("kv", 0))["kv"])
    torch.testing.assert_close(kept[0], kept[1], rtol=0.13, atol=1e-3)
    torch.testing.assert_close(pages[0], pages[1], rtol=0.13, atol=1e-3, equal_nan=True)
    exact = kv is KVDType.FP32 and dtype is torch.float32
    off = (kept[0] - kept[1]).abs() > (1e-5 if exact else 0)
    assert off.float().mean() < 0.01
    there = pages[0].isfinite().all(-1)
    assert int(there.sum()) == 3 and torch.equal(pages[0][2, 2:].float(), kept[0][:2])
