"""Greedy sampling gives the argmax and the log-sum-exp of torch; sampled rows are torch's too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtide.engine.sampling import sampler
from kvtide.engine.sampling.sampler import SamplingInput, sampling_columns
from kvtide.engine.sampling.sampling_params import SamplingParams
from kvtide.layers.kernels import sampling
from kvtide.layers.kernels.sampling import greedy, sample_rows

# A greedy row may have a scale of 0; what comes of it is not used.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")


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
        check(logits, some((len(logits),), device).abs() + 0.1)


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


def check_samples(logits: Tensor, ids: Tensor | None = None) -> None:
    """At several temperatures, with rows between them that take the argmax."""
    inputs = [
        SamplingInput(SamplingParams(temperature=(0.0, 0.5, 1.0, 4.0)[n % 4], seed=n), [0], [0, 1])
        for n in range(len(logits))
    ]
    columns = torch.from_numpy(sampling_columns(inputs, logits.shape[1]))
    columns[:5, columns[5] > 0] = 0  # As draft graphs say that a row is greedy.
    wanted = sampler._sample_rows(logits.cpu(), columns, None if ids is None else ids.cpu(), None)
    found = sample_rows(logits, columns.to(logits.device), ids)
    assert found.tolist() == wanted.tolist()


def test_sampled_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "NOISE_COLUMNS", 64)
    for shape in ((1, 5), (4, 64), (5, 65), (8, 200)):
        logits = some(shape, device)
        check_samples(logits)
        check_samples(logits.repeat(1, 2)[:, 3:])
        order = some((shape[1],), device).argsort()
        check_samples(logits, order * 7)
        logits[:, 1:] = -torch.inf
        check_samples(logits)
        check_samples(torch.zeros(shape, device=device))


def test_sampled_rows_of_published_vocabularies(device: torch.device) -> None:
    sizes = [(4, 9000)] if device.type == "cpu" else [(64, 151_936), (4, 262_208), (300, 32_000)]
    for size in sizes:
        check_samples(some(size, device) * 3)
