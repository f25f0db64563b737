"""Heads as a kernel prepares and keeps them are what torch makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvtide.layers.backend.arithmetic import Batched
from kvtide.layers.backend.kernel_args import Norm, QKVParams
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels import qkv as kernels
from kvtide.layers.kernels.qkv import qkv_write
from kvtide.layers.reference.kv_write import kv_write
from kvtide.layers.reference.qkv import split_heads
from kvtide.layers.rope import Rope
from kvtide.layers.step import Rows, Step
from kvtide.spec import ModelMemory, PoolSpec
from kvtide.spec.families.pool_parts import KVDType, by_head
from kvtide.tiers import Arrangement, Buffers, Layout

PAGE = 16
STEP = [(45, 1), (0, 20), (33, 18), (0, 1)]
"""Tokens before the step and in it, of every sequence."""
UNKEPT = [(33, 20)]
"""Of this one the page in the middle of its new tokens has no slot."""


STEPS_OF = {KVDType.FP32: 0.0, KVDType.BF16: 2**-7, KVDType.FP8: 0.0}


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    dim: int
    pairs: int
    normed: bool = False
    key_gain: float = 1.0
    gates: int = 0

    def preparing(self, device: torch.device) -> QKVParams:
        query_norm, key_norm = (
            Norm(_some(seed, self.dim).to(device) + 1, 1e-6) if self.normed else None
            for seed in (1, 2)
        )
        return QKVParams(self.kv_heads, query_norm, key_norm, self.key_gain)


CASES = {
    "llama": Case(6, 2, 24, 12),
    "qwen3": Case(4, 2, 32, 16, normed=True),
    "partly turned, beside gates": Case(4, 1, 32, 4, normed=True, gates=4),
    "not turned": Case(2, 2, 16, 0),
    "gained": Case(4, 2, 32, 16, key_gain=0.3),
}
LARGE = {
    "qwen3": Case(32, 8, 128, 64, normed=True),
    "gpt-oss": Case(64, 8, 64, 32),
    "qwen3-next": Case(16, 2, 256, 32, normed=True, gates=16),
}


def _some(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step_of(
    sequences: list[tuple[int, int]], case: Case, kv: KVDType, device: torch.device
) -> tuple[ForwardPass, Place]:
    """A step in scattered pages, all of it poisoned."""
    pool = PoolSpec("kv", (0,), by_head(case.kv_heads, case.dim, kv.element))
    memory = ModelMemory("test", PAGE, (pool,), layers=1)
    pages = [-(-(past + count) // PAGE) for past, count in sequences]
    arrangement = Arrangement(memory, {"kv": sum(pages) + 3}, Layout.PAGE_FIRST_DIRECT)
    block = torch.full((arrangement.bytes,), 0xFF, dtype=torch.uint8, device=device)
    free = torch.randperm(sum(pages) + 3, generator=torch.Generator().manual_seed(3)).tolist()
    rows, start = [], 0
    for (past, count), needed in zip(sequences, pages, strict=True):
        slots = [free.pop() for _ in range(needed)]
        if sequences == UNKEPT:
            slots[past // PAGE + 1] = -1
        rows.append(Rows(start, start + count, past, {"kv": torch.tensor(slots, device=device)}))
        start += count
    at = torch.cat([torch.arange(one.past, one.total) for one in rows]).to(device)
    view = Buffers(arrangement, block).view
    step = Step(at, at, tuple(rows), PAGE, view, lambda layer: None)
    return ForwardPass(step), Place(pool, 0)


def compare(
    case: Case,
    sequences: list[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
    kv: KVDType,
    close: float,
) -> None:
    """Everything that the kernel gives and writes, with what torch does.

    What is kept may be off by one step of its precision.
    """
    (ours, place), (theirs, _) = (step_of(sequences, case, kv, device) for _ in range(2))
    count, wide = len(ours.positions), case.heads + 2 * case.kv_heads
    projected = _some(7, count, wide + case.gates, case.dim).to(device, dtype)
    if kv is KVDType.FP8:
        # The interpreter does not round to eight bits as the device does.
        projected = projected.to(torch.float8_e4m3fn).to(dtype)
    heads, how = projected[:, :wide], case.preparing(device)
    turns = None
    if case.pairs:
        turns = Rope(torch.linspace(1, 0.01, case.pairs), 1.1)(ours.positions)
    queries, kept = qkv_write(ours, place, heads, turns, how)
    wanted, keys, values = split_heads(Batched(), heads, turns, how)
    expected = kv_write(theirs, place, {"k": keys, "v": values})
    assert queries.dtype == dtype and queries.is_contiguous()
    torch.testing.assert_close(queries.float(), wanted.float(), rtol=close, atol=close)
    # A sum in another order shows in a few of them; a rounding that is left out, in many.
    assert dtype == torch.float32 or float((queries == wanted).float().mean()) > 0.99
    found, written = ours.step.view("kv", 0), theirs.step.view("kv", 0)
    close = max(close, STEPS_OF[kv])
    for name in ("k", "v"):
        for one, other in ((kept, expected), (found, written)):
            assert one[name].dtype == other[name].dtype
            torch.testing.assert_close(
                one[name].float(), other[name].float(), rtol=close, atol=close, equal_nan=True
            )


@pytest.fixture(autouse=True)
def many_tokens_per_cta(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes long for every CTA."""
    monkeypatch.setattr(kernels, "FEW_TOKENS", 1)
    monkeypatch.setattr(kernels, "TILE_ELEMENTS", 1024)
    monkeypatch.setattr(kernels, "HEADS", 3)


@pytest.mark.parametrize("case", CASES)
def test_heads_are_those_of_torch(case: str, device: torch.device) -> None:
    compare(CASES[case], STEP, device, torch.float32, KVDType.FP32, 2e-6)


def test_few_tokens_have_a_cta_each(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FEW_TOKENS", 16)
    decoding = [(15, 1), (16, 1), (0, 1)]
    compare(CASES["qwen3"], decoding, device, torch.float32, KVDType.FP32, 2e-6)


def test_nothing_is_written_where_a_page_has_no_slot(device: torch.device) -> None:
    compare(CASES["llama"], UNKEPT, device, torch.float32, KVDType.FP32, 2e-6)


@pytest.mark.parametrize("kv", [KVDType.BF16, KVDType.FP8], ids=lambda kind: kind.value)
def test_a_pool_may_be_of_another_precision(kv: KVDType, device: torch.device) -> None:
    compare(CASES["not turned"], STEP, device, torch.float32, kv, 2e-6)


def test_eight_bits_saturate(device: torch.device) -> None:
    case = CASES["not turned"]
    run, place = step_of([(0, 3)], case, KVDType.FP8, device)
    heads = torch.full((3, 6, 16), 1e6, device=device)
    heads[1], heads[2] = -torch.inf, torch.nan
    _, kept = qkv_write(run, place, heads, None, case.preparing(device))
    for value in kept.values():
        assert value[0].float().eq(448).all()
        assert value[1].float().eq(-448).all()
        # The interpreter knows no NaN of eight bits.
        assert device.type == "cpu" or value[2].float().isnan().all()


@pytest.mark.parametrize("step", [[(100, 1)] * 64, [(0, 700), (50, 1)]], ids=["64", "701"])
@pytest.mark.parametrize("case", LARGE)
def test_published_heads_in_half_precision(
    case: str, step: list[tuple[int, int]], device: torch.device
) -> None:
    """What is off by a rounding of bf16 is off by less than one part in a hundred."""
    if device.type != "cuda":
        pytest.skip("an interpreter would take minutes: --device cuda")
    compare(LARGE[case], step, device, torch.bfloat16, KVDType.BF16, 1e-2)
