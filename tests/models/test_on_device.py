"""Every family on the device under test says what it says on the CPU, restored state included.

Where the installed `transformers` does not know a family, there is nothing to make a tiny model
with, and the family is left out by name.
"""

from __future__ import annotations

import pytest
import torch
import transformers

from kvtide.models.checkpoint import OnDevice
from kvtide.spec.families import KVDType
from tests.engine.restoring import ALL_NAMES
from tests.models.playing import Player
from tests.models.tiny import CONFIGS, build, checkpoint, ours, prompt

TOKENS = 90
CHUNKS = (41, 1, 1, 47)
CLOSE = 2e-4


@pytest.mark.full
@pytest.mark.parametrize("name", ALL_NAMES)
def test_logits_on_the_device_are_those_on_the_cpu(name: str, device: torch.device) -> None:
    if not hasattr(transformers, f"{CONFIGS[name][0]}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {CONFIGS[name][0]}")
    wanted = Player(ours(name)).prefill(prompt(TOKENS), *CHUNKS)
    saved, tokens = checkpoint(name), prompt(TOKENS)
    with device:
        weights = OnDevice(saved.weights, device)
        model = build(saved.config, weights, page_tokens=16, kv_dtype=KVDType.FP32)
        found = Player(model).prefill(tokens, *CHUNKS).cpu()
    worst = float((found - wanted).abs().max())
    print(f"{name}: off by {worst:.2g}")
    assert worst <= CLOSE, worst
