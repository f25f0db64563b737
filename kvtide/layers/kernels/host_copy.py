"""Numbers between host and device, carried by a program and not by the engines that copy.

Those do one thing after another: what a step brings along would wait for the pages of prefixes that
are on their way, and what it chose for pages that leave. A program reads and writes the host's
memory beside them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.kernels.jit import kernel

BLOCK = 1024
PROGRAMS = 16
"""Enough for what the link takes."""


def host_copy(source: Tensor, target: Tensor) -> None:
    """Copy int32 numbers, one side of which is the device's and the other pinned memory of the
    host. That must stay, and stay as it is, until the device has done so."""
    count = len(target)
    assert source.is_contiguous() and target.is_contiguous() and len(source) == count
    grid = (min(PROGRAMS, triton.cdiv(count, BLOCK)),)
    _carry[grid](source.data_ptr(), target.data_ptr(), count, BLOCK=BLOCK)


@kernel("source", "target", "count")  # type: ignore[untyped-decorator]
def _carry(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    theirs = source.to(tl.pointer_type(tl.int32))
    ours = target.to(tl.pointer_type(tl.int32))
    column = tl.arange(0, BLOCK)
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        inside = first + column < count
        told = tl.load(theirs + first + column, mask=inside)
        tl.store(ours + first + column, told, mask=inside)
