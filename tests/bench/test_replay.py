"""The planner's prediction: an engine that serves the same requests finds the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvtide.bench.planned_and_served import GOAL_POINTS, Replayed, Sizes, compare, idle, thinned
from kvtide.bench.step_cost import PAGE, VOCABULARY
from kvtide.cli.main import main
from kvtide.planner.study import BRANCH, COST, LAST, Checkpoints, every
from tests.models import tiny
from tests.planner.recorded import conversations

PLACEMENTS = (COST, LAST, BRANCH, every(16, PAGE))
THIN = 8
SMALL_PAGE = 16


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def replayed(tmp_path: Path, memory: str, way: Checkpoints, share: float = 0.25) -> Replayed:
    """Conversations on a device that holds a part of them, and a host with twice the room."""
    trace = conversations(tmp_path / "trace.jsonl", requests=60, talking=8)
    requests = thinned(trace, 60, 1, VOCABULARY)
    total = sum(len(request.prompt) for request in requests)
    sizes = Sizes(int(share * total), int(2 * share * total), tokens_per_checkpoint=1024)
    return compare(idle(memory), requests, sizes, way)


@pytest.mark.quick(way=PLACEMENTS[::2])
@pytest.mark.parametrize("way", PLACEMENTS, ids=lambda way: way.name)
def test_states_are_found_as_planned_wherever_checkpoints_are_placed(
    tmp_path: Path, way: Checkpoints
) -> None:
    found = replayed(tmp_path, "recurrent", way)
    assert abs(found.points) <= GOAL_POINTS, found
    assert found.planned_rate > 0.03, "a replay that finds next to nothing proves nothing"


@pytest.mark.quick(way=PLACEMENTS[1::2])
@pytest.mark.parametrize("way", PLACEMENTS, ids=lambda way: way.name)
def test_windows_are_found_as_planned_wherever_checkpoints_are_placed(
    tmp_path: Path, way: Checkpoints
) -> None:
    found = replayed(tmp_path, "window", way)
    assert abs(found.points) <= GOAL_POINTS, found
    assert found.planned_rate > 0.03


def test_histories_are_found_as_planned_in_the_tiers_where_they_were(tmp_path: Path) -> None:
    found = replayed(tmp_path, "full", COST, share=0.1)
    assert abs(found.points) <= GOAL_POINTS, found
    assert found.served["host"] == pytest.approx(found.planned["host"], abs=0.01)
    assert found.planned["host"] > 0.05


@pytest.mark.quick(family=["gemma3"])
@pytest.mark.parametrize("family", ["falcon_h1", "gemma3", "llama"])
def test_real_models_find_what_is_planned_for_them(tmp_path: Path, family: str) -> None:
    """A recurrent hybrid, one with windows, one with all of its history; prompts in chunks."""
    trace = conversations(tmp_path / "trace.jsonl", requests=24, talking=3)
    requests = thinned(trace, 24, THIN, tiny.VOCABULARY)
    total = sum(len(request.prompt) for request in requests)
    sizes = Sizes(total // 2, total, chunk_tokens=160, tokens_per_checkpoint=256)
    found = compare(tiny.ours(family, page_tokens=SMALL_PAGE), requests, sizes, COST)
    assert abs(found.points) <= GOAL_POINTS, found
    assert found.planned_rate > 0.2


def test_command_prints_both_rates_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--workload", "chat:users=3,turns=2", "--requests", "4", "--device", "8"]
    assert main(["bench", "replay", *asked]) == 0
    out = capsys.readouterr().out
    assert "planned" in out and "served" in out and "recurrent" in out
    assert out.count("yes") == 9 and "4 requests" in out
