"""Families with kernels, as on a GPU: the same logits.

Here they run in an interpreter, so prompts are short and families few: one with every kind of
layer. DeepSeek-V4 has a module of its own, and on a device all of them are tried.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtide.layers.moe import Mixture
from kvtide.models import Model
from tests.models import tiny
from tests.models.playing import Player
from tests.models.with_kernels import by_kernels

NAMES = (
    "falcon_h1",  # Mamba2 beside attention.
    "gemma2",  # Capped scores, windows, norms around zero.
    "glm_moe_dsa-shared",  # Latents, an indexer, experts.
    "gpt_oss",  # Sinks, biases, clamped experts.
    "kimi_linear",  # KDA beside latents.
    "lfm2",  # A convolution between gates.
    "nemotron_h",  # Experts without a gate.
    "qwen3_next",  # Gated delta, gated attention.
    "smollm3",  # Layers without a rotation.
)
CLOSE = 1e-4
SHARED = {"deepseek_v3": 1, "kimi_linear-groups-narrow-queries": 2}
"""Names, and as how many experts an MLP that all tokens go to is taken."""


def played(model: Model) -> Tensor:
    """Logits of a prefill, of mixed steps, and of decodes."""
    player = Player(model)
    one, other = player.begin(tiny.prompt(30)), player.begin(tiny.prompt(30, seed=2))
    logits = player.step((one, 15))
    logits += player.step((one, 1), (other, 6))
    logits += player.step((other, 1), (one, 1))
    logits += player.step((one, 2))
    return torch.cat(logits)


@pytest.mark.quick(name=["nemotron_h"])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_give_the_same_logits(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type != "cpu":
        pytest.skip("on a device they run anyway: test_on_device")
    wanted = played(tiny.ours(name))
    assert float((played(by_kernels(name, monkeypatch)) - wanted).abs().max()) <= CLOSE


@pytest.mark.full
@pytest.mark.parametrize("name", SHARED)
def test_a_shared_mlp_among_the_experts_gives_the_logits_of_one_beside_them(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type != "cpu":
        pytest.skip("on a device they run anyway: test_on_device")
    torch_code, among = tiny.ours(name), by_kernels(name, monkeypatch)
    monkeypatch.setattr("kvtide.layers.moe.experts_of_mlp", lambda *given: [])
    beside = by_kernels(name, monkeypatch)
    models = (torch_code, among, beside)
    assert [shared_experts(model) for model in models] == [{0}, {SHARED[name]}, {0}]
    wanted, *found = (Player(model).prefill(tiny.prompt(6), 5, 1) for model in models)
    assert all(float((one - wanted).abs().max()) <= CLOSE for one in found)


def shared_experts(model: Model) -> set[int]:
    mixtures = (one.mlp for one in model.layers.values() if isinstance(one.mlp, Mixture))
    return {mixture.beside for mixture in mixtures}
