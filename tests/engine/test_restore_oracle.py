"""The oracle finds wrong pages, says which, and lets no request use them."""

from __future__ import annotations

import logging
import random

import pytest
import torch

from kvtide.cache import CacheConfig, Ratio, TieredCache, Tokens
from kvtide.engine import Engine, Request, RequestParams, SamplingParams
from kvtide.engine.restore_oracle import (
    MAX_CHECKS,
    RestoreBounds,
    RestoreOracle,
    bounds_of,
    deviation,
)
from kvtide.models import Model
from kvtide.spec import Tier
from kvtide.spec.families import KVDType
from kvtide.spec.residency import Residency
from tests.engine.flipped_bits import KINDS, check_flips_are_found, host_slot
from tests.grids import everything
from tests.models.tiny import VOCABULARY, ours

PAGE = 16
FAMILIES = ("llama", "gemma3", "gpt_oss", "falcon_h1")
HOT = ("deepseek_v32 hot:24", "glm_moe_dsa-shared hot:64", "deepseek_v4 hot:7")
SHOWN = SamplingParams(logprobs=2)


def model_of(family: str, *, deterministic: bool = True) -> Model:
    """With a residency behind its name, as in `restoring`."""
    name, _, resident = family.partition(" ")
    residency = Residency.parse(resident or "all")
    return ours(name, page_tokens=PAGE, deterministic=deterministic, resident=residency)


def engine_with_oracle(
    model: Model, fraction: float = 1.0, bounds: RestoreBounds | None = None
) -> Engine:
    config = CacheConfig(Tokens(1024), host_size=Ratio(4), tokens_per_checkpoint=64)
    cache = TieredCache(model.memory, config)
    return Engine(model, cache, chunk_tokens=64, oracle=RestoreOracle(cache, fraction, bounds))


def serve(engine: Engine, *asks: RequestParams) -> list[Request]:
    requests = [engine.submit(ask) for ask in asks]
    seen = set()
    while not engine.idle:
        seen |= {update.request for update in engine.step()}
        assert engine.cache.validate() == []
    assert seen == set(requests), "no listener hears of checks"
    assert engine.cache.drain(10)
    return requests


def text(seed: int, count: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1, VOCABULARY) for _ in range(count))


def spoil_host(cache: TieredCache, pool: str, layer: int, page: int, prompt: object) -> None:
    """Flip one bit of one number of a page on the host, which must be on the host alone."""
    slot = host_slot(cache, pool, page, prompt)
    rows = cache.hardware.host.rows(pool, layer)
    rows[slot, 2] ^= 0x40


@pytest.mark.quick(family=[*FAMILIES, "deepseek_v32 hot:24"])
@pytest.mark.parametrize("family", [*FAMILIES, *HOT])
def test_restores_that_are_right_are_found_alike(family: str) -> None:
    engine = engine_with_oracle(model_of(family))
    tokens = text(1, 5 * PAGE + 3)
    serve(engine, RequestParams(tokens, 3))
    serve(engine, RequestParams(tokens + text(2, 20), 3))
    engine.cache.flush(Tier.DEVICE)
    serve(engine, RequestParams(tokens + text(3, 20), 3), RequestParams(tokens + text(4, 20), 3))
    assert engine.oracle is not None
    assert (engine.oracle.counts.alike, engine.oracle.counts.diverged) == (3, 0)
    engine.cache.close()


@pytest.mark.parametrize(
    ("family", "pool"),
    [
        ("llama", "kv"),
        ("gemma3", "kv"),
        ("gemma3", "swa"),
        ("falcon_h1", "state"),
        pytest.param("deepseek_v32 hot:24", "kv", marks=pytest.mark.full),
        pytest.param("deepseek_v32 hot:24", "index", marks=pytest.mark.full),
        pytest.param("glm_moe_dsa-shared hot:64", "kv", marks=pytest.mark.full),
        pytest.param("deepseek_v4 hot:7", "c4", marks=pytest.mark.full),
    ],
)
def test_one_flipped_bit_on_the_host_is_found_named_and_quarantined(
    family: str, pool: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(family)
    engine = engine_with_oracle(model)
    tokens = text(5, 6 * PAGE + 3)
    (first,) = serve(engine, RequestParams(tokens, 4, SHOWN))
    layer = model.memory.pool(pool).layers[-1]
    engine.cache.flush(Tier.DEVICE)
    spoil_host(engine.cache, pool, layer, 5, engine.cache.prompt(tokens))
    with caplog.at_level(logging.ERROR, logger="kvtide"):
        (wrong,) = serve(engine, RequestParams(tokens, 40, SHOWN))
    assert wrong.by_tier == {Tier.HOST: 6 * PAGE}
    assert engine.oracle is not None and engine.oracle.counts.diverged == 1
    (line,) = caplog.messages
    assert f"pool {pool} differs in 1 of" in line and f"first in page 5 of layer {layer}" in line
    others = {p.name for p in model.memory.pools} - {pool}
    assert not any(f"pool {other} differs" in line for other in others)
    assert wrong.admissions == 2, "it ran on pages that were wrong, and began anew"

    (again,) = serve(engine, RequestParams(tokens, 4, SHOWN))
    assert again.output == first.output
    (restored,) = serve(engine, RequestParams(tokens, 4, SHOWN))
    assert restored.output == first.output and restored.by_tier == {Tier.DEVICE: 6 * PAGE}
    assert engine.oracle.counts.diverged == 1
    engine.cache.close()


@pytest.mark.quick(
    family=["llama", "gemma3", "falcon_h1", "deepseek_v4"], pool=["kv", "swa", "state", "c4"]
)
@pytest.mark.parametrize(("family", "pool", "kv_dtype"), KINDS)
def test_in_half_precision_one_flipped_bit_in_any_field_is_found_and_named(
    family: str, pool: str, kv_dtype: KVDType, caplog: pytest.LogCaptureFixture
) -> None:
    model = ours(family, page_tokens=PAGE, kv_dtype=kv_dtype, dtype=torch.bfloat16)
    engine = engine_with_oracle(model, bounds=bounds_of(model.memory, torch.bfloat16))
    check_flips_are_found(engine, pool, caplog, pairs=everything())
    engine.cache.close()


def test_one_wrong_page_is_quarantined_once_however_many_went_on_from_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_with_oracle(model_of("llama"))
    tokens = text(10, 4 * PAGE + 3)
    serve(engine, RequestParams(tokens, 2))
    engine.cache.flush(Tier.DEVICE)
    spoil_host(engine.cache, "kv", 1, 2, engine.cache.prompt(tokens))
    asks = [RequestParams(tokens + text(20 + number, 5), 12) for number in range(MAX_CHECKS)]
    with caplog.at_level(logging.ERROR, logger="kvtide"):
        requests = serve(engine, *asks)
    assert engine.oracle is not None and engine.oracle.counts.diverged == MAX_CHECKS
    assert len(caplog.messages) == 1 and "pool kv differs in 1 of" in caplog.messages[0]
    assert [request.admissions for request in requests] == [2] * MAX_CHECKS
    engine.cache.close()


def test_what_no_token_is_likely_after_can_be_compared() -> None:
    model = model_of("llama")
    engine = engine_with_oracle(model, bounds=bounds_of(model.memory, torch.float32))
    assert engine.oracle is not None
    flat = torch.zeros(500)
    assert engine.oracle._off(flat, flat) is None
    assert engine.oracle._off(flat, flat.index_fill(0, torch.tensor([7]), 1.0)) is not None
    engine.cache.close()


def test_noise_all_over_a_row_is_no_outlier_and_one_element_off_is_one() -> None:
    generator = torch.Generator().manual_seed(1)
    computed = torch.randn(3, PAGE, 2, 24, generator=generator)
    noisy = computed + 0.02 * torch.randn(computed.shape, generator=generator)
    noisy[1, 5] = computed[1, 5] + 0.3 * torch.randn(2, 24, generator=generator)  # Other experts.
    bounds = bounds_of(model_of("llama").memory, torch.bfloat16)
    off = deviation(noisy, computed, bounds.eps)
    assert (off.outlier < bounds.outlier).all() and float(off.drift[0]) < 0.05
    noisy[2, 7, 1, 3] = computed[2, 7, 1, 3] + 2.0
    off = deviation(noisy, computed, bounds.eps)
    assert (off.outlier > bounds.outlier).tolist() == [False, False, True]
    for wrong in (float("nan"), float("inf"), 3e38):
        noisy[0, 0, 0, 0] = wrong
        off = deviation(noisy, computed, bounds.eps)
        assert not off.outlier[0] <= bounds.outlier
    assert float(deviation(computed.roll(1, 1), computed, bounds.eps).drift.min()) > bounds.drift


def test_what_is_not_a_number_on_both_sides_is_alike() -> None:
    values = torch.full((1, 1, 32), float("nan")).index_fill(2, torch.tensor([3]), -float("inf"))
    assert [float(number) for number in deviation(values, values.clone(), 2.0**-7)] == [0.0, 0.0]


def test_other_prompts_keep_their_pages_when_one_is_quarantined() -> None:
    engine = engine_with_oracle(model_of("llama"))
    bad, good = text(6, 4 * PAGE + 1), text(7, 4 * PAGE + 1)
    serve(engine, RequestParams(bad, 2), RequestParams(good, 2))
    engine.cache.flush(Tier.DEVICE)
    spoil_host(engine.cache, "kv", 0, 0, engine.cache.prompt(bad))
    serve(engine, RequestParams(bad, 2))
    (kept,) = serve(engine, RequestParams(good, 2))
    assert kept.by_tier == {Tier.HOST: 4 * PAGE}
    assert engine.oracle is not None and engine.oracle.counts.diverged == 1
    engine.cache.close()


def test_without_deterministic_arithmetic_alike_means_close() -> None:
    model = model_of("llama", deterministic=False)
    engine = engine_with_oracle(model, bounds=bounds_of(model.memory, torch.float32))
    tokens = text(8, 6 * PAGE + 3)
    serve(engine, RequestParams(tokens, 2))
    serve(engine, RequestParams(tokens, 2))
    assert engine.oracle is not None and engine.oracle.counts.alike == 1
    engine.cache.flush(Tier.DEVICE)
    rows = engine.cache.hardware.host.rows("kv", 0)
    rows.view(torch.float32).mul_(-3.0)
    serve(engine, RequestParams(tokens, 2))
    assert engine.oracle.counts.diverged == 1
    engine.cache.close()


def test_only_a_fraction_is_checked_and_never_more_than_a_few_at_once() -> None:
    engine = engine_with_oracle(model_of("llama"), fraction=0.5)
    tokens = text(9, 3 * PAGE + 1)
    serve(engine, RequestParams(tokens, 1))
    for number in range(40):
        serve(engine, RequestParams(tokens + text(100 + number, 3), 1))
    assert engine.oracle is not None
    assert 10 < engine.oracle.counts.alike < 30
    engine.cache.close()

    busy = engine_with_oracle(model_of("llama"))
    serve(busy, RequestParams(tokens, 1))
    serve(busy, *(RequestParams(tokens + text(number, 3), 1) for number in range(3 * MAX_CHECKS)))
    assert busy.oracle is not None
    counts = busy.oracle.counts
    assert counts.skipped and counts.alike + counts.skipped == 3 * MAX_CHECKS
    busy.cache.close()
