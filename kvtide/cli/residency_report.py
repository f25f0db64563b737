"""What a residency changes, for `kvtide memory`: where bytes live, and what runs per GB.

`served` is the memory as it is served (`spec/residency.py`), `resident` the same one with all pools
on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvtide.byte_sizes import format_bytes
from kvtide.cli.console import table
from kvtide.spec import ModelMemory, PoolSpec, Tier
from kvtide.spec.residency import HotShape, Residency, hot_bytes, hot_queries
from kvtide.spec.sizing import largest_batch, longest_context

_DEVICE_GB = (1, 4, 16, 64)
_BATCH_TOKENS = (32 * 1024, 128 * 1024)


def lives_on(pool: PoolSpec) -> str:
    """Where a pool's pages are while requests run, for the table of pools."""
    return "device" if pool.hot is None else f"host; {pool.hot:,} entries hot"


def bytes_per_token(served: ModelMemory) -> dict[Tier, float]:
    """Bytes of history that a running request has in its home tiers, without copies elsewhere."""
    on_device = served.in_device_pages.history_bytes_per_token()
    return {
        Tier.DEVICE: on_device,
        Tier.HOST: served.history_bytes_per_token() - on_device,
    }


def request_bytes(served: ModelMemory) -> int:
    """Device bytes of a request beside its pages: hot buffers, and a ring for new entries."""
    return hot_bytes(served, rows=1, longest=0)


def summary(resident: ModelMemory, served: ModelMemory, residency: Residency) -> list[str]:
    """Sentences, then the table of what runs in so much device memory."""
    per_token = bytes_per_token(served)
    lines = [
        f"A running request grows by {per_token[Tier.DEVICE]:,.1f} B per token on the device and "
        f"{per_token[Tier.HOST]:,.1f} B on the host",
        f"Its hot buffers take {format_bytes(request_bytes(served))} on the device",
        f"They hold what {min(map(hot_queries, served.hot_pools))} tokens of a step select: the "
        "next one, and drafts",
    ]
    for pool in served.hot_pools:
        once = _bytes_per_longest_token(pool, served.page_tokens, rows=0)
        each = _bytes_per_longest_token(pool, served.page_tokens, rows=1) - once
        lines.append(
            f"Prefill gathers {pool.name} one layer at a time: per token of the longest context "
            f"{once:,.1f} B on the device once, and {each:,.1f} B for each request"
        )
    return [*lines, "", *_comparison(resident, served, residency)]


def _bytes_per_longest_token(pool: PoolSpec, page_tokens: int, rows: int) -> float:
    """What a pool's gather region takes, and what plans of so many requests need beside it."""
    shapes = (HotShape.of(pool, page_tokens, rows, longest) for longest in (1, 0))
    with_it, without = (shape.bytes for shape in shapes)
    return (with_it - without) / page_tokens


def describe(resident: ModelMemory, served: ModelMemory, residency: Residency) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "resident": str(residency),
        "home_bytes_per_token": {
            tier.name.lower(): size for tier, size in bytes_per_token(served).items()
        },
        "hot_bytes_per_request": request_bytes(served),
        "runs": {
            "all": [_describe_run(resident, size) for size in _DEVICE_GB],
            str(residency): [_describe_run(served, size) for size in _DEVICE_GB],
        },
    }


def _comparison(resident: ModelMemory, served: ModelMemory, residency: Residency) -> Iterator[str]:
    memories = (resident, served)
    rows = [
        [
            f"{size} GB",
            *(_number(longest_context(memory, size * 10**9)) for memory in memories),
            *(
                _number(largest_batch(memory, tokens, size * 10**9))
                for tokens in _BATCH_TOKENS
                for memory in memories
            ),
        ]
        for size in _DEVICE_GB
    ]
    columns = ("longest context", *(f"batch at {tokens // 1024}k" for tokens in _BATCH_TOKENS))
    beside = (f"{what}, {how}" for what in columns for how in ("all", residency))
    yield "What runs by device memory for the cache, if the host holds the rest:"
    yield ""
    yield table(("device", *beside), rows)


def _describe_run(memory: ModelMemory, device_gb: int) -> dict[str, Any]:
    size = device_gb * 10**9
    return {
        "device_bytes": size,
        "longest_context": longest_context(memory, size),
        "largest_batch": {str(n): largest_batch(memory, n, size) for n in _BATCH_TOKENS},
    }


def _number(count: int | None) -> str:
    return "any" if count is None else f"{count:,}"
