"""Mixing of streams by kernel: what the torch code gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kvtide.layers import Blueprint, Ops
from kvtide.layers.backend.arithmetic import Batched
from kvtide.layers.backend.torch_ops import TorchOps
from kvtide.layers.backend.triton_ops import TritonOps
from kvtide.layers.dense import RMSNorm
from kvtide.layers.hyper_connections import HyperConnection, HyperHead
from kvtide.layers.kernels import hyper_connections as kernels
from kvtide.spec import ModelMemory, PoolSpec
from kvtide.spec.config import Config
from kvtide.spec.pool import NOTHING
from tests.layers.kernels.repeating import same_again

MEMORY = ModelMemory("toy", 1, (PoolSpec("kv", (), NOTHING),), 1)


@dataclass(frozen=True)
class Case:
    count: int
    width: int
    rounds: int = 20


CASES = {"four": Case(4, 96), "two": Case(2, 40, rounds=3), "long": Case(4, 520, rounds=2)}
LARGE = {"published": Case(4, 4096), "pro": Case(4, 7168)}


@dataclass(frozen=True)
class Given:
    """Weights of both, and streams."""

    case: Case
    tokens: int
    dtype: torch.dtype
    device: torch.device

    def some(self, *shape: int, seed: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device)

    @property
    def tensors(self) -> dict[str, Tensor]:
        count, inner = self.case.count, self.case.count * self.case.width
        outputs = count * (2 + count)
        return {
            "hc_fn": self.some(outputs, inner, seed=1) * 2 * inner**-0.5,
            "hc_scale": self.some(3, seed=2).abs() + 0.5,
            "hc_base": self.some(outputs, seed=3),
            "end_fn": self.some(count, inner, seed=4) * 2 * inner**-0.5,
            "end_scale": self.some(1, seed=5).abs() + 0.5,
            "end_base": self.some(count, seed=6),
        }

    def get(self, name: str) -> Tensor:
        return self.tensors[name]

    def has(self, name: str) -> bool:
        return name in self.tensors

    def made(self, kind: Callable, ops: Ops, dtype: torch.dtype):
        names = {"hc_mult": self.case.count, "hc_sinkhorn_iters": self.case.rounds}
        config = Config("toy", {**names, "hc_eps": 1e-6, "rms_norm_eps": 1e-6})
        blueprint = Blueprint(config, self, MEMORY, ops, dtype)
        return kind(blueprint, "hc_" if kind is HyperConnection else "end_")

    @property
    def streams(self) -> Tensor:
        shape = (self.tokens, self.case.count, self.case.width)
        return (self.some(*shape, seed=7) * self.some(*shape[:2], 1, seed=8)).to(self.dtype)

    @property
    def norm(self) -> RMSNorm:
        weight = (1 + 0.2 * self.some(self.case.width, seed=9)).to(self.dtype)
        return RMSNorm(TorchOps(Batched()), weight, 1e-5)


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """In half precision what comes out is rounded once or twice, each time perhaps otherwise."""
    if dtype is torch.float32:
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
    else:
        torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-6, atol=1e-2)
        assert (found.float() - wanted.float()).abs().mean() < 2e-3 * wanted.float().abs().mean()


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*CASES, *LARGE])
@pytest.mark.parametrize("tokens", [1, 3, 18, 1500])
def test_kernels_give_what_the_torch_code_gives(
    tokens: int, case: str, dtype: torch.dtype, device: torch.device
) -> None:
    slow = case in LARGE or tokens > (20 if case == "two" else 3)
    if device.type != "cuda" and slow:
        pytest.skip("an interpreter would take minutes: --device cuda")
    if device.type != "cuda" and dtype is torch.bfloat16:
        pytest.skip("an interpreter has no GEMM in bf16: --device cuda")
    given = Given({**CASES, **LARGE}[case], tokens, dtype, device)
    kernel, plain = (
        given.made(HyperConnection, how, dtype) for how in (TritonOps(), TorchOps(Batched()))
    )
    assert kernel.ops.uses_kernels and not plain.ops.uses_kernels
    streams = given.streams
    x, weights = same_again(lambda: kernel.normed(streams, given.norm))
    wanted_x, wanted_weights = plain.normed(streams, given.norm)
    torch.testing.assert_close(weights, wanted_weights, rtol=2e-4, atol=2e-5)
    assert_near(x, wanted_x, dtype)
    sublayer = given.some(tokens, given.case.width, seed=10).to(dtype)
    spread = same_again(lambda: kernel.spread(sublayer, streams, wanted_weights))
    assert_near(spread, plain.spread(sublayer, streams, wanted_weights), dtype)
    end, plain_end = (
        given.made(HyperHead, how, dtype) for how in (TritonOps(), TorchOps(Batched()))
    )
    assert_near(same_again(lambda: end(streams)), plain_end(streams), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", LARGE)
@pytest.mark.parametrize("tokens", [600, 1024, 4096])
def test_many_tokens_have_the_same_bits_every_time(
    tokens: int, case: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Where a loop races few elements differ, and not every time."""
    if device.type != "cuda":
        pytest.skip("an interpreter would take minutes: --device cuda")
    given = Given(LARGE[case], tokens, dtype, device)
    kernel, streams, norm = (
        given.made(HyperConnection, TritonOps(), dtype),
        given.streams,
        given.norm,
    )
    sublayer = given.some(tokens, given.case.width, seed=10).to(dtype)
    _, weights = same_again(lambda: kernel.normed(streams, norm), 20)
    same_again(lambda: kernel.spread(sublayer, streams, weights), 20)


def test_two_halves_are_one_projection(device: torch.device) -> None:
    given = Given(CASES["four"], 5, torch.float32, device)
    whole = given.made(HyperConnection, TritonOps(), torch.float32)
    high = whole.mixing.project.bfloat16().float()
    both = torch.cat([high, whole.mixing.project - high])
    found = kernels.gather_streams(
        replace(whole.mixing, project=both), given.streams, given.norm.params
    )
    for ours, theirs in zip(found, whole.normed(given.streams, given.norm), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


def test_several_tiles_give_the_same(device: torch.device) -> None:
    given = Given(CASES["two"], 70, torch.float32, device)
    kernel, plain = (
        given.made(HyperConnection, how, torch.float32)
        for how in (TritonOps(), TorchOps(Batched()))
    )
    found, wanted = (one.normed(given.streams, given.norm) for one in (kernel, plain))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
