"""Rounds of speculation are what their rows say, with tiny models on the CPU."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch

from kvtide.bench.gpu import draft_rounds, history
from kvtide.bench.gpu.draft_rounds import ChosenResult, DeviceGaps, RoundLoad, RoundResult
from kvtide.bench.gpu.drafted_shapes import (
    DraftedModel,
    DraftedShape,
    deepseek_v4_flash_mtp,
    qwen3_8b_eagle3,
)
from kvtide.bench.gpu.shapes import Shape, tiny
from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.cli.bench import bench_speculate
from kvtide.engine.speculation import draft_length, round_prices
from kvtide.layers.backend.triton_ops import TritonOps

CPU = torch.device("cpu")
EAGLE3, MTP = (
    replace(drafted, shape=tiny(drafted.shape))
    for drafted in (qwen3_8b_eagle3(), deepseek_v4_flash_mtp())
)
FEW = RoundLoad(2, 128, 1.25, steps=4, blocks=2)


def quiet(text: str) -> None:
    pass


def _three_layers(shape: Shape) -> Shape:
    return replace(shape, config={**shape.config, "num_hidden_layers": 3})


def built(shape: DraftedShape) -> DraftedModel:
    return shape.build(CPU, torch.float32)


@pytest.mark.full
@pytest.mark.parametrize("shape", [EAGLE3, MTP], ids=["eagle3", "mtp"])
def test_drafts_share_weights_with_a_model_that_has_no_pools_for_them(shape: DraftedShape) -> None:
    model = built(shape)
    assert model.plain.head is model.target.head and model.plain.memory.draft_sidecars == ()
    assert model.target.memory.draft_sidecars == ("draft",)


@pytest.mark.full
@pytest.mark.parametrize("shape", [EAGLE3, MTP], ids=["eagle3", "mtp"])
def test_a_histories_pages_are_found(shape: DraftedShape) -> None:
    memory = built(shape).target.memory
    size = Tokens(64 * memory.page_tokens)
    config = CacheConfig(size, host_size=None, device="cpu", tokens_per_checkpoint=64)
    cache = TieredCache(memory, config)
    prompts = [[seed] * (2 * memory.page_tokens + 3) for seed in (1, 2)]
    history.commit(cache, prompts)
    for tokens in prompts:
        lease = cache.reserve(cache.match(cache.prompt(tokens)))
        assert lease is not None and lease.cached_tokens == 2 * memory.page_tokens
        assert cache.carries(lease, "draft")[-1], "V4 keeps a window of the draft, too"
        cache.release(lease)
    assert cache.validate() == []
    cache.close()


@pytest.mark.full
@pytest.mark.parametrize("shape", [EAGLE3, MTP], ids=["eagle3", "mtp"])
def test_no_draft_is_accepted_and_then_all_are(shape: DraftedShape) -> None:
    notes: list[str] = []
    load = FEW if shape is EAGLE3 else replace(FEW, steps=2, context=256)
    none, every = draft_rounds.rounds(built(shape), ("m", "d"), CPU, load, notes.append)
    assert (none.accepted, none.accept_length, none.goal) == ("no", 1.0, 1.25)
    assert (every.accepted, every.accept_length, every.goal) == ("all", 4.0, None)
    # After a rejection V4 computes tokens again, and does not draft where that takes too long.
    assert every.drafts == 3.0 and (none.drafts == 3.0 or shape is MTP)
    for found in (none, every):
        assert found.decode_s > 0 and found.round_s > 0
        assert all(found.phases_s[part] > 0 for part in ("verify", "extend", "propose"))
        assert found.wait_s is None, "without graphs nothing is drafted ahead"
    assert notes[-1] == "batch 2: drafts are accepted now"


@pytest.mark.full
def test_an_engine_that_finds_its_drafts_useless_tries_few(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (draft_length, draft_rounds):
        monkeypatch.setattr(module, "TRIAL_TOKENS", 8)
    monkeypatch.setattr(draft_length, "MAX_TRIAL_TOKENS", 8)
    monkeypatch.setattr(draft_length, "HOPE", 0.1)
    load = replace(FEW, steps=18)
    found = draft_rounds.chosen(built(EAGLE3), ("m", "d"), CPU, load, 0.0, quiet)
    assert found.drafts == pytest.approx(1 / 9) and found.goal == 0.9
    assert found.ratio == pytest.approx(found.on_tokens_s / found.off_tokens_s)


@pytest.mark.full
def test_drafts_are_accepted_with_the_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """At assumed costs: what steps take here would decide otherwise."""
    monkeypatch.setattr(draft_length, "HOPE", 1.0)
    monkeypatch.setattr(draft_length, "EWMA_DECAY", 1.0)
    monkeypatch.setattr(round_prices, "PLAIN_STEPS", 0)
    monkeypatch.setattr(round_prices, "SAMPLES", 1_000_000)
    for module in (draft_length, draft_rounds):
        monkeypatch.setattr(module, "TRIAL_TOKENS", 8)
    load = replace(FEW, steps=40)
    found = draft_rounds.chosen(built(EAGLE3), ("m", "d"), CPU, load, 0.5, quiet)
    assert found.drafts == pytest.approx(3.0) and found.goal == 0.95
    assert found.accepted == pytest.approx(0.5 + 0.25 + 0.125, rel=0.2)


def test_a_gap_ends_with_the_step_behind_the_drafts() -> None:
    gaps = DeviceGaps(CPU)
    with gaps.timed(held=True) as found:
        gaps.end()  # Of a gap that began before.
        gaps.begin()
        gaps.end()
        gaps.begin()
        gaps.forget()  # Another step follows.
        gaps.end()
        assert found == []
    assert len(found) == 1 and found[0] >= 0


def test_goals_are_bounds_of_ratios() -> None:
    found = RoundResult("m", "d", 1, 2, "no", 1.0, 1.25, 1.25, 1.25, 3.0, 1.0, {})
    assert found.reached and not replace(found, ratio=1.26).reached
    assert replace(found, goal=None).reached is None
    speed = ChosenResult("m", "d", 1, 2, 0.0, 9.0, 10.0, 0.9, 0.0)
    assert speed.reached and not replace(speed, ratio=0.89).reached
    assert not replace(speed, chance=0.5).reached


@pytest.mark.full
def test_rounds_run_as_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run in an interpreter here."""
    choose = "kvtide.models.family_registry.choose"
    monkeypatch.setattr(choose, lambda deterministic, device: TritonOps())
    monkeypatch.setattr("kvtide.engine.graphs.step_graphs.MIXED_TOKENS", (8, 16))
    monkeypatch.setattr("kvtide.engine.graphs.step_graphs.TOKENS_PER_PREFILL", 4)
    load = RoundLoad(1, 64, 1.25, steps=1, blocks=1, draft_tokens=2)
    few = replace(EAGLE3, shape=_three_layers(EAGLE3.shape))
    with draft_rounds.pair(built(few), CPU, load, quiet, fixed=True) as both:
        assert len(both.blocks(1, 1)) == 1
        assert "eager" not in both.off.steps_by_kind
        assert both.counts()[1] > 0
        assert (waits := both.wait_s(3)) is not None and waits >= 0


# -- the command --------------------------------------------------------------------------------


def test_the_command_shows_all_cases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the GPU with tiny shapes."""
    monkeypatch.setattr(bench_speculate, "SHAPES", {EAGLE3.name: EAGLE3})
    for module in (draft_length, draft_rounds):
        monkeypatch.setattr(module, "TRIAL_TOKENS", 4)
    cases = [
        bench_speculate.ShapeCase("rounds", EAGLE3.name, (FEW,)),
        bench_speculate.ShapeCase("never-8b", EAGLE3.name, (FEW,), chance=0.0),
        bench_speculate.ShapeCase("rounds-v4", EAGLE3.name, (replace(FEW, context=100),)),
    ]
    failed: list[str] = []
    args = argparse.Namespace(device="cpu", draft_tokens=2)
    found = list(bench_speculate._shapes(args, cases, failed))
    assert [name for name, _ in found] == ["rounds", "rounds", "never-8b"]
    assert failed == ["rounds-v4, batch 2"]
    shown = "\n\n".join(bench_speculate._tables([result for _, result in found]))
    rounds, speeds = shown.split("\n\n")
    assert len(rounds.splitlines()) == 4 and "≤ 1.25×" in rounds
    assert len(speeds.splitlines()) == 3 and "≥ 0.9×" in speeds
    assert "tokens of 100 were cached" in capsys.readouterr().err


def test_shapes_are_measured_at_their_published_sizes() -> None:
    wanted = {
        "rounds": [(1, 2048, 1.25), (64, 2048, 1.5)],
        "never-8b": [(64, 2048, 0.0)],
        "half-8b": [(1, 2048, 0.0), (64, 2048, 0.0)],
        "rounds-v4": [(1, 64_512, 1.4), (64, 64_512, 1.6)],
        "never-v4": [(64, 64_512, 0.0)],
        "half-v4": [(1, 64_512, 0.0), (64, 64_512, 0.0)],
    }
    for name, case in bench_speculate.SHAPE_CASES.items():
        assert [(each.batch, each.context, each.goal) for each in case.loads] == wanted[name]
        assert isinstance(bench_speculate.SHAPES[case.shape].shape, Shape)
