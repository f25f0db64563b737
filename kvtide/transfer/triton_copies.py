"""Kernels that copy, for the modules that choose between these and other copies.

By name, for Triton is installed only where there is a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Protocol

import torch

from kvtide.transfer.lane import Backend
from kvtide.transfer.strided import Addresses, PieceTable

PageCopy = Callable[[int, int], None]
"""Copies a page from a slot to a slot."""


class RowCopies(Protocol):
    """As `row_kernel.RowKernel`."""

    def warm_up(self) -> None: ...

    def copy(self, source: Addresses, target: Addresses, sizes: Addresses) -> None: ...


def strided_kernel(device: torch.device) -> Backend:
    kernel: Backend = import_module("kvtide.transfer.copy_kernel").Kernel(device)
    return kernel


def page_copy(table: PieceTable, device: torch.device) -> PageCopy:
    copy: PageCopy = import_module("kvtide.transfer.copy_kernel").page_copy(table, device)
    return copy


def row_kernel(device: torch.device) -> RowCopies:
    kernel: RowCopies = import_module("kvtide.transfer.row_kernel").RowKernel(device)
    return kernel
