"""One flipped bit on the host, in every field of every kind of pool, for the oracle to find."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kvtide.cache import TieredCache
from kvtide.engine import Engine, RequestParams
from kvtide.spec import ALL, Encoding, Tier
from kvtide.spec.families import KVDType
from tests.grids import cover
from tests.models.tiny import VOCABULARY

PAGES = 4

KINDS = (
    ("llama", "kv", KVDType.BF16),  # Keys and values.
    ("deepseek_v3", "kv", KVDType.BF16),  # MLA latents.
    ("deepseek_v32", "index", KVDType.BF16),  # DSA index keys.
    ("gemma3", "swa", KVDType.BF16),  # A sliding window.
    ("falcon_h1", "state", KVDType.BF16),  # Mamba's state and its convolutions' tails.
    ("qwen3_next", "state", KVDType.BF16),  # Gated delta.
    ("kimi_linear", "state", KVDType.BF16),  # KDA.
    ("lfm2", "state", KVDType.BF16),  # A convolution's tail alone.
    ("deepseek_v4", "c4", KVDType.BF16),
    ("deepseek_v4", "c4_index", KVDType.BF16),
    ("deepseek_v4", "c16", KVDType.BF16),  # C128, in blocks of 16.
    ("deepseek_v4", "swa", KVDType.BF16),
    ("deepseek_v4", "c4_state", KVDType.BF16),  # The compressors' states.
    ("deepseek_v4", "c4_index_state", KVDType.BF16),
    ("deepseek_v3", "kv", KVDType.FP8),  # Packed, with fp32 scales.
    ("deepseek_v4", "c4", KVDType.FP8),  # Packed, with powers of two.
    ("deepseek_v4", "swa", KVDType.FP8),
)
"""Family, pool and what it is stored in: each kind of pool that a model keeps."""

BITS = {
    torch.bfloat16: (15, 14, 7),
    torch.float32: (31, 30, 23),
    torch.float8_e4m3fn: (7, 6),
    torch.float8_e8m0fnu: (7, 1),
}
"""The sign, the highest and the lowest bit of the exponent. In eight bits a value's lowest one is
of the size of a rounding step, and its scale has no sign."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def text(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, VOCABULARY) for _ in range(count))


def host_slot(cache: TieredCache, pool: str, page: int, prompt: object) -> int:
    """Where the host has a page of a prompt."""
    anchor = cache.memory.pool(pool).follows or pool
    number = [one.name for one in cache.memory.anchors].index(anchor)
    cell = cache.index.tree.cell(Tier.HOST, number)
    hit = cache.index.match(prompt)  # type: ignore[arg-type]
    node = next(node for node in hit.nodes if node.depth <= page < node.end)
    return int(node.resident_slots(cell)[page - node.depth])


def flip(field: Tensor, bit: int, rng: random.Random) -> None:
    """One bit of an element that is not smaller than most, in place."""
    size = field.float().abs().nan_to_num(0.0, 0.0, 0.0)
    large = (size >= size.square().mean().sqrt()).nonzero().tolist()
    at = tuple(rng.choice(large))
    bits = field.view(INTEGERS[field.dtype.itemsize])
    bits[at] ^= torch.tensor(1 << bit).to(bits.dtype)  # The highest bit wraps to the sign.


def flips(cache: TieredCache, pool: str) -> Iterator[tuple[str, int]]:
    """Every field of a pool that layers read, with every bit that is flipped in it."""
    spec = cache.memory.pool(pool)
    joined = spec.entry.encoding is Encoding.JOINED  # With a part in eight bits.
    for name, field in cache.hardware.host.view(pool, spec.layers[-1]).items():
        for bit in BITS[field.dtype] if name != "pad" else ():
            if not (joined and (field.dtype, bit) == (torch.bfloat16, 7)):
                yield name, bit


def check_flips_are_found(
    engine: Engine, pool: str, caplog: pytest.LogCaptureFixture, *, pairs: bool = True
) -> None:
    """Serve a prompt, flip a bit of it on the host, resume from it: for every field with every
    bit, or with `pairs` off for every field and every bit.

    What follows the prefix is longer than windows are: a check has passed the boundary by then.
    """
    cache, rng = engine.cache, random.Random(pool)
    page_tokens, spec = cache.memory.page_tokens, cache.memory.pool(pool)
    tokens = text(rng, PAGES * page_tokens + 3)
    page = 1 if spec.reuse.reach is ALL else PAGES - 1
    assert engine.oracle is not None
    counts = engine.oracle.counts

    def served(*tail: int) -> int:
        request = engine.submit(RequestParams(tokens + tail, 1))
        while not engine.idle:
            engine.step()
        assert cache.drain(10) and cache.validate() == []
        return sum(request.by_tier.values())

    tried = list(flips(cache, pool))
    if not pairs:
        kept = cover([{"field": name, "bit": bit} for name, bit in tried], 1, {})
        tried = [one for number, one in enumerate(tried) if number in kept]
    for number, (name, bit) in enumerate(tried):
        assert served() == 0
        cache.flush(Tier.DEVICE)
        assert served(*text(rng, 2 * page_tokens)) == PAGES * page_tokens
        assert (counts.alike, counts.diverged) == (number + 1, number), caplog.messages
        cache.flush(Tier.DEVICE)
        layer = rng.choice(spec.layers)
        slot = host_slot(cache, pool, page, cache.prompt(tokens))
        flip(cache.hardware.host.view(pool, layer)[name][slot], bit, rng)
        caplog.clear()
        with caplog.at_level(logging.ERROR, logger="kvtide"):
            assert served(*text(rng, 2 * page_tokens)) == PAGES * page_tokens
        assert counts.diverged == number + 1, (name, bit)
        (line,) = caplog.messages
        assert f"pool {pool} differs in 1 of" in line, line
        assert f"first in page {page} of layer {layer}" in line and line.count("differs") == 1, line
    assert counts.diverged >= 2 and counts.logits_only == 0
