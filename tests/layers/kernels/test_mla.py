"""Attention over one vector a token as a kernel gives what the plain sums give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvtide.layers.backend.kernel_args import AttentionParams
from kvtide.layers.forward import Place
from kvtide.layers.kernels.attention import mla_tiles
from kvtide.layers.kernels.attention.mla import block_attention, mla_attention
from kvtide.layers.reference.attention import attend_masked
from kvtide.spec import Field, ModelMemory, PoolSpec, Reuse
from kvtide.spec.families.pool_parts import KVDType, packed, scaled
from tests.layers.kernels.filled import Filled, Sequences, written
from tests.layers.kernels.repeating import same_again

PAGE = 16
STEPS: dict[str, Sequences] = {
    "prompts": [(0, 23), (0, 2)],
    "decoding": [(70, 1), (16, 1), (3, 1)],
    "all at once": [(45, 1), (0, 3), (33, 7)],
}
"""Tokens before the step and in it, of every sequence."""


@dataclass(frozen=True)
class Blocks:
    """A layer of DeepSeek-V4: heads, dimensions, how many of them turn, and what it sees.

    ratio   tokens of a block, 0 where there are none
    chosen  how many of them a query sees, None where it sees all
    """

    heads: int
    dim: int
    rotated: int
    window: int
    ratio: int = 0
    chosen: int | None = None

    def memory(self, kv: KVDType) -> ModelMemory:
        entry = packed(self.dim, self.rotated, kv)
        pools = [PoolSpec("swa", (0,), entry, reuse=Reuse(self.window - 1))]
        if self.ratio:
            pools.append(PoolSpec("blocks", (0,), entry, tokens_per_entry=self.ratio))
        return ModelMemory("test", PAGE, tuple(pools), layers=1)

    def how(self, device: torch.device) -> AttentionParams:
        sinks = torch.randn(self.heads, generator=torch.Generator().manual_seed(1))
        return AttentionParams(self.dim**-0.5, self.window, sinks.to(device))


CASES = {
    "window": Blocks(4, 32, 8, window=19),
    "all blocks": Blocks(4, 32, 8, window=5, ratio=8),
    "some blocks": Blocks(3, 24, 8, window=19, ratio=4, chosen=6),
    "groups": Blocks(2, 128, 32, window=7, ratio=4, chosen=5),
}
LARGE = {
    "c4": Blocks(64, 512, 64, window=128, ratio=4, chosen=512),
    "c128": Blocks(64, 512, 64, window=128, ratio=16),
    "a share of the heads": Blocks(8, 512, 64, window=128, ratio=4, chosen=512),
    "many heads": Blocks(128, 512, 64, window=128, ratio=4, chosen=512),
}


def some_of(visible: Sequence[int], count: int, device: torch.device) -> Tensor:
    """For every query some of the entries that it sees, in any order; -1 where there are fewer."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.full((len(visible), count), -1, dtype=torch.int32)
    for row, number in zip(rows, visible, strict=True):
        ours = torch.randperm(number, generator=generator)[:count]
        row[: len(ours)] = ours.int()
    return rows.to(device)


def both(
    case: Blocks,
    step: Sequences,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    kv: KVDType = KVDType.FP32,
    idle: bool = False,
) -> tuple[Tensor, Tensor]:
    """What the kernel gives, and the plain sums in fp32 over the same numbers."""
    memory, how = case.memory(kv), case.how(device)
    filled = Filled(memory, step, device, dtype, idle)
    window = Place(memory.pools[0], 0)
    blocks = Place(memory.pools[1], 0) if case.ratio else None
    near, new = written(filled, window, "kv")
    far = written(filled, blocks, "kv")[0] if blocks else None
    queries = filled.some(filled.tokens, case.heads, case.dim)
    visible = [(int(p) + 1) // case.ratio for p in filled.run.positions] if case.ratio else []
    chosen = None if case.chosen is None else some_of(visible, case.chosen, device)
    given = window, new, blocks, queries, how, chosen
    found = same_again(lambda: block_attention(filled.run, *given))
    wanted = []
    for number, rows in enumerate(filled.run.sequences):
        ours, keys = slice(rows.start, rows.end), near[number].float()
        key = torch.arange(rows.total, device=device)
        query = torch.arange(rows.past, rows.total, device=device)[:, None]
        seen = (key <= query) & (key > query - case.window)
        if far is not None:
            keys = torch.cat([keys, far[number].float()])
            entry = torch.arange(len(far[number]), device=device)
            closed = entry < (query + 1) // case.ratio
            if chosen is not None:
                closed = (entry == chosen[ours, :, None]).any(1)
            seen = torch.cat([seen, closed], 1)
        context = keys[:, None]
        wanted.append(attend_masked(queries[ours].float(), context, context, seen, how, 256))
    return found.float(), torch.cat(wanted)


@pytest.mark.quick
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("case", CASES)
def test_blocks_and_a_window_give_what_plain_sums_give(
    case: str, step: str, device: torch.device
) -> None:
    found, wanted = both(CASES[case], STEPS[step], device)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.quick
@pytest.mark.parametrize("kv", [KVDType.BF16, KVDType.FP8], ids=lambda kind: kind.value)
@pytest.mark.parametrize("case", ["some blocks", "groups"])
def test_blocks_may_be_kept_in_another_precision(
    case: str, kv: KVDType, device: torch.device
) -> None:
    found, wanted = both(CASES[case], STEPS["all at once"], device, torch.float32, kv)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["window", "all blocks", "some blocks"])
def test_splits_of_what_is_seen_are_combined(
    case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla_tiles, "MIN_KEYS", 4)
    found, wanted = both(CASES[case], [(70, 1), (2, 1)], device)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["some blocks", "chosen"])
def test_rows_of_padding_do_no_harm(case: str, device: torch.device) -> None:
    """A sequence of one token without slots, as a CUDA graph has them."""
    step = [(70, 1), (0, 1)]
    if case in CASES:
        found, wanted = both(CASES[case], step, device, idle=True)
    else:
        found, wanted = both_latent(LATENTS[case], step, device, idle=True)
    assert found.isfinite().all()
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=2e-5)


# -- latents -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Latents:
    """`chosen`: how many tokens a query sees, None where it sees all up to itself."""

    heads: int
    rank: int
    rotated: int
    chosen: int | None = None

    def memory(self, kv: KVDType) -> ModelMemory:
        rope = Field("rope", (self.rotated,), kv.unpacked)
        pool = PoolSpec("kv", (0,), scaled("latent", self.rank, kv, rope))
        return ModelMemory("test", PAGE, (pool,), layers=1)


LATENTS = {
    "few heads": Latents(3, 32, 8),
    "odd widths": Latents(5, 40, 4),
    "chosen": Latents(4, 32, 8, chosen=11),
    "groups": Latents(2, 256, 16, chosen=9),
}
LARGE_LATENTS = {
    "16 heads": Latents(16, 512, 64),
    "128 heads": Latents(128, 512, 64),
    "16 heads, chosen": Latents(16, 512, 64, chosen=2048),
    "128 heads, chosen": Latents(128, 512, 64, chosen=2048),
}


def both_latent(
    case: Latents,
    step: Sequences,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    kv: KVDType = KVDType.FP32,
    idle: bool = False,
) -> tuple[Tensor, Tensor]:
    memory, how = case.memory(kv), AttentionParams((case.rank + case.rotated) ** -0.5)
    filled = Filled(memory, step, device, dtype, idle)
    place = Place(memory.pools[0], 0)
    latents, ropes = (written(filled, place, name)[0] for name in ("latent", "rope"))
    queries = filled.some(filled.tokens, case.heads, case.rank + case.rotated)
    visible = (filled.run.positions + 1).tolist()
    chosen = None if case.chosen is None else some_of(visible, case.chosen, device)
    found = same_again(lambda: mla_attention(filled.run, place, queries, how, chosen))
    wanted = []
    for number, rows in enumerate(filled.run.sequences):
        ours, values = slice(rows.start, rows.end), latents[number].float()
        keys = torch.cat([values, ropes[number].float()], 1)
        entry = torch.arange(rows.total, device=device)
        seen = entry < torch.arange(rows.past + 1, rows.total + 1, device=device)[:, None]
        if chosen is not None:
            seen = (entry == chosen[ours, :, None]).any(1)
        pair = keys[:, None], values[:, None]
        wanted.append(attend_masked(queries[ours].float(), *pair, seen, how, 256))
    return found.float(), torch.cat(wanted)


@pytest.mark.quick
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("case", LATENTS)
def test_latents_give_what_plain_sums_give(case: str, step: str, device: torch.device) -> None:
    found, wanted = both_latent(LATENTS[case], STEPS[step], device)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.quick
@pytest.mark.parametrize("kv", [KVDType.BF16, KVDType.FP8], ids=lambda kind: kind.value)
@pytest.mark.parametrize("case", ["few heads", "groups"])
def test_latents_may_be_kept_in_another_precision(
    case: str, kv: KVDType, device: torch.device
) -> None:
    found, wanted = both_latent(LATENTS[case], STEPS["decoding"], device, torch.float32, kv)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["few heads", "chosen"])
def test_splits_of_latents_are_combined(
    case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla_tiles, "MIN_KEYS", 4)
    step = [(70, 1), (2, 1)]
    found, wanted = both_latent(LATENTS[case], step, device)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


# -- as they are published ---------------------------------------------------------------------

LARGE_STEPS: dict[str, Sequences] = {
    "two": [(3001, 1), (90, 1)],
    "many": [(2500 - 40 * number, 1) for number in range(40)],
    "all at once": [(9000, 1), (0, 300), (2500, 40)],
}


@pytest.mark.parametrize("kv", [KVDType.BF16, KVDType.FP8], ids=lambda kind: kind.value)
@pytest.mark.parametrize("step", LARGE_STEPS)
@pytest.mark.parametrize("case", LARGE_LATENTS)
def test_published_latents_in_half_precision(
    case: str, step: str, kv: KVDType, device: torch.device
) -> None:
    if device.type != "cuda":
        pytest.skip("an interpreter would take minutes: --device cuda")
    found, wanted = both_latent(LARGE_LATENTS[case], LARGE_STEPS[step], device, torch.bfloat16, kv)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kv", [KVDType.BF16, KVDType.FP8], ids=lambda kind: kind.value)
@pytest.mark.parametrize("step", LARGE_STEPS)
@pytest.mark.parametrize("case", LARGE)
def test_published_blocks_in_half_precision(
    case: str, step: str, kv: KVDType, device: torch.device
) -> None:
    if device.type != "cuda":
        pytest.skip("an interpreter would take minutes: --device cuda")
    found, wanted = both(LARGE[case], LARGE_STEPS[step], device, torch.bfloat16, kv)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
