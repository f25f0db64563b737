"""Hot pools in CUDA graphs: plan and swap-in are part of what is replayed, step after step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.engine import Engine, RequestParams
from kvtide.engine.graphs.graph_capture import Wait
from kvtide.engine.graphs.graph_inputs import GraphKind, GraphSize
from kvtide.engine.graphs.step_graphs import StepGraph
from kvtide.engine.residency import hot_residency
from kvtide.engine.residency.hot_residency import hot_tables
from kvtide.layers.backend.triton_ops import TritonOps
from kvtide.models import build
from kvtide.models.model import Decoder
from kvtide.spec import Tier
from kvtide.spec.families import KVDType
from kvtide.spec.residency import ALL_RESIDENT, Residency
from tests.engine.restoring import PAGE, SAMPLING, alone, check_hot_row, text
from tests.engine.torch_graphs import SIZES, use_torch_graphs
from tests.models.tiny import checkpoint, ours

CLOSE = 1e-4


@pytest.fixture(autouse=True)
def _on_a_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("CUDA graphs are tested on a device: tests/engine/test_on_device")


@pytest.mark.quick(model=["deepseek_v32"], entries=[24])
@pytest.mark.parametrize(
    ("model", "entries"),
    [("deepseek_v32", 24), ("deepseek_v32", 500), ("glm_moe_dsa-shared", 48), ("deepseek_v4", 7)],
)
def test_replayed_steps_answer_as_eager_ones_of_resident_pools(
    model: str, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come and go between steps, and decode steps are launched before the host knows
    their tokens. A replay computes by the torch reference."""
    rng = random.Random(entries)
    prompts = [text(rng, length) for length in (70, 20, 33)]
    prompts.append(prompts[0][: 3 * PAGE] + text(rng, 4))
    hot = ours(model, deterministic=True, resident=Residency(entries))
    assert isinstance(hot, Decoder)
    use_torch_graphs(monkeypatch, hot)
    config = CacheConfig(Tokens(512), Tokens(1024), tokens_per_checkpoint=PAGE, hot_rows=3)
    cache = TieredCache(hot.memory, config)
    engine = Engine(hot, cache, chunk_tokens=64, max_running=3, cuda_graphs=True)
    requests = []
    while prompts or not engine.idle:
        if prompts and rng.random() < 0.4:
            tokens = prompts.pop(0)
            requests.append(engine.submit(RequestParams(tokens, 4 + len(tokens) % 9, SAMPLING)))
        engine.step()
        assert cache.validate() == []
    for request in requests:
        tokens, count = request.params.tokens, request.params.max_tokens
        assert tuple(request.output) == alone(model, tokens, count)
    assert engine.steps_by_kind["decode_graph"] > 4
    assert cache.drain(10) and cache.index.hot_rows[0] == 0 and cache.close()


@pytest.mark.parametrize("reads_hot_row", [True, False], ids=["hot row", "gathered"])
def test_a_few_tokens_after_a_loading_prefix_take_the_smallest_graph(
    reads_hot_row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No drafts, so no verify graphs. Top-k of two queries fits the larger hot row."""
    model, rng = "deepseek_v32", random.Random(4)
    root = text(rng, 5 * PAGE)
    hot = ours(model, deterministic=True, resident=Residency(48 if reads_hot_row else 24))
    assert isinstance(hot, Decoder)
    use_torch_graphs(monkeypatch, hot)
    sizes: list[GraphSize] = []
    replay = StepGraph._replay

    def noted(self: StepGraph, wait: Wait) -> torch.Tensor:
        sizes.append(self._size)
        return replay(self, wait)

    def hot_row_or_gathered(*given: Any) -> Any:
        tables = hot_tables(*given)
        gathered.append(int(tables["kv"][0]) >= buffers.shape.first_gathered)
        return tables

    gathered: list[bool] = []
    monkeypatch.setattr(StepGraph, "_replay", noted)
    monkeypatch.setattr(hot_residency, "hot_tables", hot_row_or_gathered)
    config = CacheConfig(Tokens(256), Tokens(512), tokens_per_checkpoint=PAGE, hot_rows=3)
    cache = TieredCache(hot.memory, config)
    engine = Engine(hot, cache, chunk_tokens=128, max_running=3, cuda_graphs=True)
    (buffers,) = cache.hardware.hot.values()
    for prompt in (root, root[: 4 * PAGE] + text(rng, 2)):
        assert cache.drain(10)
        cache.flush(Tier.DEVICE)
        sizes.clear()
        request = engine.submit(RequestParams(prompt, 1, SAMPLING))
        while not engine.idle:
            engine.step()
        assert tuple(request.output) == alone(model, prompt, 1)
    assert request.by_tier == {Tier.HOST: 4 * PAGE}
    (size,) = sizes
    assert (size.kind, size.tokens, size.longest) == (GraphKind.MIXED, SIZES[0], SIZES[0])
    assert gathered[-1] is not reads_hot_row
    assert cache.drain(10) and cache.validate() == [] and cache.close()


@pytest.mark.full
@pytest.mark.parametrize("model", ["deepseek_v32", "glm_moe_dsa-shared", "deepseek_v4"])
def test_kernels_in_a_graph_answer_as_the_reference_of_resident_pools(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels run in an interpreter. Few entries are selected, so that some miss at every step."""
    rng = random.Random(3)
    prompts = [text(rng, length) for length in (21, 9)]
    monkeypatch.setattr("kvtide.layers.kernels.qkv.FEW_TOKENS", 0)
    monkeypatch.setattr("kvtide.engine.graphs.step_graphs.MIXED_TOKENS", (16, 32))
    monkeypatch.setattr("kvtide.engine.graphs.step_graphs.TOKENS_PER_PREFILL", 16)
    monkeypatch.setattr("kvtide.engine.graphs.step_graphs.MIN_LENGTH", 64)
    topk = 2 if model == "deepseek_v4" else 4
    saved, answers = checkpoint(model), []
    fields = {**saved.config, "index_topk": topk}
    for resident in (ALL_RESIDENT, Residency(topk + 1)):
        with monkeypatch.context() as patch:
            if resident.hot:
                choose = "kvtide.models.family_registry.choose"
                patch.setattr(choose, lambda deterministic, device: TritonOps())
            how = {"page_tokens": PAGE, "kv_dtype": KVDType.FP32, "resident": resident}
            built = build(fields, saved.weights, **how)
        config = CacheConfig(Tokens(128), Tokens(256), tokens_per_checkpoint=PAGE, hot_rows=2)
        cache = TieredCache(built.memory, config)
        graphs = resident.hot is not None
        engine = Engine(built, cache, chunk_tokens=32, max_running=2, cuda_graphs=graphs)
        requests = [engine.submit(RequestParams(tokens, 6, SAMPLING)) for tokens in prompts]
        while not engine.idle:
            engine.step()
            for name in cache.hardware.hot:
                for request in engine.scheduler.running:
                    check_hot_row(cache, request, name)
        answers.append([one for request in requests for one in request.output])
        assert bool(engine.steps_by_kind["decode_graph"]) == graphs
        misses = sum(int(hot.counts[:, 1].sum()) for hot in cache.hardware.hot.values())
        assert bool(misses) == graphs
        assert cache.drain(10) and cache.validate() == [] and cache.close()
    assert [one.token for one in answers[0]] == [one.token for one in answers[1]]
    off = max(abs(a.logprob - b.logprob) for a, b in zip(*answers, strict=True))
    assert off <= CLOSE
