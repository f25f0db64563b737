"""Speculation on a GPU: verify steps and draft passes as CUDA graphs, prefixes from the host."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.engine import Engine, Request, RequestParams
from kvtide.engine.overlap import OverlapState
from kvtide.engine.sampling.sampling_params import SamplingParams
from kvtide.engine.speculation.drafter import DraftWish, UnreadDrafts, UnreadStep
from kvtide.engine.speculation.model_drafter import ModelDrafter
from kvtide.models import Model, build, build_mtp
from kvtide.models.checkpoint import OnDevice, open_checkpoint
from kvtide.models.draft import DraftModel
from kvtide.models.draft_checkpoint import open_draft
from kvtide.spec import Tier
from kvtide.spec.families import KVDType
from tests.engine.speculation.lookup_pair import DATA, walks
from tests.models import tiny_mtp
from tests.models.tiny import checkpoint, config_of, prompt
from tests.models.tiny_eagle3 import tiny_eagle3

EAGLE3 = "llama"
PROMPTS = [tuple(prompt(length, seed=seed)) for seed, length in enumerate((75, 33, 130, 64, 9))]
ANSWER = 40
MIN_EQUAL = 0.97


@pytest.fixture(autouse=True)
def on_a_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU: --device cuda")


def pair_on(name: str, device: torch.device, folder: Path) -> tuple[Model, DraftModel]:
    """A target and its draft in fp32, by kernels."""
    how = {"page_tokens": 16, "kv_dtype": KVDType.FP32, "dtype": torch.float32}
    if name == EAGLE3:
        config = json.loads(config_of(name).to_json_string())
        opened = open_draft(tiny_eagle3(config, folder, captures=(0, 1, 1)))
        saved = checkpoint(name)
        with device:
            target = build(saved.config, OnDevice(saved.weights, device), draft=opened, **how)
            return target, opened.build(target)
    fields = tiny_mtp.config(name)
    weights = OnDevice(tiny_mtp.Tensors(tiny_mtp.weights(name)), device)
    with device:
        target = build(fields, weights, mtp=True, **how)
        return target, build_mtp(fields, weights, target)


def serve(engine: Engine, sampling: SamplingParams, *, speculate: bool) -> list[Request]:
    asks = [RequestParams(tokens, ANSWER, sampling, speculate=speculate) for tokens in PROMPTS]
    requests = [engine.submit(ask) for ask in asks]
    launched = set()
    while not engine.idle:
        engine.step()
        launched.add(engine.overlap.state)
    assert engine.cache.drain(30) and engine.cache.validate() == []
    assert not speculate or OverlapState.LAUNCHED in launched
    return requests


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", [EAGLE3, *tiny_mtp.NAMES])
def test_answers_are_those_without_drafts(
    name: str, temperature: float, device: torch.device, tmp_path: Path
) -> None:
    target, draft = pair_on(name, device, tmp_path)
    size = Tokens(128 * 16)
    config = CacheConfig(size, host_size=size, device="cuda", tokens_per_checkpoint=32)
    cache = TieredCache(target.memory, config)
    drafter = ModelDrafter(draft, draft.captures, cache, target.vocabulary)
    engine = Engine(
        target,
        cache,
        chunk_tokens=256,
        max_running=8,
        drafter=drafter,
        draft_tokens=3,
        fixed_drafts=True,
    )
    sampling = SamplingParams(temperature=temperature, seed=5)
    wanted = serve(engine, sampling, speculate=False)
    cache.flush(Tier.DEVICE)
    cache.flush(Tier.HOST)
    cold = serve(engine, sampling, speculate=True)
    cache.flush(Tier.DEVICE)
    restored = serve(engine, sampling, speculate=True)
    assert any(one.by_tier.get(Tier.HOST) for one in restored)
    assert engine.steps_by_kind["verify_graph"] > 10
    for found in (cold, restored):
        assert equal(wanted, found) >= MIN_EQUAL
    assert cache.close()


class CountingDrafter(ModelDrafter):
    """`behind`: how often drafts were launched before the host had read what was sampled."""

    behind = 0

    def draft_ahead(self, step: UnreadStep, wishes: Sequence[DraftWish]) -> UnreadDrafts | None:
        drafts = super().draft_ahead(step, wishes)
        self.behind += drafts is not None
        return drafts


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_graphs_accept_as_many_drafts_as_eager_steps(
    temperature: float, device: torch.device
) -> None:
    """A trained pair accepts many. Graphs accept on the device: the next step is launched behind
    tokens that the host has yet to read."""
    saved, source = open_checkpoint(DATA / "lookup_target"), open_draft(DATA / "lookup_draft")
    with device:
        weights = OnDevice(saved.weights, device)
        how = {"page_tokens": 16, "kv_dtype": KVDType.FP32, "dtype": torch.float32}
        target = build(saved.config, weights, draft=source, **how)
        draft = source.build(target)
    sampling = SamplingParams(temperature=temperature, seed=5)
    prompts = [one.prompt for one in walks(12)]
    served, rates, behind = [], [], []
    for graphs in (False, True):
        cache = TieredCache(target.memory, CacheConfig(Tokens(8192), None, device="cuda"))
        drafter = CountingDrafter(draft, draft.captures, cache, target.vocabulary)
        engine = Engine(
            target,
            cache,
            max_running=8,
            cuda_graphs=graphs,
            drafter=drafter,
            draft_tokens=3,
            fixed_drafts=True,
        )
        # Answers of several lengths: batches change all the time.
        asks = [RequestParams(each, 20 + 3 * n, sampling) for n, each in enumerate(prompts)]
        served.append([engine.submit(ask) for ask in asks])
        while not engine.idle:
            engine.step()
            assert cache.validate() == []
        counts = engine.accept_length_stats
        assert counts is not None
        rates.append(counts.accepted / (counts.accepted + counts.rejected))
        behind.append(drafter.behind)
        assert cache.close()
    assert equal(*served) >= MIN_EQUAL
    assert behind[0] == 0 and behind[1] > 10
    assert rates[1] >= 0.98 * rates[0] > 0.3, rates


def equal(ones: list[Request], others: list[Request]) -> float:
    """The fraction of equal tokens, of each answer up to the first that differs."""
    same = []
    for one, other in zip(ones, others, strict=True):
        for a, b in zip(one.output, other.output, strict=True):
            same.append(a.token == b.token)
            if a.token != b.token:
                break
    return sum(same) / len(same)
