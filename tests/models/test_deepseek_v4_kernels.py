"""DeepSeek-V4 by interpreted kernels: the logits that its torch code gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtide.models import Model
from kvtide.spec.families import KVDType
from tests.models.playing import Player
from tests.models.tiny import prompt
from tests.models.with_kernels import by_kernels, in_torch

TINY, OTHER = "deepseek_v4", "deepseek_v4-no-hash-other-shapes"


def together(model: Model) -> Tensor:
    """Two sequences: a prefill beside a decode, then two decodes."""
    player = Player(model)
    one, other = player.begin(prompt(17)), player.begin(prompt(7, seed=4))
    logits = player.step((one, 15))
    for count in (6, 1):
        logits += player.step((one, 1), (other, count))
    return torch.cat(logits)


@pytest.mark.full
@pytest.mark.parametrize("name", [TINY, OTHER])
def test_kernels_give_the_logits_of_the_torch_code(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, wanted = together(by_kernels(name, monkeypatch)), together(in_torch(name))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.full
def test_a_shared_expert_among_the_others_gives_the_logits_of_one_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In layers whose experts are chosen, and in one whose experts a table tells."""
    among = by_kernels(TINY, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr("kvtide.layers.moe.experts_of_mlp", lambda *given: [])
        beside = by_kernels(TINY, monkeypatch)
    for one, count in ((among, 1), (beside, 0)):
        mixtures = [layer.experts for layer in one.layers.values()]
        assert [mixture.beside for mixture in mixtures] == [count] * 3
        assert [mixture.router.table is None for mixture in mixtures] == [False, True, True]
    found, wanted = (Player(one).prefill(prompt(5), 4, 1) for one in (among, beside))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.full
def test_packed_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value on the verge may round the other way in one of the two, and show a little."""
    unrounded, wanted = (together(in_torch(TINY, kv)) for kv in (KVDType.FP32, KVDType.FP8))
    found = together(by_kernels(TINY, monkeypatch, KVDType.FP8))
    rounding = float((wanted - unrounded).abs().mean())
    off = float((found - wanted).abs().mean())
    assert off <= rounding / 50, f"off by {off:.2g}, where rounding moves logits by {rounding:.2g}"
