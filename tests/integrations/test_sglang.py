"""The HiCache backend under the real factory of the tested versions, each in its own process."""

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
    for line in (ROOT / "tests/integrations/hicache_checks.py").read_text().splitlines()
    if line.startswith("def check_")
]


@pytest.mark.full
@pytest.mark.parametrize("version", ["0.5.18", "0.5.23"])
def test_every_check_holds_under_the_real_factory(version: str, tmp_path: Path) -> None:
    folder = engines.sglang(version)
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.hicache_checks", str(folder), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == CHECKS and len(CHECKS) == 7


def test_the_backend_without_sglang_is_a_sentence() -> None:
    code = "import kvtide.integrations.sglang"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "needs sglang 0.5.18 or 0.5.23, and none is installed" in done.stderr
