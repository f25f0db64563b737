"""DeepSeek-V4-Flash's kernels beside attention, at its shapes: the bytes that they move."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvtide.layers import ForwardPass, Place, Rows, Step
from kvtide.layers.backend.kernel_args import CompressedStream, Norm, StreamMixing
from kvtide.layers.kernels import compressor, hyper_connections, kv_write, rope
from kvtide.layers.rope import Rope
from kvtide.spec import ModelMemory, PoolSpec, Reuse
from kvtide.spec.families.deepseek_v4 import _v4_means
from kvtide.spec.families.pool_parts import KVDType, by_head, packed, scaled
from kvtide.spec.pool import NOTHING
from kvtide.tiers import Arrangement, Buffers, Layout

HIDDEN, HEADS, DIM, ROTARY, STREAMS, PAGE, PAST = 4096, 64, 512, 64, 4, 256, 1000
DEVICE = torch.device("cuda")
Work = tuple[Callable[[], object], int, int]


def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


def step(memory: ModelMemory, tokens: int) -> ForwardPass:
    """A prefill of so many tokens; up to 64, a decode batch of as many sequences."""
    pasts = [(0, tokens)] if tokens > 64 else [(PAST + n, 1) for n in range(tokens)]
    pages = -(-(pasts[-1][0] + pasts[-1][1]) // PAGE)
    counts = {anchor.name: pages * len(pasts) for anchor in memory.anchors}
    arrangement = Arrangement(memory, counts, Layout.LAYER_FIRST)
    block = torch.zeros(arrangement.bytes, dtype=torch.uint8, device=DEVICE)
    rows, start = [], 0
    for number, (past, count) in enumerate(pasts):
        slots = torch.arange(number * pages, (number + 1) * pages, device=DEVICE)
        rows.append(Rows(start, start + count, past, dict.fromkeys(counts, slots)))
        start += count
    at = torch.cat([torch.arange(one.past, one.total) for one in rows]).to(DEVICE)
    view = Buffers(arrangement, block).view
    run = ForwardPass(Step(at, at, tuple(rows), PAGE, view, lambda layer: None))
    assert run.batch.bounds.longest == (tokens if tokens > 64 else 1)
    return run


def kept(tokens: int) -> Work:
    place = Place(PoolSpec("kv", (0,), packed(DIM, ROTARY, KVDType.FP8)), 0)
    run = step(ModelMemory("v4", PAGE, (place.pool,), 1), tokens)
    x, turns = some(tokens, DIM), some(tokens, 2, ROTARY // 2, dtype=torch.float32)
    norm = (some(DIM), 1e-6)
    moved = tokens * (DIM * 2 + 584 + DIM * 2 + ROTARY * 4)
    return lambda: rope.norm_rope_write(run, place, x, norm, turns), moved, 0


def kept_by_head(tokens: int) -> Work:
    place = Place(PoolSpec("kv", (0,), by_head(8, 128, KVDType.BF16.element)), 0)
    run = step(ModelMemory("heads", PAGE, (place.pool,), 1), tokens)
    heads = some(tokens, 48, 128)
    entries = {"k": heads[:, 32:40], "v": heads[:, 40:]}
    return lambda: kv_write.kv_write(run, place, entries), tokens * 8 * 128 * 2 * 4, 0


def compressed(tokens: int, ratio: int, width: int) -> Work:
    overlaps = ratio == 4
    entry = scaled("index_key", width, KVDType.FP8) if width == 128 else packed(
        width, ROTARY, KVDType.FP8)  # fmt: skip
    pools = (
        PoolSpec("kv", (), NOTHING),
        PoolSpec("c", (0,), entry, tokens_per_entry=ratio, follows="kv"),
        PoolSpec("swa", (0,), entry, reuse=Reuse(reach=128)),
        *_v4_means("c", (0,), width, overlaps),
    )
    memory = ModelMemory("v4", PAGE, pools, 1)
    run, channels = step(memory, tokens), width * (2 if overlaps else 1)
    own, overlap = ("c_state", "c_open") if overlaps else ("c_open", None)
    stream = CompressedStream(
        Place(memory.pool("c"), 0),
        Place(memory.pool(own), 0),
        Place(memory.pool(overlap), 0) if overlap else None,
        some(ratio, channels, dtype=torch.float32),
        Norm(some(width), 1e-6),
        Rope(torch.ones(ROTARY // 2)),
        torch.bfloat16,
    )
    values_gates = some(tokens, 2 * channels, dtype=torch.float32)
    cos_sin = some(tokens, 2, ROTARY // 2, dtype=torch.float32)
    moved = tokens * 2 * channels * 4 + tokens // ratio * 600
    moved += 0 if tokens > 64 else tokens * 2 * 3 * channels * 4
    return (
        lambda: compressor.compress(run, stream, values_gates, cos_sin),
        moved,
        0,
    )


def turned(tokens: int, dim: int, eps: float | None) -> Work:
    x, turns = some(tokens, HEADS, dim), some(tokens, 2, ROTARY // 2, dtype=torch.float32)
    moved = tokens * HEADS * 2 * 2 * (dim if eps is not None else ROTARY)
    return lambda: rope.rope(x, turns, eps), moved, 0


def mixing() -> StreamMixing:
    outputs = STREAMS * (2 + STREAMS)
    project = some(outputs, STREAMS * HIDDEN, dtype=torch.float32) * 0.01
    scales, base = some(outputs, dtype=torch.float32), some(outputs, dtype=torch.float32)
    given = StreamMixing(project, scales, base, eps=1e-6, norm_eps=1e-6, rounds=20)
    return hyper_connections.packed_mixing(given, torch.bfloat16)


def gathered(tokens: int) -> Work:
    how, x = mixing(), some(tokens, STREAMS, HIDDEN)
    norm = Norm(some(HIDDEN), 1e-6)
    moved = tokens * HIDDEN * 2 * (2 * STREAMS + 1) + how.project.nbytes
    flops = 2 * tokens * how.project.numel()
    return lambda: hyper_connections.gather_streams(how, x, norm), moved, flops


def spread(tokens: int) -> Work:
    x, given = some(tokens, STREAMS, HIDDEN), some(tokens, HIDDEN)
    weights = some(tokens, STREAMS + STREAMS**2, dtype=torch.float32)
    moved = tokens * HIDDEN * 2 * (2 * STREAMS + 1)
    return lambda: hyper_connections.spread_streams(given, x, weights), moved, 0


ROWS: list[tuple[str, Callable[[], Work]]] = [
    *((f"key norm, rope and KV write, {n} tokens", lambda n=n: kept(n)) for n in (8192, 64)),
    *((f"KV write of 8 bf16 heads, {n} tokens", lambda n=n: kept_by_head(n)) for n in (8192, 64)),
    *(
        (
            f"compressor C{ratio}, width {width}, {n} tokens",
            lambda n=n, r=ratio, w=width: compressed(n, r, w),
        )
        for ratio, width in ((4, 512), (4, 128), (128, 512))
        for n in (8192, 64)
    ),
    *((f"query norm and rope, {n} tokens", lambda n=n: turned(n, DIM, 1e-6))
      for n in (8192, 64, 1)),
    *((f"inverse rope of outputs, {n} tokens", lambda n=n: turned(n, DIM, None))
      for n in (8192, 64, 1)),
    *((f"hyper-connections gather, {n} tokens", lambda n=n: gathered(n))
      for n in (8192, 256, 64, 1)),
    *((f"hyper-connections spread, {n} tokens", lambda n=n: spread(n))
      for n in (8192, 256, 64, 1)),
]  # fmt: skip
