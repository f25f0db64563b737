"""Paged prefill and decode attention, and QKV preparation, at shapes of published models.

ROWS: (name, setup), where setup() gives the call to time, the bytes it must move and its FLOPs.
Bytes of attention are those of visible keys and values, once for all queries of a prefill chunk;
bytes of QKV preparation are all that is read and written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvtide.layers.backend.kernel_args import AttentionParams, Norm, QKVParams
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels.attention import (
    attention_decode,
    attention_prefill,
    attention_tiles,
    prefill_schedule,
)
from kvtide.layers.kernels.attention.attention_prefill import paged_attention
from kvtide.layers.kernels.qkv import qkv_write
from kvtide.layers.rope import Rope
from kvtide.layers.step import Rows, Step
from kvtide.spec import ALL, ModelMemory, PoolSpec, Reuse
from kvtide.spec.families.pool_parts import KVDType, by_head
from kvtide.tiers import Arrangement, Buffers, Layout

PAGE = 64
Row = tuple[Callable[[], object], float, float]


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    sinks: bool = False
    kv: KVDType = KVDType.BF16


QWEN3 = Shape(32, 8, 128)
QWEN3_FP8 = Shape(32, 8, 128, kv=KVDType.FP8)
QWEN3_NEXT = Shape(16, 2, 256)
GPT_OSS = Shape(64, 8, 64, window=128, sinks=True)


def step_of(
    shape: Shape, sequences: list[tuple[int, int]], alike: int = 0
) -> tuple[ForwardPass, Place]:
    """A step of sequences with so many cached and new tokens, in scattered pages.

    `alike`: the tokens of a prefix that all share.
    """
    reach = ALL if shape.window is None else shape.window - 1
    entry = by_head(shape.kv_heads, shape.dim, shape.kv.element)
    pool = PoolSpec("kv", (0,), entry, reuse=Reuse(reach))
    pages = [-(-(past + count) // PAGE) for past, count in sequences]
    memory = ModelMemory("bench", PAGE, (pool,), layers=1)
    arrangement = Arrangement(memory, {"kv": sum(pages)}, Layout.PAGE_FIRST_DIRECT)
    block = torch.empty(arrangement.bytes, dtype=torch.uint8, device="cuda")
    view = Buffers(arrangement, block).view
    for field in view("kv", 0).values():
        field.copy_(torch.randn(field.shape, device="cuda", dtype=torch.bfloat16))
    slots = torch.randperm(sum(pages), device="cuda").split(pages)
    rows, start = [], 0
    for (past, count), ours in zip(sequences, slots, strict=True):
        ours[: alike // PAGE] = slots[0][: alike // PAGE]
        rows.append(Rows(start, start + count, past, {"kv": ours}))
        start += count
    at = torch.cat([torch.arange(one.past, one.total) for one in rows]).cuda()
    step = Step(at, at, tuple(rows), PAGE, view, lambda layer: None)
    return ForwardPass(step), Place(pool, 0)


def attending(
    shape: Shape, sequences: list[tuple[int, int]], alike: int = 0, **constants: int
) -> Row:
    """`constants` replace those of the kernel modules, to try others."""
    run, place = step_of(shape, sequences, alike)
    tokens, dtype = len(run.positions), torch.bfloat16
    queries = torch.randn(tokens, shape.heads, shape.dim, device="cuda", dtype=dtype)
    new = torch.randn(2, tokens, shape.kv_heads, shape.dim, device="cuda", dtype=dtype)
    stored = run.step.view("kv", 0)["k"].dtype
    kept = {"k": new[0].to(stored), "v": new[1].to(stored)}
    sinks = torch.randn(shape.heads, device="cuda") if shape.sinks else None
    how = AttentionParams(shape.dim**-0.5, shape.window, sinks)
    timed = functools.partial(_with, constants, paged_attention, run, place, queries, kept, how)
    window = shape.window or 1 << 40
    keys = sum(min(past, window) + count for past, count in sequences)
    keys -= alike * (len(sequences) - 1)
    pairs = sum(min(at + 1, window) for past, n in sequences for at in range(past, past + n))
    moved = keys * 2 * shape.kv_heads * shape.dim * stored.itemsize
    return timed, moved, 4 * pairs * shape.heads * shape.dim


def _with(constants: dict[str, int], function: Callable[..., object], *given: object) -> object:
    modules = (attention_prefill, attention_decode, attention_tiles, prefill_schedule)
    changed = [
        (m, name, getattr(m, name)) for m in modules for name in constants if name in vars(m)
    ]
    for module, name, _ in changed:
        setattr(module, name, constants[name])
    try:
        return function(*given)
    finally:
        for module, name, usual in changed:
            setattr(module, name, usual)


def preparing(shape: Shape, tokens: int) -> Row:
    sequences = [(1000, 1)] * tokens if tokens <= 256 else [(0, tokens)]
    run, place = step_of(shape, sequences)
    wide = shape.heads + 2 * shape.kv_heads
    heads = torch.randn(tokens, wide, shape.dim, device="cuda", dtype=torch.bfloat16)
    query_norm, key_norm = (Norm(torch.randn(shape.dim, device="cuda"), 1e-6) for _ in range(2))
    how = QKVParams(shape.kv_heads, query_norm, key_norm)
    turns = Rope(torch.rand(shape.dim // 2))(run.positions)
    moved = heads.nbytes + turns.nbytes + tokens * (wide + 2 * shape.kv_heads) * shape.dim * 2
    return (lambda: qkv_write(run, place, heads, turns, how)), moved, 0


def _rows() -> list[tuple[str, Callable[[], Row]]]:
    row = functools.partial
    return [
        ("prefill 8k qwen3", row(attending, QWEN3, [(0, 8192)])),
        ("prefill 2k after 14k qwen3", row(attending, QWEN3, [(14 * 1024, 2048)])),
        ("prefill 8k after 24k qwen3", row(attending, QWEN3, [(24 * 1024, 8192)])),
        ("prefill 64 after 16k qwen3", row(attending, QWEN3, [(16 * 1024, 64)])),
        *(
            (
                f"prefill {n}x544 after 11k qwen3, 8k shared",
                row(attending, QWEN3, [(11264, 544)] * n, 8192),
            )
            for n in (1, 2, 3, 4, 8)
        ),
        ("prefill 8k gpt-oss window", row(attending, GPT_OSS, [(0, 8192)])),
        ("prefill 8k qwen3-next", row(attending, QWEN3_NEXT, [(0, 8192)])),
        ("decode 64x2k qwen3", row(attending, QWEN3, [(2048, 1)] * 64)),
        ("verify 64x4 after 2k qwen3", row(attending, QWEN3, [(2048, 4)] * 64)),
        ("decode 1x2k qwen3", row(attending, QWEN3, [(2048, 1)])),
        ("verify 1x4 after 2k qwen3", row(attending, QWEN3, [(2048, 4)])),
        ("verify 64x8 after 2k qwen3", row(attending, QWEN3, [(2048, 8)] * 64)),
        ("decode 64x4k qwen3", row(attending, QWEN3, [(4096, 1)] * 64)),
        ("decode 1x32k qwen3", row(attending, QWEN3, [(32 * 1024, 1)])),
        ("decode 1x1k qwen3", row(attending, QWEN3, [(1024, 1)])),
        ("decode 64x4k qwen3 fp8", row(attending, QWEN3_FP8, [(4096, 1)] * 64)),
        ("decode 64x1k gpt-oss window", row(attending, GPT_OSS, [(1024, 1)] * 64)),
        ("decode 32k and 63x1k qwen3", row(attending, QWEN3, [(32 * 1024, 1)] + [(1024, 1)] * 63)),
        ("decode 64x10k qwen3, 8k shared", row(attending, QWEN3, [(10240, 1)] * 64, 8192)),
        ("decode 14x12k qwen3, 8k shared", row(attending, QWEN3, [(12288, 1)] * 14, 8192)),
        ("mixed 2k and 63x4k qwen3", row(attending, QWEN3, [(0, 2048)] + [(4096, 1)] * 63)),
        (
            "prefill 8k qwen3, 128 keys",
            row(attending, QWEN3, [(0, 8192)], MAX_TILE_KEYS=128, TILE_BYTES=1 << 15, STAGES=2),
        ),
        ("prefill 8k qwen3, 64 rows", row(attending, QWEN3, [(0, 8192)], TILE_ROWS=64)),
        ("prefill 8k qwen3, 2 stages", row(attending, QWEN3, [(0, 8192)], STAGES=2)),
        ("prefill 8k qwen3, 4 stages", row(attending, QWEN3, [(0, 8192)], STAGES=4)),
        (
            "decode 64x4k qwen3, 2 CTAs per SM",
            row(attending, QWEN3, [(4096, 1)] * 64, CTAS_PER_SM=2),
        ),
        (
            "decode 64x4k qwen3, 6 CTAs per SM",
            row(attending, QWEN3, [(4096, 1)] * 64, CTAS_PER_SM=6),
        ),
        (
            "decode 1x32k qwen3, 2 CTAs per SM",
            row(attending, QWEN3, [(32 * 1024, 1)], CTAS_PER_SM=2),
        ),
        ("qkv 64 qwen3", row(preparing, QWEN3, 64)),
        ("qkv 8k qwen3", row(preparing, QWEN3, 8192)),
    ]


ROWS = _rows()
