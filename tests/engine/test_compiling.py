"""No request waits for a compiler: all that steps need is compiled at the start."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

NAMES = (
    "deepseek_v4",
    "falcon_h1",  # Mamba2 beside attention.
    "glm_moe_dsa-shared",  # Latents, an indexer, experts.
    "gpt_oss",  # Sinks, windows, experts.
    "kimi_linear",  # KDA beside latents.
    "llama",
    "qwen3_next",  # Gated delta.
)


@pytest.mark.quick(name=["falcon_h1"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_of_any_kind_ask_for_nothing_that_was_not_compiled_at_the_start(name: str) -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-m", "tests.engine.compiling", name],
        capture_output=True,
        text=True,
        env={**env, "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert found.returncode == 0, found.stderr
    asked = json.loads(found.stdout.splitlines()[-1])
    assert asked["later"] == []
    assert 10 < asked["prepared"] < 100, "of few kinds: a start takes as long as they do"
