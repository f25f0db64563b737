"""Greedy sampling gives the argmax and the log-sum-exp of torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtide.layers.kernels import sampling
from kvtide.layers.kernels.sampling import greedy


def some(shape: tuple[int, ...], device: torch.device) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 2
    return values.to(device)


def check(logits: Tensor, scales: Tensor | None = None) -> None:
    found, wide = greedy(logits, scales), logits.double()
    highest = wide.amax(-1)
    assert found[:, 0].tolist() == [row.index(max(row)) for row in wide.tolist()]
    assert torch.equal(found[:, 1], highest)
    scaled = wide if scales is None else wide * scales[:, None]
    torch.testing.assert_close(found[:, 2], scaled.logsumexp(-1), rtol=0, atol=3e-6)


def test_argmax_and_log_sum_exp(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "TILE_COLUMNS", 64)
    for shape in ((1, 5), (3, 64), (2, 65), (2, 300)):
        logits = some(shape, device) * 5
        check(logits)
        check(logits.repeat(1, 2)[:, 3:])
        check(logits, torch.rand(len(logits), device=device) + 0.1)


def test_of_equal_logits_the_first_is_the_argmax(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "TILE_COLUMNS", 16)
    logits = torch.zeros(3, 70, device=device)
    logits[1, [20, 25, 60]] = 3.0
    logits[2, 69] = 1.0
    check(logits)
    logits[1, 32:48] = -torch.inf
    check(logits)


def test_published_vocabularies(device: torch.device) -> None:
    sizes = [(1, 9000)] if device.type == "cpu" else [(64, 151_936), (1, 262_208), (300, 32_000)]
    for size in sizes:
        check(some(size, device) * 4)
