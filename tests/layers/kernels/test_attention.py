"""Paged prefill, decode and cascade attention give what the torch reference gives."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvtide.layers.backend.kernel_args import AttentionParams
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels.attention import (
    attention_cascade,
    attention_decode,
    attention_prefill,
    attention_tiles,
    prefill_schedule,
)
from kvtide.layers.kernels.attention.attention_prefill import paged_attention
from kvtide.layers.packing import plain
from kvtide.layers.reference.attention import attend
from kvtide.layers.reference.kv_write import kv_write
from kvtide.layers.step import Batch, Bounds, Rows, Step
from kvtide.spec import ALL, ModelMemory, PoolSpec, Reuse
from kvtide.spec.families.pool_parts import KVDType, by_head
from kvtide.tiers import Arrangement, Buffers, Layout
from tests.layers.kernels.repeating import same_again

PAGE = 16
STEPS = {
    "prompts": [(0, 37), (0, 5)],
    "decoding": [(70, 1), (16, 1), (3, 1)],
    "all at once": [(45, 1), (0, 20), (33, 18), (90, 2)],
    "verifying": [(70, 4), (45, 1), (0, 3), (90, 2)],
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

    def how(self, device: torch.device) -> AttentionParams:
        sinks = torch.randn(self.heads, generator=torch.Generator().manual_seed(1)).to(device)
        given = sinks if self.sinks else None
        return AttentionParams(self.dim**-0.5, self.window, given, self.cap)


CASES = {
    "by head": Case(3, 3, 32),
    "grouped": Case(8, 2, 64),
    "odd group, odd width": Case(5, 1, 24),
    "window": Case(4, 2, 32, window=19),
    "small window and sinks": Case(4, 2, 16, window=3, sinks=True),
    "sinks": Case(4, 2, 16, sinks=True),
    "capped": Case(6, 2, 32, cap=1.5),
}
LARGE = {
    "qwen3": Case(32, 8, 128),
    "gpt-oss": Case(64, 8, 64, window=128, sinks=True),
    "gemma": Case(8, 4, 256, window=512, cap=50.0),
    "qwen3-next": Case(16, 2, 256),
}
ALIKE_AT_LENGTH = [(2048 + 311 * number % 1500, 1) for number in range(40)]
"""All share a prefix of 2,048 tokens: in one split, a CTA goes over 32 tiles or more."""
LARGE_STEPS = {
    "prompts": [(0, 700), (4000, 64), (129, 333)],
    "all at once": [(1500, 1), (0, 700), (4000, 64)],
    "some after many": [(9000, 40), (3000, 1)],
    "few after many": [(9000, 2)],
    "verifying": [(3000, 1), (500, 2), *[(2048 + 7 * number, 4) for number in range(24)]],
    "one": [(9000, 1)],
    "many": [(700 * number % 4999, 1) for number in range(40)],
    "alike": ALIKE_AT_LENGTH,
    "alike, in one part": ALIKE_AT_LENGTH,
}


def both(
    case: Case,
    step: list[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
    kv: KVDType,
    idle: int = 0,
    prefix: tuple[int, int] = (0, 0),
) -> tuple[Tensor, Tensor]:
    """What the kernel gives, and the plain sums in fp32 over the same numbers.

    With `idle` sequences of padding, the kernel gets nothing but the batch.
    `prefix`: from a sequence on, all begin with so many tokens of it, a number of pages.
    """
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
        if len(rows) > prefix[0]:
            slots[: prefix[1] // PAGE] = rows[prefix[0]].slots["kv"][: prefix[1] // PAGE].tolist()
            for name, value in context.items():
                plain(value)[: prefix[1]] = plain(contexts[prefix[0]][name])[: prefix[1]]
        table = torch.tensor(slots, device=device)
        seen = torch.arange(how.first_seen(past), past, device=device)
        for name, value in context.items():
            plain(view[name])[table[seen // PAGE], seen % PAGE] = plain(value)[seen]
        table[: how.first_seen(past) // PAGE] = -1
        rows.append(Rows(start, start + count, past, {"kv": table}))
        contexts.append(context)
        start += count
    at = torch.cat([torch.arange(one.past, one.total) for one in rows]).to(device)
    run = ForwardPass(Step(at, at, tuple(rows), PAGE, buffers.view, lambda layer: None))
    queries = some(start, case.heads)
    new = {"k": some(start, case.kv_heads), "v": some(start, case.kv_heads)}
    kept = kv_write(run, place, new)
    if idle:
        run = padded(run, idle)
        kept = {name: functional.pad(value, (0, 0, 0, 0, 0, idle)) for name, value in kept.items()}
    given = functional.pad(queries, (0, 0, 0, 0, 0, idle))
    found = same_again(
        lambda: replayed(run, lambda run: paged_attention(run, place, given, kept, how), bool(idle))
    )
    assert found.isfinite().all()
    found = found[: len(queries)]
    wanted = []
    for one, context in zip(rows, contexts, strict=True):
        ours = slice(one.start, one.end)
        whole = {n: torch.cat([context[n], kept[n][ours]]).float() for n in context}
        wanted.append(attend(queries[ours].float(), whole["k"], whole["v"], how, 256))
    return found.float(), torch.cat(wanted)


def padded(run: ForwardPass, idle: int) -> ForwardPass:
    """A step as a CUDA graph has it: with bounds and rows for more than there is. In a decode batch
    each token of padding is a sequence; else one sequence has them all, and two have none.
    """
    one, bounds = run.batch, run.batch.bounds
    sequences, tokens = one.rows.shape[0], len(one.owners)
    rows = [(tokens, tokens + idle, 0), (0, 0, 0), (0, 0, 0)]
    owners = [sequences] * idle
    if bounds.longest == 1:
        rows = [(tokens + number, tokens + number + 1, 0) for number in range(idle)]
        owners = [sequences + number for number in range(idle)]
    more = torch.tensor(rows, dtype=torch.int32, device=one.rows.device)
    filler = torch.tensor(owners, dtype=torch.int32, device=one.rows.device)
    slots = functional.pad(one.slots["kv"], (0, 3, 0, len(rows)), value=-1)
    longest, prompts = (1, 0) if bounds.longest == 1 else (tokens + idle, bounds.prompts + 3)
    batch = Batch(
        torch.cat([one.rows, more]),
        torch.cat([one.owners, filler]),
        {"kv": slots},
        Bounds(longest, 1000, prompts, singles=True),
    )
    at = functional.pad(run.positions, (0, idle))
    return ForwardPass(replace(run.step, tokens=at, positions=at, sequences=(), batch=batch))


def replayed(run: ForwardPass, call: Callable[[ForwardPass], Tensor], again: bool) -> Tensor:
    """What the call gives. On a device, `again`: captured with other numbers and replayed."""
    if not again or run.positions.device.type != "cuda":
        return call(run)
    rows, graph = run.batch.rows.clone(), torch.cuda.CUDAGraph()
    run.batch.rows[:, 2] = 0
    call(ForwardPass(run.step))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = call(ForwardPass(run.step))
    run.batch.rows.copy_(rows)
    graph.replay()
    return found


@pytest.mark.quick
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_gives_what_plain_sums_give(case: str, step: str, device: torch.device) -> None:
    found, wanted = both(CASES[case], STEPS[step], device, torch.float32, KVDType.FP32)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["grouped", "small window and sinks"])
def test_decode_needs_nothing_but_the_batch(case: str, device: torch.device) -> None:
    found, wanted = both(CASES[case], STEPS["decoding"], device, torch.float32, KVDType.FP32, 3)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.quick
@pytest.mark.parametrize("sms", [1, 64])
@pytest.mark.parametrize("case", CASES)
def test_few_tokens_of_a_sequence_are_split_over_their_keys(
    case: str, sms: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence with one new token is a block like the others: decode attention is not needed."""
    monkeypatch.setattr(attention_tiles, "MAX_TILE_KEYS", 16)
    monkeypatch.setattr(prefill_schedule, "SHORT_MIN_TILES", 1)
    monkeypatch.setattr(prefill_schedule, "SHORT_OVERHEAD_TILES", 0)
    monkeypatch.setattr(prefill_schedule, "sm_count", lambda device: sms)
    monkeypatch.setattr(attention_prefill, "attend_decode", None)
    found, wanted = both(CASES[case], STEPS["verifying"], device, torch.float32, KVDType.FP32)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.quick
@pytest.mark.parametrize("sms", [1, 5, 64])
@pytest.mark.parametrize("case", ["window", "small window and sinks"])
def test_splits_of_the_keys_are_combined(
    case: str, sms: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splits end within sequences, or take several of them; a page has two tiles."""
    monkeypatch.setattr(sys.modules[__name__], "PAGE", 32)
    monkeypatch.setattr(attention_tiles, "MAX_TILE_KEYS", 16)
    monkeypatch.setattr(attention_decode, "MIN_TILES", 1)
    monkeypatch.setattr(attention_decode, "CTAS_PER_SM", 1)
    monkeypatch.setattr(attention_decode, "sm_count", lambda device: sms)
    step = [(130, 1), (0, 1), (17, 1), (41, 11), (64, 1)]
    found, wanted = both(CASES[case], step, device, torch.float32, KVDType.FP32)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


def test_many_splits_are_combined(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "MAX_TILE_KEYS", 16)
    monkeypatch.setattr(attention_decode, "MIN_TILES", 1)
    found, wanted = both(
        CASES["odd group, odd width"], [(330, 1), (290, 1)], device, torch.float32, KVDType.FP32
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@dataclass(frozen=True)
class Alike:
    """Sequences that begin alike from one on, and what each block of two of them has in common."""

    step: list[tuple[int, int]]
    prefix: tuple[int, int]
    found: list[int]
    idle: int = 0


ALIKE = {
    "all": Alike([(70, 1), (48, 1), (100, 1), (49, 1)], (0, 48), [48, 48]),
    "one block": Alike([(70, 1), (80, 1), (97, 1), (64, 1), (66, 1)], (2, 64), [0, 64, 0]),
    "beside a prompt": Alike([(70, 1), (64, 1), (90, 20), (66, 1), (81, 1)], (0, 64), [64, 0, 0]),
    "too little": Alike([(40, 1), (33, 1)], (0, 16), [0]),
    "replayed": Alike([(140, 1), (128, 1), (130, 1)], (0, 128), [128, 0, 0], idle=2),
}


@pytest.mark.quick
@pytest.mark.parametrize("keys", [PAGE, 2 * PAGE])
@pytest.mark.parametrize("alike", ALIKE)
@pytest.mark.parametrize("case", ["grouped", "odd group, odd width", "sinks", "capped"])
def test_a_shared_prefix_is_read_once_per_group(
    case: str, alike: str, keys: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, given = CASES[case], ALIKE[alike]
    monkeypatch.setattr(attention_tiles, "MAX_TILE_KEYS", keys)
    monkeypatch.setattr(attention_cascade, "MIN_TOKENS", 32)
    monkeypatch.setattr(attention_cascade, "FP32_TILE_ROWS", 2 * shape.heads // shape.kv_heads)
    compared, known = attention_cascade._shared_prefix_lengths, []

    def noted(*numbers: object) -> Tensor:
        known.append(compared(*numbers))
        return known[-1]

    monkeypatch.setattr(attention_cascade, "_shared_prefix_lengths", noted)
    found, wanted = both(
        shape, given.step, device, torch.float32, KVDType.FP32, given.idle, given.prefix
    )
    assert known[-1][:, 0].tolist() == [tokens // keys * keys for tokens in given.found]
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@dataclass(frozen=True)
class Blocks:
    """Sequences, and tokens of padding in a CUDA graph; how many blocks of tokens these
    are with two KV heads and groups of four, and which of them two or six CTAs split."""

    step: list[tuple[int, int]]
    idle: int
    count: int
    shared: dict[int, tuple[int, int]]


BLOCKS = {
    "one": Blocks([(300, 7)], 0, 2, {1: (1, 2), 3: (0, 2)}),
    "few": Blocks([(170, 5), (200, 1), (0, 3)], 0, 3, {1: (2, 3), 3: (0, 3)}),
    "several": Blocks([(33, 40), (70, 1), (95, 50), (160, 21)], 0, 29, {1: (28, 29), 3: (24, 29)}),
    "replayed": Blocks([(70, 1), (95, 21), (130, 14)], 9, 13, {1: (12, 13), 3: (9, 13)}),
}


@pytest.mark.quick
@pytest.mark.parametrize("sms", [1, 3])
@pytest.mark.parametrize("step", BLOCKS)
@pytest.mark.parametrize("case", ["grouped", "odd group, odd width", "window", "sinks", "capped"])
def test_blocks_of_tokens_are_split_among_ctas(
    case: str, step: str, sms: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splits end within blocks, or take several of them; other blocks have a CTA each."""
    given = BLOCKS[step]
    monkeypatch.setattr(attention_tiles, "MAX_TILE_KEYS", 16)
    monkeypatch.setattr(attention_prefill, "FP32_TILE_ROWS", 16)
    monkeypatch.setattr(attention_prefill, "SHORT_ROWS", 0)
    monkeypatch.setattr(attention_prefill, "SEQUENCES_AT_ONCE", 4)
    monkeypatch.setattr(prefill_schedule, "SEQUENCES_AT_ONCE", 4)
    monkeypatch.setattr(prefill_schedule, "MIN_TILES", 1)
    monkeypatch.setattr(prefill_schedule, "SPLIT_OVERHEAD_TILES", -1000)
    monkeypatch.setattr(prefill_schedule, "MAX_WAVES", 1000)
    monkeypatch.setattr(prefill_schedule, "sm_count", lambda device: sms)
    schedules = []

    def noted(*given: Any, **named: Any) -> Tensor:
        schedules.append(prefill_schedule.schedule_blocks(*given, **named))
        return schedules[-1]

    monkeypatch.setattr(attention_prefill, "schedule_blocks", noted)
    found, wanted = both(
        CASES[case], given.step, device, torch.float32, KVDType.FP32, idle=given.idle
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    if case == "grouped":
        assert schedules[-1][0, :3].tolist() == [*given.shared[sms], given.count]


def test_blocks_are_split_where_that_is_worth_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where they see little, or are many, and not those behind all that see more."""
    slots = {"kv": torch.zeros(50, dtype=torch.int64, device=device)}
    rows = (Rows(0, 64, 700, slots), Rows(64, 154, 700, slots), Rows(154, 180, 0, slots))
    at = torch.arange(180, device=device)
    step = Step(at, at, rows, PAGE, lambda pool, layer: {}, lambda layer: None)

    def shared(window: int = 0) -> list[int]:
        constants = prefill_schedule.split_constants(2, False, False, device)
        schedules = prefill_schedule.schedule_blocks(
            ForwardPass(step), 32, constants, window, 16, short=False
        )
        return [int(number) for number in schedules[0, :3]]

    monkeypatch.setattr(prefill_schedule, "sm_count", lambda device: 132)
    assert shared() == [0, 5, 6]
    assert shared(window=20) == [0, 0, 6]
    monkeypatch.setattr(prefill_schedule, "sm_count", lambda device: 3)
    assert shared() == [3, 5, 6]
    monkeypatch.setattr(prefill_schedule, "MAX_WAVES", 2)
    assert shared() == [0, 0, 6]
    monkeypatch.setattr(prefill_schedule, "MAX_WAVES", 3)
    monkeypatch.setattr(prefill_schedule, "sm_count", lambda device: 10)
    assert shared() == [0, 0, 6], "each has a CTA, and all fit one wave"


@pytest.mark.quick(step=["decoding"])
@pytest.mark.parametrize("step", ["all at once", "decoding"])
@pytest.mark.parametrize("kv", [KVDType.BF16, KVDType.FP8], ids=lambda kind: kind.value)
def test_what_is_kept_may_be_of_another_precision(
    kv: KVDType, step: str, device: torch.device
) -> None:
    found, wanted = both(CASES["grouped"], STEPS[step], device, torch.float32, kv)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kv", [KVDType.BF16, KVDType.FP8], ids=lambda kind: kind.value)
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("step", LARGE_STEPS)
@pytest.mark.parametrize("case", LARGE)
def test_published_heads_in_half_precision(
    case: str,
    step: str,
    page: int,
    kv: KVDType,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device.type != "cuda":
        pytest.skip("an interpreter would take minutes: --device cuda")
    monkeypatch.setattr(sys.modules[__name__], "PAGE", page)
    prefix = (0, 2048) if step.startswith("alike") else (0, 0)
    if step == "alike, in one part":
        monkeypatch.setattr(attention_cascade, "MAX_SPLITS", 1)
    given = LARGE_STEPS[step]
    found, wanted = both(LARGE[case], given, device, torch.bfloat16, kv, prefix=prefix)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
