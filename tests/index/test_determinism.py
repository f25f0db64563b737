"""The same operations give the same events and the same slots, in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.index.memories import ALL_MEMORIES
from tests.index.traffic import digest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 250


@pytest.mark.parametrize("name", ["full", "window and state", "window + full"])
def test_processes_with_different_hash_seeds_agree(name: str) -> None:
    def other(hash_seed: str) -> str:
        command = [sys.executable, "-m", "tests.index.traffic", name, "3", str(STEPS)]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert other("1") == other("2") == digest(name, 3, STEPS)


def test_the_digest_tells_runs_apart() -> None:
    assert len({digest("full", seed, STEPS) for seed in range(4)}) == 4
    assert len({digest(name, 0, STEPS) for name in ALL_MEMORIES}) == len(ALL_MEMORIES)
