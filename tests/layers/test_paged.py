"""Attention over pages as a device program gives what the plain sums give."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvtide.layers import paged
from kvtide.layers.attending import Attending, attend
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.paged import attend_paged
from kvtide.layers.step import Rows, Step
from kvtide.spec import ALL, ModelMemory, PoolSpec, Reuse
from kvtide.spec.families.parts import KVDType, by_head
from kvtide.tiers import Arrangement, Buffers, Layout

PAGE = 16
STEPS = {
    "prompts": [(0, 37), (0, 5)],
    "decoding": [(70, 1), (16, 1), (3, 1)],
    "all at once": [(45, 1), (0, 20), (33, 18), (90, 2)],
}
"""Tokens before the step and in it, of every sequence."""


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    sinks: bool = False
    cap: float | None = None

    def how(self, device: torch.device) -> Attending:
        sinks = torch.randn(self.heads, generator=torch.Generator().manual_seed(1)).to(device)
        given = sinks if self.sinks else None
        return Attending(self.dim**-0.5, self.window, given, self.cap)


CASES = {
    "by head": Case(3, 3, 32),
    "grouped": Case(8, 2, 64),
    "odd group, odd width": Case(5, 1, 24),
    "window": Case(4, 2, 32, window=19),
    "small window and sinks": Case(4, 2, 16, window=3, sinks=True),
    "capped": Case(6, 2, 32, cap=1.5),
}
LARGE = {
    "qwen3": Case(32, 8, 128),
    "gpt-oss": Case(64, 8, 64, window=128, sinks=True),
    "gemma": Case(8, 4, 256, window=512, cap=50.0),
}


def both(
    case: Case, step: list[tuple[int, int]], device: torch.device, dtype: torch.dtype, kv: KVDType
) -> tuple[Tensor, Tensor]:
    """What the program gives, and the plain sums in fp32 over the same numbers."""
    reach = ALL if case.window is None else case.window - 1
    pool = PoolSpec("kv", (0,), by_head(case.kv_heads, case.dim, kv.element), reuse=Reuse(reach))
    memory = ModelMemory("test", PAGE, (pool,), layers=1)
    place, how = Place(pool, 0), case.how(device)
    totals = [past + count for past, count in step]
    needed = sum(-(-total // PAGE) for total in totals)
    arrangement = Arrangement(memory, {"kv": needed + 3}, Layout.PAGE_FIRST_DIRECT)
    block = torch.full((arrangement.bytes,), 0xFF, dtype=torch.uint8, device=device)
    buffers = Buffers(arrangement, block)
    generator = torch.Generator().manual_seed(5)
    free = torch.randperm(needed + 3, generator=generator).tolist()

    def some(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, case.dim, generator=generator).to(device, dtype)

    view = buffers.view("kv", 0)
    rows, contexts, start = [], [], 0
    for (past, count), total in zip(step, totals, strict=True):
        slots = [free.pop() for _ in range(-(-total // PAGE))]
        context = {name: some(past, case.kv_heads).to(view[name].dtype) for name in ("k", "v")}
        for token in range(how.first_seen(past), past):
            for name, value in context.items():
                view[name][slots[token // PAGE], token % PAGE] = value[token]
        gone = how.first_seen(past) // PAGE
        table = torch.tensor([-1] * gone + slots[gone:], device=device)
        rows.append(Rows(start, start + count, past, {"kv": table}))
        contexts.append(context)
        start += count
    at = torch.cat([torch.arange(one.past, one.total) for one in rows]).to(device)
    run = ForwardPass(Step(at, at, tuple(rows), PAGE, buffers.view, lambda layer: None))
    queries = some(start, case.heads)
    new = {"k": some(start, case.kv_heads), "v": some(start, case.kv_heads)}
    kept = run.keep(place, new)
    found = attend_paged(run, place, queries, kept, how)
    wanted = []
    for one, context in zip(rows, contexts, strict=True):
        ours = slice(one.start, one.end)
        whole = {n: torch.cat([context[n], kept[n][ours]]).float() for n in context}
        wanted.append(attend(queries[ours].float(), whole["k"], whole["v"], how, 256))
    return found.float(), torch.cat(wanted)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("case", CASES)
def test_the_program_gives_what_plain_sums_give(case: str, step: str, device: torch.device) -> None:
    found, wanted = both(CASES[case], STEPS[step], device, torch.float32, KVDType.FP32)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["grouped", "window", "small window and sinks"])
def test_parts_of_the_keys_are_joined(
    case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence has too few programs for a device, so each takes a part of its keys."""
    monkeypatch.setattr(paged, "LEAST_KEYS", 16)
    monkeypatch.setattr(paged, "PROGRAMS", 8 * CASES[case].kv_heads)
    found, wanted = both(CASES[case], [(130, 1)], device, torch.float32, KVDType.FP32)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kv", [KVDType.BF16, KVDType.FP8], ids=lambda kind: kind.value)
def test_what_is_kept_may_be_of_another_precision(kv: KVDType, device: torch.device) -> None:
    found, wanted = both(CASES["grouped"], STEPS["all at once"], device, torch.float32, kv)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("step", [[(1500, 1), (0, 700), (4000, 64)], [(9000, 1)]], ids=str)
@pytest.mark.parametrize("case", LARGE)
def test_published_heads_in_half_precision(
    case: str, step: list[tuple[int, int]], device: torch.device
) -> None:
    if device.type != "cuda":
        pytest.skip("an interpreter would take minutes: --device cuda")
    found, wanted = both(LARGE[case], step, device, torch.bfloat16, KVDType.BF16)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
