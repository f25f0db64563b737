"""Ranks that share one device, over gloo through host memory, say what one rank says there.

On a GPU (`gpu/ranks`) models run kernels in float32. NCCL is tried with a world of one: two of its
ranks cannot have the same GPU.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.engine import rank_device
from tests.engine.test_ranks import BOTH, PP, TP, Shape
from tests.models.tiny import oracle
from tests.worlds import check, play

NAMES = ("llama", "gpt_oss", "falcon_h1", "deepseek_v4", "qwen3_moe", "deepseek_v32")


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest, device: torch.device) -> tuple[str, ...]:
    """All of them on a GPU; `test_ranks` has them on a CPU."""
    return NAMES if device.type == "cuda" else NAMES[:1]


@pytest.fixture(scope="module")
def expected(
    tmp_path_factory: pytest.TempPathFactory, names: tuple[str, ...], device: torch.device
) -> Path:
    """The checkpoints, and what one rank does with them."""
    folder = tmp_path_factory.mktemp("one")
    for name in names:
        oracle(name).save_pretrained(folder / "models" / name)
    torch.save(rank_device.expected(folder, device, names), folder / "expected")
    return folder


@pytest.mark.full
@pytest.mark.parametrize("shape", [PP, TP, BOTH], ids=str)
def test_ranks_that_share_a_device_are_one(
    shape: Shape,
    names: tuple[str, ...],
    expected: Path,
    device: torch.device,
    tmp_path: Path,
) -> None:
    for name in ("models", "expected"):
        (tmp_path / name).symlink_to(expected / name)
    kind = partial(rank_device.DeviceGrid, stages=shape.stages, kind=device.type)
    scenarios = rank_device.scenarios(names)
    reports = play(shape.stages * shape.tensor_ranks, tmp_path, scenarios, kind)
    for name in scenarios:
        check(reports, name)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_world_of_one_exchanges_with_itself(
    backend: str, device: torch.device, tmp_path: Path
) -> None:
    if backend == "nccl" and device.type != "cuda":
        pytest.skip("NCCL needs a GPU: --device cuda")
    kind = partial(rank_device.DeviceGrid, stages=1, kind=device.type, backend=backend)
    scenarios = rank_device.exchanges()
    reports = play(1, tmp_path, scenarios, kind)
    for name in scenarios:
        check(reports, name)
