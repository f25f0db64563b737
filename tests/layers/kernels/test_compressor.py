"""Blocks compressed by a kernel: the entries and means that the torch code leaves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvtide.layers import Blueprint, ForwardPass, Rows, Step, choose
from kvtide.layers.backend.arithmetic import Batched
from kvtide.layers.backend.torch_ops import TorchOps
from kvtide.layers.backend.triton_ops import TritonOps
from kvtide.layers.compressor import Compressor
from kvtide.layers.dense import WideLinear
from kvtide.layers.packing import packing
from kvtide.layers.rope import Rope
from kvtide.spec import Entry, ModelMemory, PoolSpec, Reuse
from kvtide.spec.config import Config
from kvtide.spec.families.deepseek_v4 import _v4_means
from kvtide.spec.families.pool_parts import KVDType, packed, scaled
from kvtide.spec.pool import NOTHING
from kvtide.tiers import Arrangement, Buffers, Layout
from tests.layers.kernels.repeating import same_again

PAGE, HIDDEN = 16, 24
STEPS = {
    "a prompt, then in chunks": [[37, 5], [3, 11], [1, 7]],
    "token by token": [[14, 1], *[[1, 1]] * 4],
    "all at once": [[1, 0], [6, 18], [1, 2], [9, 1], [1, 16]],
}
"""How many tokens each of two sequences has in each step; 0: it is not in it."""


@dataclass(frozen=True)
class Case:
    ratio: int
    overlaps: bool
    width: int = 32
    rotary: int = 8
    page: int = PAGE
    indexes: bool = False

    def entry(self, kv: KVDType) -> Entry:
        if self.indexes:
            return scaled("index_key", self.width, kv)
        return packed(self.width, self.rotary, kv)


CASES = {
    "overlapping": Case(4, True),
    "indexer": Case(4, True, width=16, indexes=True),
    "apart": Case(16, False, width=24, rotary=16),
    "more than are taken together": Case(32, False, page=32),
}
LARGE = {
    "c4": Case(4, True, width=512, rotary=64, page=256),
    "c4 indexer": Case(4, True, width=128, rotary=64, page=256, indexes=True),
    "c128": Case(128, False, width=512, rotary=64, page=256),
}
LARGE_STEPS = [[700, 1000], [1, 1], [130, 5], [1, 1]]


@dataclass(frozen=True)
class Tensors:
    tensors: dict[str, Tensor]

    def get(self, name: str) -> Tensor:
        return self.tensors[name]

    def has(self, name: str) -> bool:
        return name in self.tensors


class Compressing:
    """One compressor, and pages that hold what it leaves."""

    def __init__(self, case: Case, kv: KVDType, dtype: torch.dtype, device: torch.device) -> None:
        self.page = case.page
        entry = case.entry(kv)
        pools = (
            PoolSpec("kv", (), NOTHING),
            PoolSpec("c", (0,), entry, tokens_per_entry=case.ratio, follows="kv"),
            PoolSpec("swa", (0,), entry, reuse=Reuse(reach=self.page)),
            *_v4_means("c", (0,), case.width, case.overlaps),
        )
        self.memory = ModelMemory("toy", self.page, pools, 1)
        self.device, self.dtype = device, dtype
        generator = torch.Generator().manual_seed(1)
        channels = case.width * (2 if case.overlaps else 1)

        def some(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        weights = {
            "wkv.weight": some(channels, HIDDEN) * 0.3,
            "wgate.weight": some(channels, HIDDEN) * 0.3,
            "ape": some(case.ratio, channels),
            "norm.weight": 1 + some(case.width) * 0.2,
        }
        config = Config("toy", {"rms_norm_eps": 1e-6})
        torch_ops, tensors = TorchOps(Batched()), Tensors(weights)
        blueprint = Blueprint(config, tensors, self.memory, torch_ops, dtype)
        rope = Rope((0.3 ** torch.arange(case.rotary // 2)).to(device))
        self.plain, self.by_kernel = (
            Compressor(replace(blueprint, ops=ops), 0, "c", rope)
            for ops in (torch_ops, TritonOps())
        )
        self.project = WideLinear(choose(False, device), Compressor.weight(blueprint), dtype)
        self.arrangement = Arrangement(self.memory, {"kv": 12, "swa": 12}, Layout.PAGE_FIRST)
        self.inputs = some(2, max(128, 4 * case.page), HIDDEN).to(dtype)

    def played(self, steps: list[list[int]], by_kernel: bool) -> tuple[Tensor, ...]:
        """What lies in all pages after each step."""
        block = torch.full((self.arrangement.bytes,), 0xFF, dtype=torch.uint8, device=self.device)
        buffers, past, after = Buffers(self.arrangement, block), [0, 0], []
        for step in steps:
            rows, positions, inputs = [], [], []
            for number, count in enumerate(step):
                if count:
                    begin, end = past[number], past[number] + count
                    first = sum(map(len, positions))
                    tables = self._tables(number, begin, end)
                    rows.append(Rows(first, first + count, begin, tables))
                    positions.append(torch.arange(begin, end))
                    inputs.append(self.inputs[number, begin:end])
                    past[number] = end
            at = torch.cat(positions).to(self.device)
            run = ForwardPass(
                Step(at, at, tuple(rows), self.page, buffers.view, lambda layer: None)
            )
            write = self.by_kernel if by_kernel else self.plain
            # As part of a wider GEMM.
            values_gates = functional.pad(self.project(torch.cat(inputs)), (4, 8))[:, 4:-8]
            write(values_gates, run)
            after.append(block.clone())
        return tuple(after)

    def _tables(self, number: int, begin: int, end: int) -> dict[str, Tensor]:
        """Of the window, only the page before the step and the last one in it, and some between."""
        pages = range(-(-end // self.page))
        kept = {(begin - 1) // self.page, pages[-1], *(page for page in pages if page % 3 == 1)}
        order = [(page * 5 + number * 6) % 12 for page in pages]
        window = [slot if page in kept else -1 for page, slot in zip(pages, order, strict=True)]
        return {
            "kv": torch.tensor(order, device=self.device),
            "swa": torch.tensor(window, device=self.device),
        }


def compared(
    case: Case, steps: list[list[int]], kv: KVDType, dtype: torch.dtype, device: torch.device
) -> list[tuple[str, Tensor, Tensor]]:
    """By step, pool and field as layers see it: what the kernel leaves, and what torch does."""
    compressing = Compressing(case, kv, dtype, device)
    ours = same_again(lambda: compressing.played(steps, True))
    theirs, found = compressing.played(steps, False), []
    for number, blocks in enumerate(zip(ours, theirs, strict=True)):
        one, other = (Buffers(compressing.arrangement, block) for block in blocks)
        for pool in compressing.memory.pools:
            if pool.name.startswith("c"):
                ours_here, theirs_here = (
                    packing(pool.entry).unpack(b.view(pool.name, 0)) for b in (one, other)
                )
                for name, wanted in theirs_here.items():
                    found.append((f"step {number}: {pool.name}.{name}", ours_here[name], wanted))
    return found


@pytest.mark.quick
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_leaves_what_the_torch_code_leaves(
    case: str, steps: str, device: torch.device
) -> None:
    pairs = compared(CASES[case], STEPS[steps], KVDType.FP32, torch.float32, device)
    for name, found, wanted in pairs:
        torch.testing.assert_close(
            found, wanted, rtol=2e-5, atol=2e-5, equal_nan=True, msg=lambda m, n=name: f"{n}\n{m}"
        )


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["overlapping", "indexer", "apart"])
def test_entries_are_rounded_as_the_torch_code_rounds_them(
    case: str, dtype: torch.dtype, device: torch.device
) -> None:
    """A number on the verge may go the other way: few of them, and not far."""
    pairs = compared(CASES[case], STEPS["all at once"], KVDType.FP8, dtype, device)
    for name, found, wanted in pairs:
        there = wanted.isfinite()
        assert torch.equal(there, found.isfinite()), name
        ours, theirs = found[there], wanted[there]
        if "state" in name or "open" in name:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        elif len(ours):
            off = ((ours - theirs).abs() > theirs.abs() * 1e-4 + 1e-6).float().mean()
            assert off < 0.02, f"{name}: {off:.0%} differ"
            assert bool(((ours - theirs).abs() <= theirs.abs() / 7 + 1e-2).all()), name


@pytest.mark.parametrize("kv", [KVDType.BF16, KVDType.FP8], ids=lambda kind: kind.value)
@pytest.mark.parametrize("case", LARGE)
def test_published_sizes_leave_the_same_bits_every_time(
    case: str, kv: KVDType, device: torch.device
) -> None:
    if device.type != "cuda":
        pytest.skip("an interpreter would take minutes: --device cuda")
    compressing = Compressing(LARGE[case], kv, torch.bfloat16, device)
    same_again(lambda: compressing.played(LARGE_STEPS, True))
