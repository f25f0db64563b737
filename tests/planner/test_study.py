"""Studies: sweeps and placements replay the same traffic and differ only in what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvtide.index import DEFAULT_POLICY
from kvtide.planner import study, workloads
from kvtide.planner.study import COST, LAST, Study, every
from kvtide.spec import SpecError, Tier, catalog
from kvtide.spec.residency import hot_bytes, served_hot
from kvtide.spec.sizing import bytes_for
from tests.planner.recorded import conversations

HYBRID = catalog.resolve("deepseek-v4-flash")
FULL = catalog.resolve("qwen3-8b")
# Questions about the same few documents: prompts part where none stopped.
RAG = workloads.parse("rag:requests=150,documents=12,retrieved=3")
ASKED = Study(HYBRID, RAG, {Tier.DEVICE: 10**9, Tier.HOST: 4 * 10**9, Tier.STORAGE: 0})


def test_placements_that_keep_more_checkpoints_find_more_up_to_the_ideal() -> None:
    ideal, last, branch, learned, *regular = study.placements(ASKED, study.run(ASKED))
    assert [cost.name for cost in (learned, *regular)] == ["cost", "every:8192", "every:2048"]
    assert last.report.hit_rate < branch.report.hit_rate <= ideal.report.hit_rate
    assert last.report.hit_rate < learned.report.hit_rate <= ideal.report.hit_rate
    assert ideal.checkpoints_per_request is None
    assert 0.5 < (last.checkpoints_per_request or 0.0) <= 1.0
    kept = [cost.checkpoints_per_request or 0.0 for cost in (last, branch, *regular)]
    assert kept == sorted(kept)


@pytest.mark.full
def test_learned_checkpoints_find_nearly_all_that_could_be_found_for_two_per_request(
    tmp_path: Path,
) -> None:
    """Recurrent states, conversations that share whole blocks, room for everything."""
    trace = conversations(tmp_path / "trace.jsonl", requests=2500)
    tiers = {Tier.DEVICE: 10**14, Tier.HOST: 0, Tier.STORAGE: 0}
    asked = Study(catalog.resolve("qwen3-next-80b"), trace, tiers, checkpoints=COST)
    ideal, _, branch, learned, *_ = study.placements(asked, study.run(asked))
    assert branch.report.hit_rate < 0.8 * ideal.report.hit_rate
    assert learned.report.hit_rate >= 0.988 * ideal.report.hit_rate
    assert (learned.checkpoints_per_request or 9.0) <= 2.0


def test_placement_that_was_asked_for_is_listed_with_the_report_it_had() -> None:
    asked = replace(ASKED, checkpoints=every(2, 256))
    report = study.run(asked)
    costs = study.placements(asked, report)
    assert costs[-1].name == "every:512"
    assert costs[-1].report is report


def test_ideal_differs_in_nothing_but_what_a_resume_needs() -> None:
    ideal = study.placements(replace(ASKED, checkpoints=LAST), study.run(ASKED))[0].report
    assert {anchor for _, anchor in ideal.resident_pages} == {"kv"}
    assert ideal.prompt_tokens == RAG.prompt_tokens


def test_placement_matters_only_to_models_with_windows_or_states() -> None:
    assert study.has_checkpoints(HYBRID)
    assert not study.has_checkpoints(FULL)


def test_sweep_replays_every_size_and_a_larger_device_finds_more_there() -> None:
    sizes = study.sweep_sizes(bytes_for(HYBRID, 1), 2 * 10**9, points=4)
    points = study.sweep(replace(ASKED, eviction="lru"), Tier.DEVICE, sizes)
    assert [point.size_bytes for point in points] == sizes
    found = [point.report.tier_hit_rate(Tier.DEVICE) for point in points]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_sweep_sizes_run_from_a_64th_to_four_times_by_equal_ratios() -> None:
    sizes = study.sweep_sizes(bytes_for(FULL, 1), 64 * 10**9, points=5)
    assert sizes[0] == pytest.approx(10**9)
    assert sizes[-1] == pytest.approx(256 * 10**9)
    assert sizes[1] / sizes[0] == pytest.approx(4)


def test_sweep_sizes_are_never_too_small_for_a_page() -> None:
    sizes = study.sweep_sizes(bytes_for(FULL, 1), bytes_for(FULL, 2), points=8)
    assert sizes[0] == bytes_for(FULL, 1)
    assert sizes == sorted(set(sizes))


# -- hot pools ------------------------------------------------------------------------------

HOT = replace(ASKED, memory=served_hot(HYBRID, 1024))


def test_hot_buffers_of_running_requests_take_from_the_pages_of_the_device() -> None:
    one, many = (replace(HOT, running=running) for running in (1, 8))
    pages = -(-RAG.longest_tokens // HYBRID.page_tokens)
    assert one.hot_bytes(Tier.DEVICE) == hot_bytes(HOT.memory, 1, pages)
    assert one.hot_bytes(Tier.HOST) == ASKED.hot_bytes(Tier.DEVICE) == 0
    assert many.hot_bytes(Tier.DEVICE) == hot_bytes(HOT.memory, 8, pages)
    assert many.min_bytes(Tier.DEVICE) - many.hot_bytes(Tier.DEVICE) == bytes_for(
        HOT.memory.in_device_pages, 1
    )
    small = {**HOT.tier_bytes, Tier.DEVICE: many.min_bytes(Tier.DEVICE)}
    slots = replace(many, tier_bytes=small).setup().capacity_pages
    assert slots[Tier.DEVICE] == {"kv": 1, "swa": 3}
    assert set(slots[Tier.HOST]) == {"kv", "swa", "c4"}
    with pytest.raises(SpecError, match="use at least"):
        replace(many, tier_bytes={Tier.DEVICE: small[Tier.DEVICE] - 1}).setup()


def test_no_page_of_a_hot_pool_is_counted_on_the_device() -> None:
    report = study.run(HOT)
    assert (Tier.DEVICE, "c4") not in report.resident_pages
    assert (Tier.HOST, "c4") in report.resident_pages


def test_hot_pools_are_replayed_from_the_host() -> None:
    resident, hot = study.run(ASKED), study.run(HOT)
    assert hot.unfit_requests == 0
    assert hot.hit_rate >= resident.hit_rate > 0
    assert hot.moved_bytes["load"] < resident.moved_bytes["load"]
    assert hot.committed_pages["c4"] == hot.committed_pages["kv"] > 0
    assert hot.resident_pages[Tier.HOST, "c4"] > 0
    assert min(hot.evicted_pages.values()) >= 0


def test_progress_hears_what_every_walk_is_for() -> None:
    labels: list[str] = []

    def walk(trace: workloads.Trace, label: str) -> workloads.Trace:
        labels.append(label)
        return trace

    asked = replace(ASKED, trace=workloads.parse("chat:users=2,turns=2"), eviction=DEFAULT_POLICY)
    study.placements(asked, study.run(asked, walk), walk)
    study.sweep(asked, Tier.HOST, [10**9], walk)
    assert labels[0] == "replay"
    assert "checkpoints last" in labels
    assert labels[-1] == "sweep of host, 1 of 1"
