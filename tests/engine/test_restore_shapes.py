"""Pages in other shapes than the conversations of `restoring` have, from the host and from storage.

Entries in eight bits with their scales; DeepSeek-V4 with the blocks and pages it is published with,
and with its layer for multi-token prediction.
"""

from __future__ import annotations

import random
from itertools import count

import pytest

from kvtide.cache import CacheConfig, FetchPatience, Ratio, TieredCache, Tokens
from kvtide.engine import Engine, Request, RequestParams
from kvtide.models import Model
from kvtide.spec import Tier
from kvtide.spec.families import KVDType
from kvtide.storage import open_store
from tests.engine.restoring import SAMPLING, text
from tests.models.test_deepseek_v4 import REAL
from tests.models.tiny import ours

PATIENT = FetchPatience("wait_complete", min_tokens=1)
_NUMBERS = count()


def _engine(model: Model, url: str) -> Engine:
    page = model.memory.page_tokens
    config = CacheConfig(
        Tokens(16 * page),
        Ratio(4),
        tokens_per_checkpoint=page,
        patience=PATIENT,
        fingerprint=b"p" * 32,
    )
    cache = TieredCache(model.memory, config)
    cache.storage.attach(open_store(url, cache.storage.space))
    return Engine(model, cache, chunk_tokens=40)


def _served(engine: Engine, tokens: tuple[int, ...], answer: int) -> Request:
    request = engine.submit(RequestParams(tokens, answer, SAMPLING))
    while not engine.idle:
        engine.step()
    assert engine.cache.drain(10.0) and engine.cache.validate() == []
    return request


def check_restored(model: Model, pages: int, answer: int = 6) -> None:
    """A prompt of so many pages and a bit: computed, loaded, and fetched by another engine."""
    url = f"memory:shapes-{next(_NUMBERS)}"
    page = model.memory.page_tokens
    tokens = text(random.Random(3), pages * page + 3)
    engine = _engine(model, url)
    computed = _served(engine, tokens, answer)
    engine.cache.flush(Tier.DEVICE)
    loaded = _served(engine, tokens, answer)
    assert engine.cache.close()
    engine = _engine(model, url)
    fetched = _served(engine, tokens, answer)
    assert engine.cache.close()
    assert computed.by_tier == {}
    assert loaded.by_tier == {Tier.HOST: pages * page}
    assert fetched.by_tier == {Tier.STORAGE: pages * page}
    assert computed.output == loaded.output == fetched.output


@pytest.mark.quick(family=["glm_moe_dsa-shared"])
@pytest.mark.parametrize(
    "family", ["deepseek_v4", "deepseek_v3", "deepseek_v32", "glm_moe_dsa-shared", "kimi_linear"]
)
def test_packed_pages_are_restored_bit_for_bit(family: str) -> None:
    model = ours(family, deterministic=True, kv_dtype=KVDType.FP8)
    packed = [field.dtype.label for pool in model.memory.pools for field in pool.entry.fields]
    assert "fp8_e4m3" in packed
    check_restored(model, pages=5)


@pytest.mark.quick(kv_dtype=[KVDType.FP8], page_tokens=[128])
@pytest.mark.parametrize("kv_dtype", [KVDType.FP32, KVDType.FP8], ids=lambda kind: kind.value)
@pytest.mark.parametrize("page_tokens", [128, 256])
def test_published_blocks_are_restored_bit_for_bit(page_tokens: int, kv_dtype: KVDType) -> None:
    model = ours(REAL, deterministic=True, page_tokens=page_tokens, kv_dtype=kv_dtype)
    check_restored(model, pages=2)
