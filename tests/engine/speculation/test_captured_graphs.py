"""Steps that run as graphs give a draft what eager ones do. Kernels run in an interpreter here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.engine import Engine, RequestParams
from kvtide.engine.overlap import OverlapState
from kvtide.engine.sampler import SamplingParams
from kvtide.engine.speculation.model_drafter import ModelDrafter
from kvtide.layers.backend.triton_ops import TritonOps
from kvtide.models import build
from kvtide.models.draft_checkpoint import open_draft
from kvtide.spec.families import KVDType
from tests.engine.speculation.drafting import ConsistentDrafter, Seen
from tests.models.tiny import checkpoint, config_of, prompt
from tests.models.tiny_eagle3 import tiny_eagle3

ANSWER = 5


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_graphs_verify_and_draft_as_eager_steps_do(
    temperature: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kvtide.layers.kernels.qkv.FEW_TOKENS", 0)
    # An interpreter takes long for padding.
    monkeypatch.setattr("kvtide.engine.graphs.step_graphs.MIXED_TOKENS", (16, 32))
    monkeypatch.setattr("kvtide.engine.graphs.step_graphs.TOKENS_PER_PREFILL", 16)
    choose = "kvtide.models.family_registry.choose"
    monkeypatch.setattr(choose, lambda deterministic, device: TritonOps())
    config = json.loads(config_of("llama").to_json_string())
    draft = open_draft(tiny_eagle3(config, tmp_path, captures=(0, 1, 1)))
    saved = checkpoint("llama")
    target = build(saved.config, saved.weights, page_tokens=16, kv_dtype=KVDType.FP32, draft=draft)
    drafts, seen, kinds = draft.build(target), Seen(), []
    said = []
    for graphs in (False, True):
        cache = TieredCache(target.memory, CacheConfig(Tokens(128), host_size=None, device="cpu"))
        inner = ModelDrafter(drafts, drafts.captures, cache, target.vocabulary)
        drafter = ConsistentDrafter(inner, seen)
        engine = Engine(
            target,
            cache,
            max_running=2,
            cuda_graphs=graphs,
            drafter=drafter,
            draft_tokens=2,
            fixed_drafts=True,
        )
        sampling = SamplingParams(temperature=temperature, seed=3)
        asks = [RequestParams(tuple(prompt(20, seed=n)), ANSWER, sampling) for n in (1, 2)]
        requests = [engine.submit(ask) for ask in asks]
        overlapped = set()
        while not engine.idle:
            engine.step()
            overlapped.add(engine.overlap_state)
        assert (OverlapState.LAUNCHED in overlapped) == graphs
        said.append([[one.token for one in request.output] for request in requests])
        kinds.append({kind for kind, count in engine.steps_by_kind.items() if count})
        cache.close()
    assert said[0] == said[1] and [len(one) for one in said[0]] == [ANSWER] * 2
    assert kinds[0] == {"eager"} and {"verify_graph", "decode_graph"} <= kinds[1]
    assert drafter.compared >= 4
