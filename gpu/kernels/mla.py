"""Attention over one vector per token (MLA, DeepSeek-V4), and indexers, at published shapes.

ROWS: (name, setup), where setup() gives the call to time, the bytes it must move and its FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvtide.layers.backend.kernel_args import AttentionParams
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels.attention import indexer
from kvtide.layers.kernels.attention.indexer import select_entries
from kvtide.layers.kernels.attention.mla import block_attention, mla_attention
from kvtide.layers.step import Batch, Rows, Step
from kvtide.spec import Field, ModelMemory, PoolSpec, Reuse
from kvtide.spec.families.pool_parts import KVDType, packed, scaled
from kvtide.tiers import Arrangement, Buffers, Layout

Timed = tuple[Callable[[], object], int, int]

PAGE = 256
DEVICE = torch.device("cuda")


def _run(memory: ModelMemory, past: int, count: int, sequences: int) -> ForwardPass:
    """A step of sequences with so many cached and new tokens, over pools of random numbers."""
    pages = -(-(past + count) // PAGE)
    slots = {anchor.name: sequences * pages for anchor in memory.anchors}
    arrangement = Arrangement(memory, slots, Layout.PAGE_FIRST_DIRECT)
    block = torch.zeros(arrangement.bytes, dtype=torch.uint8, device=DEVICE)
    buffers = Buffers(arrangement, block)
    for pool in memory.pools:
        for field in buffers.view(pool.name, 0).values():
            _fill(field)
    order = torch.randperm(sequences * pages, device=DEVICE).split(pages)
    rows = tuple(
        Rows(i * count, (i + 1) * count, past, dict.fromkeys(slots, order[i]))
        for i in range(sequences)
    )
    at = torch.arange(past, past + count, device=DEVICE).repeat(sequences)
    batch = Batch.of(rows, DEVICE)
    return ForwardPass(Step(at, at, rows, PAGE, buffers.view, lambda _: None, batch))


def _fill(field: Tensor) -> None:
    if field.dtype == torch.float8_e8m0fnu:
        field.view(torch.uint8).fill_(127)
    elif field.dtype == torch.float8_e4m3fn:
        # Magnitudes up to 2, both signs, no NaN.
        field.view(torch.uint8).random_(0, 0x40).add_(
            torch.randint_like(field.view(torch.uint8), 2) * 0x80
        )
    elif field.dtype.is_floating_point:
        field.normal_()


def _some(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


# -- latents -----------------------------------------------------------------------------------


def _latent(heads: int, past: int, count: int, sequences: int) -> Timed:
    rope = Field("rope", (64,), KVDType.BF16.element)
    pool = PoolSpec("kv", (0,), scaled("latent", 512, KVDType.BF16, rope))
    run = _run(ModelMemory("bench", PAGE, (pool,), layers=1), past, count, sequences)
    queries, how, place = (
        _some(sequences * count, heads, 576),
        AttentionParams(576**-0.5),
        Place(pool, 0),
    )
    pairs = sequences * sum(range(past + 1, past + count + 1))
    moved = sequences * (past + count) * 1152 + queries.numel() * 2 * 1088 // 576
    return lambda: mla_attention(run, place, queries, how), moved, pairs * heads * (576 + 512) * 2


# -- a window and compressed entries -----------------------------------------------------------


def _blocks(
    kv: KVDType, past: int, count: int, sequences: int, ratio: int = 4, selected: int | None = 512
) -> Timed:
    entry = packed(512, 64, kv)
    window = PoolSpec("swa", (0,), entry, reuse=Reuse(127))
    entries = PoolSpec("blocks", (0,), entry, tokens_per_entry=ratio)
    run = _run(ModelMemory("bench", PAGE, (window, entries), layers=1), past, count, sequences)
    tokens = sequences * count
    how = AttentionParams(512**-0.5, 128, torch.zeros(64, device=DEVICE))
    queries, kept = _some(tokens, 64, 512), _some(tokens, 512)
    seen = (past + count) // ratio
    picked = None
    if selected is not None:
        visible = (run.positions + 1) // ratio
        positions = torch.rand(tokens, selected, device=DEVICE) * visible[:, None]
        picked, seen = positions.int(), selected
    places = Place(window, 0), Place(entries, 0)
    keys = seen + 128
    moved = tokens * keys * entry.bytes + queries.numel() * 2 * 2
    return (
        lambda: block_attention(run, places[0], kept, places[1], queries, how, picked),
        moved,
        tokens * keys * 64 * 512 * 4,
    )


# -- indexers ----------------------------------------------------------------------------------


def _indexer(
    past: int, count: int, sequences: int, kv: KVDType = KVDType.BF16, part: str = "whole"
) -> Timed:
    """`part`: all of it, the scores alone, or the top-k alone, by our kernel or by torch."""
    pool = PoolSpec("index", (0,), scaled("index_key", 128, kv), tokens_per_entry=4)
    run = _run(ModelMemory("bench", PAGE, (pool,), layers=1), past, count, sequences)
    tokens, place, max_entries = sequences * count, Place(pool, 0), (past + count) // 4
    queries, weights = _some(tokens, 64, 128), _some(tokens, 64)
    scores = torch.randn(tokens, max_entries, device=DEVICE)
    found = torch.empty(tokens, 512, dtype=torch.int32, device=DEVICE)
    pairs = sequences * sum(p // 4 for p in range(past + 1, past + count + 1))
    read = sequences * max_entries * pool.entry.bytes
    work: dict[str, Callable[[], object]] = {
        "whole": lambda: select_entries(run, place, queries, weights, 512),
        "scores": lambda: indexer.score_entries(run, place, queries, weights, scores, 0),
        "top-k": lambda: indexer._select(run, scores, found, 4, max_entries, 0),
        "torch.topk": lambda: scores.topk(512, sorted=False),
    }
    scored = part in ("whole", "scores")
    moved = (read if scored else 0) + pairs * 4
    return work[part], moved, pairs * 64 * 128 * 2 if scored else 0


K = 1024
ROWS: list[tuple[str, Callable[[], Timed]]] = [
    ("MLA decode, 64 x 4k, 16 heads", lambda: _latent(16, 4 * K - 1, 1, 64)),
    ("MLA decode, 64 x 4k, 128 heads", lambda: _latent(128, 4 * K - 1, 1, 64)),
    ("MLA decode, 1 x 32k, 16 heads", lambda: _latent(16, 32 * K - 1, 1, 1)),
    ("MLA prefill, 4k, 16 heads", lambda: _latent(16, 0, 4 * K, 1)),
    ("C4 decode, 64 x 128k, bf16", lambda: _blocks(KVDType.BF16, 128 * K - 1, 1, 64)),
    ("C4 decode, 64 x 128k, joined", lambda: _blocks(KVDType.FP8, 128 * K - 1, 1, 64)),
    ("C4 verify, 64 x 4 at 64k, joined", lambda: _blocks(KVDType.FP8, 63 * K, 4, 64)),
    ("C4 decode, 1 x 128k, bf16", lambda: _blocks(KVDType.BF16, 128 * K - 1, 1, 1)),
    ("C4 decode, 1 x 128k, joined", lambda: _blocks(KVDType.FP8, 128 * K - 1, 1, 1)),
    ("C128 decode, 64 x 128k, bf16", lambda: _blocks(KVDType.BF16, 128 * K - 1, 1, 64, 128, None)),
    ("C128 decode, 64 x 128k, joined", lambda: _blocks(KVDType.FP8, 128 * K - 1, 1, 64, 128, None)),
    ("C4 prefill, 4k after 60k, bf16", lambda: _blocks(KVDType.BF16, 60 * K, 4 * K, 1)),
    ("C4 prefill, 4k after 60k, joined", lambda: _blocks(KVDType.FP8, 60 * K, 4 * K, 1)),
    ("indexer decode, 64 x 32k entries", lambda: _indexer(128 * K - 1, 1, 64)),
    ("  scores", lambda: _indexer(128 * K - 1, 1, 64, part="scores")),
    ("  scores, fp8", lambda: _indexer(128 * K - 1, 1, 64, KVDType.FP8, "scores")),
    (
        "  scores, 64 x 4 at 64k, fp8",
        lambda: _indexer(63 * K, 4, 64, KVDType.FP8, "scores"),
    ),
    ("  top-k", lambda: _indexer(128 * K - 1, 1, 64, part="top-k")),
    ("  top-k, 1 x 32k", lambda: _indexer(128 * K - 1, 1, 1, part="top-k")),
    ("  torch.topk", lambda: _indexer(128 * K - 1, 1, 64, part="torch.topk")),
    ("indexer decode, 1 x 32k entries", lambda: _indexer(128 * K - 1, 1, 1)),
    ("indexer prefill, 2k x 16k entries", lambda: _indexer(62 * K, 2 * K, 1)),
    ("  scores ", lambda: _indexer(62 * K, 2 * K, 1, part="scores")),
    ("  scores, fp8 ", lambda: _indexer(62 * K, 2 * K, 1, KVDType.FP8, "scores")),
    ("  top-k ", lambda: _indexer(62 * K, 2 * K, 1, part="top-k")),
    ("  torch.topk ", lambda: _indexer(62 * K, 2 * K, 1, part="torch.topk")),
]
