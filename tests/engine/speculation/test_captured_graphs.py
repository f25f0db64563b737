"""Steps that run as graphs give a draft what eager ones do. Kernels run in an interpreter here."""

from __future__ import annotations

import pytest

from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.engine import Engine, RequestParams
from kvtide.engine.overlap import OverlapState
from kvtide.engine.sampling.sampling_params import SamplingParams
from kvtide.engine.speculation.model_drafter import ModelDrafter
from kvtide.layers.backend.triton_ops import TritonOps
from kvtide.models import build
from kvtide.models.checkpoint import open_checkpoint
from kvtide.models.draft_checkpoint import open_draft
from kvtide.spec.families import KVDType
from tests.engine.speculation.drafting import ConsistentDrafter, Seen
from tests.engine.speculation.lookup_pair import DATA, PAGE, walks

PAIRS, ANSWER = 5, 12


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_graphs_verify_and_draft_as_eager_steps_do(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtide.layers.kernels.qkv.FEW_TOKENS", 0)
    # An interpreter takes long for padding.
    monkeypatch.setattr("kvtide.engine.graphs.step_graphs.MIXED_TOKENS", (16, 32))
    monkeypatch.setattr("kvtide.engine.graphs.step_graphs.TOKENS_PER_PREFILL", 16)
    choose = "kvtide.models.family_registry.choose"
    monkeypatch.setattr(choose, lambda deterministic, device: TritonOps())
    checkpoint, source = open_checkpoint(DATA / "lookup_target"), open_draft(DATA / "lookup_draft")
    how = {"page_tokens": PAGE, "kv_dtype": KVDType.FP32, "draft": source}
    target = build(checkpoint.config, checkpoint.weights, **how)
    drafts, seen, kinds = source.build(target), Seen(), []
    outputs = []
    for graphs in (False, True):
        cache = TieredCache(target.memory, CacheConfig(Tokens(256), host_size=None, device="cpu"))
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
        prompts = [one.prompt for one in walks(2, pairs=PAIRS)]
        asks = [RequestParams(tokens, ANSWER, sampling) for tokens in prompts]
        requests = [engine.submit(ask) for ask in asks]
        overlapped = set()
        while not engine.idle:
            engine.step()
            overlapped.add(engine.overlap.state)
        assert (OverlapState.LAUNCHED in overlapped) == graphs
        outputs.append([[one.token for one in request.output] for request in requests])
        kinds.append({kind for kind, count in engine.steps_by_kind.items() if count})
        cache.close()
    assert outputs[0] == outputs[1] and [len(one) for one in outputs[0]] == [ANSWER] * 2
    assert kinds[0] == {"eager"} and "verify_graph" in kinds[1]
    assert drafter.compared >= 4 and drafter.behind >= 2
    assert engine.accept_length_stats is not None and engine.accept_length_stats.accepted >= 4
