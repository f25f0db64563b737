"""Hot residency on a GPU: plan and swap-in inside CUDA graphs, pages in pinned host memory.

Attention reads the same bytes in the same order wherever they lie, so answers of one request at a
time are equal to those with all pages resident, to the last bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvtide.cache import CacheConfig, Layout, TieredCache, Tokens
from kvtide.engine import Engine, Request, RequestParams
from kvtide.engine.restore_oracle import RestoreOracle, bounds_of
from kvtide.engine.speculation.ngram import NgramDrafter
from kvtide.models import Model
from kvtide.models.checkpoint import OnDevice
from kvtide.spec import Tier
from kvtide.spec.families import KVDType
from kvtide.spec.residency import ALL_RESIDENT, Residency
from kvtide.storage import open_store
from tests.engine.restoring import PAGE, text
from tests.engine.test_on_device import CLOSE, answered, compared, one_by_one, settled
from tests.models.tiny import build, checkpoint

NAMES = ("deepseek_v32", "glm_moe_dsa-shared", "deepseek_v4")
TOP_K = {"deepseek_v32": 24, "glm_moe_dsa-shared": 24, "deepseek_v4": 6}
ANSWER = 40
KINDS = pytest.mark.parametrize("kv", [KVDType.BF16, KVDType.FP8], ids=["bf16", "fp8"])
"""Of packing."""


@pytest.fixture(autouse=True)
def on_a_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("pinned memory and CUDA graphs need a GPU: --device cuda")


def model_of(
    name: str,
    device: torch.device,
    resident: Residency,
    kv: KVDType | None,
    drafts: int = 0,
    positions: int = 4096,
) -> Model:
    saved, dtype = checkpoint(name), torch.bfloat16
    with device:
        weights = OnDevice(saved.weights, device)
        return build(
            {**saved.config, "max_position_embeddings": positions},
            weights,
            page_tokens=PAGE,
            kv_dtype=kv,
            dtype=dtype,
            resident=resident,
            draft_tokens=drafts,
        )


@contextmanager
def engine_of(
    model: Model,
    device_tokens: int = 4096,
    host_tokens: int = 16_384,
    host_layout: Layout = Layout.PAGE_FIRST_DIRECT,
    **options: object,
) -> Iterator[Engine]:
    config = CacheConfig(
        Tokens(device_tokens),
        host_size=Tokens(host_tokens),
        device="cuda",
        hot_rows=8,
        host_layout=host_layout,
        tokens_per_checkpoint=64,
    )
    cache = TieredCache(model.memory, config)
    oracle = options.pop("oracle", None)
    if oracle is not None:
        oracle = RestoreOracle(cache, 1.0, bounds_of(model.memory, torch.bfloat16))
    try:
        yield Engine(model, cache, chunk_tokens=256, max_running=8, oracle=oracle, **options)
    finally:
        cache.close()


@KINDS
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_resident_pages(name: str, kv: KVDType, device: torch.device) -> None:
    rng = random.Random(name)
    # Chunks end where a prefix does, which shows in the last bits: nothing is found here.
    prompts = [text(rng, length) for length in (5, 90, 300, 700)]
    asks = [RequestParams(prompt, ANSWER, recompute=True) for prompt in prompts]
    with engine_of(model_of(name, device, ALL_RESIDENT, kv)) as engine:
        engine.warm_up()
        plain = one_by_one(engine, asks)
    for entries in (TOP_K[name], TOP_K[name] + 1, 4 * TOP_K[name], 1024):
        with engine_of(model_of(name, device, Residency(entries), kv)) as engine:
            engine.warm_up()
            hot = one_by_one(engine, asks)
            assert engine.cache.validate() == []
            assert engine.steps_by_kind["decode_graph"] > len(asks)
            counts = [each.counts.sum(0).tolist() for each in engine.cache.hardware.hot.values()]
        differing = [
            (len(a.params.tokens), i)
            for a, b in zip(plain, hot, strict=True)
            for i, (x, y) in enumerate(zip(a.output, b.output, strict=True))
            if x != y
        ]
        divergence, equal, _ = compared(plain, hot)
        print(f"{name} hot:{entries} hits and misses {counts}, KL {divergence:.1e}, {equal:.2%}")
        assert not differing, (entries, differing[:4], divergence)


@pytest.mark.parametrize("name", NAMES)
def test_a_long_answer_in_a_long_context_is_equal_throughout(
    name: str, device: torch.device
) -> None:
    ask = RequestParams(text(random.Random(name), 32_768), 4096, recompute=True)
    answers: list[list[Request]] = []
    for resident in (ALL_RESIDENT, Residency(4 * TOP_K[name])):
        model = model_of(name, device, resident, KVDType.FP8, positions=40_960)
        with engine_of(model, 40_960, host_tokens=40_960) as engine:
            answers.append(answered(engine, [ask]))
    (plain,), (hot,) = answers
    assert len(hot.output) == 4096
    unlike = [i for i, (a, b) in enumerate(zip(plain.output, hot.output, strict=True)) if a != b]
    assert not unlike, unlike[:4]


@pytest.mark.parametrize("layout", [Layout.LAYER_FIRST, Layout.PAGE_FIRST])
@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_other_layouts_of_the_host_change_no_bit(
    name: str, layout: Layout, device: torch.device
) -> None:
    """A long prompt is gathered, and what follows its prefix on the host is swapped in."""
    prompt = text(random.Random(name), 600)
    asks = [RequestParams(prompt[:length], 8) for length in (580, 600)]
    answers: list[list[Request]] = []
    for where in (Layout.PAGE_FIRST_DIRECT, layout):
        model = model_of(name, device, Residency(TOP_K[name] + 1), KVDType.FP8)
        with engine_of(model, host_layout=where) as engine:
            answers.append(one_by_one(engine, asks))
            assert engine.cache.validate() == []
            counts = sum(each.counts.sum(0) for each in engine.cache.hardware.hot.values())
            assert bool((counts > 0).all()), counts.tolist()
    for usual, other in zip(*answers, strict=True):
        assert usual.output == other.output


@KINDS
@pytest.mark.parametrize("name", NAMES)
def test_batches_answer_as_resident_ones(name: str, kv: KVDType, device: torch.device) -> None:
    """More requests than rows, prefixes in common, one long sequence beside short ones."""
    rng = random.Random(name)
    root = text(rng, 200)
    asks = [
        RequestParams(root[: rng.randint(1, 200)] + text(rng, rng.randint(1, 300)), ANSWER)
        for _ in range(30)
    ]
    answers: list[list[Request]] = []
    for resident in (ALL_RESIDENT, Residency(4 * TOP_K[name])):
        with engine_of(model_of(name, device, resident, kv)) as engine:
            engine.warm_up()
            answers.append(answered(engine, asks))
            assert engine.cache.validate() == []
    divergence, equal, count = compared(*answers)
    print(f"{name}: KL {divergence:.1e}, equal {equal:.2%} of {count}")
    assert divergence < CLOSE and equal > 0.95, (divergence, equal)


@pytest.mark.parametrize("name", NAMES)
def test_restored_prefixes_and_their_check(name: str, device: torch.device, tmp_path: Path) -> None:
    """From the device, the host and storage; each compared with computing it anew."""
    rng = random.Random(name)
    prompts = [text(rng, 400) for _ in range(6)]
    model = model_of(name, device, Residency(4 * TOP_K[name]), KVDType.BF16)
    with engine_of(model, oracle=True) as engine:
        store = open_store(f"file://{tmp_path}", engine.cache.storage.space)
        engine.cache.storage.attach(store)
        one_by_one(engine, [RequestParams(prompt, 2) for prompt in prompts])
        for tiers in ((), (Tier.DEVICE,), (Tier.DEVICE, Tier.HOST)):
            settled(engine, *tiers)
            found = one_by_one(engine, [RequestParams((*p, 1), 4) for p in prompts])
            assert all(sum(request.by_tier.values()) > 0 for request in found), tiers
        assert engine.oracle is not None and engine.oracle.counts.diverged == 0
        assert engine.oracle.counts.alike > 6 and engine.cache.validate() == []


@KINDS
@pytest.mark.parametrize("name", NAMES)
def test_drafts_share_the_hot_buffer(name: str, kv: KVDType, device: torch.device) -> None:
    rng = random.Random(name)
    loop = text(rng, 40)
    asks = [RequestParams(loop * 4 + loop[:n], ANSWER) for n in (1, 7, 30)]
    with engine_of(model_of(name, device, ALL_RESIDENT, kv)) as engine:
        plain = one_by_one(engine, asks)
    model = model_of(name, device, Residency(8 * TOP_K[name]), kv, drafts=3)
    with engine_of(model, drafter=NgramDrafter(), draft_tokens=3, fixed_drafts=True) as engine:
        engine.warm_up()
        drafted = one_by_one(engine, asks)
        assert engine.steps_by_kind["verify_graph"] > 3 and engine.cache.validate() == []
    divergence, equal, count = compared(plain, drafted)
    print(f"{name}: KL {divergence:.1e}, equal {equal:.2%} of {count}")
    assert divergence < CLOSE and equal > 0.95, (divergence, equal)


@pytest.mark.parametrize("name", NAMES)
def test_requests_with_aborts_leave_nothing_behind(name: str, device: torch.device) -> None:
    rng = random.Random(5)
    roots = [text(rng, 70) for _ in range(6)]
    model = model_of(name, device, Residency(2 * TOP_K[name]), KVDType.BF16)
    with engine_of(model, 2048) as engine:
        engine.warm_up()
        done, pending, flat = 0, list[Request](), None
        while done < 1000 or pending:
            while done < 1000 and len(pending) < 24:
                prompt = rng.choice(roots)[: rng.randint(1, 70)] + text(rng, rng.randint(1, 9))
                pending.append(engine.submit(RequestParams(prompt, rng.randint(1, 6))))
                done += 1
            engine.step()
            if rng.random() < 0.3:
                engine.abort(rng.choice(pending))
            pending = [request for request in pending if request.finish is None]
            if done >= 200 and flat is None:
                flat = torch.cuda.memory_allocated()
        assert flat is not None and torch.cuda.memory_allocated() <= flat + (1 << 20)
        assert engine.idle and engine.cache.validate() == []
        assert engine.cache.index.hot_rows == (0, 8)
        settled(engine, Tier.DEVICE, Tier.HOST)
        for count in engine.cache.stats().pages.values():
            assert (count.resident, count.free) == (0, count.capacity)
