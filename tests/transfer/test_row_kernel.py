"""The kernel copies rows at any address, as the CPU does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtide.transfer import row_kernel
from kvtide.transfer.peer.cpu_copies import copies
from kvtide.transfer.row_kernel import STEP_BYTES, RowKernel

BYTES = 1 << 18


def rows_of(sizes: list[int], step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Offsets of rows that lie apart, in another order on the other side."""
    random = np.random.default_rng(len(sizes))
    places = np.cumsum([0, *(size + step for size in sizes)])[:-1]
    order = random.permutation(len(sizes))
    target = np.empty_like(places)
    target[order] = np.cumsum([0, *(sizes[n] + step for n in order)])[:-1]
    return places, target, np.array(sizes, np.int64)


@pytest.mark.parametrize(
    ("sizes", "step"),
    [
        ([1], 1),
        ([3, 1, 700, 2], 1),
        ([6] * 40, 2),
        ([12] * 17, 4),
        ([584] * 33, 8),
        ([STEP_BYTES] * 9, 16),
        ([3 * STEP_BYTES + 16, 16, 48, 2 * STEP_BYTES] * 7, 16),
    ],
)
def test_the_kernel_copies_what_the_reference_copies(
    sizes: list[int], step: int, device: torch.device
) -> None:
    source, target, lengths = rows_of(sizes, step)
    given = torch.from_numpy(np.random.default_rng(1).integers(1, 256, BYTES, np.uint8)).to(device)
    there = torch.zeros(BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    expected = torch.zeros(BYTES, dtype=torch.uint8)
    here = given.cpu()
    for _ in copies(here.data_ptr() + source, expected.data_ptr() + target, lengths):
        pass
    RowKernel(device).copy(given.data_ptr() + source, there.data_ptr() + target, lengths)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(there, expected)


def test_a_long_list_takes_several_launches(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_kernel, "LIST_ROWS", 16)
    kernel = RowKernel(device)
    source, target, lengths = rows_of([32] * 50, 16)
    given = torch.arange(BYTES, dtype=torch.int64, device=device).to(torch.uint8)
    there = torch.zeros(BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for _ in range(3):
        kernel.copy(given.data_ptr() + source, there.data_ptr() + target, lengths)
    if device.type == "cuda":
        torch.cuda.synchronize()
    for a, b in zip(source, target, strict=True):
        assert torch.equal(there[b : b + 32], given[a : a + 32].cpu())
    if device.type == "cpu":
        assert len(kernel._lists) == 1, "a list that was read is used again"


def test_without_rows_nothing_is_launched(device: torch.device) -> None:
    none = np.zeros(0, np.int64)
    RowKernel(device).copy(none, none, none)
