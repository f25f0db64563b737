"""The examples run as they are shown, and do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_embedded_cache_answers_like_no_cache_and_finds_tokens_on_the_host() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "embed.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    heading, *lines, verdict = run.stdout.splitlines()
    assert verdict == "identical"
    assert heading.split()[:2] == ["conversation", "prompt"]
    counts = [[int(number) for number in line.split()[1:5]] for line in lines]
    assert len(counts) == 12
    assert all(prompt == device + host + computed for prompt, device, host, computed in counts)
    assert any(device for _, device, _, _ in counts), "no turn found tokens on the device"
    assert any(host for _, _, host, _ in counts), "no turn found tokens on the host"
