"""Small int32 copies between device and pinned host memory, by a kernel, not by copy engines.

Copy engines run in order: a step's inputs would wait behind pages that are being loaded, and its
sampled tokens behind pages that are being stored. A kernel accesses host memory beside them.

`_copy`  grid (CTAS,) or fewer; torch reference: `Tensor.copy_`
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.kernels.jit import kernel

BLOCK = 1024
CTAS = 16
"""CTAs that saturate the link."""


def host_copy(source: Tensor, target: Tensor) -> None:
    """Copies int32 numbers between device and pinned host memory.

    The host side must stay allocated and unchanged until the device has executed the copy.
    """
    count = len(target)
    assert source.is_contiguous() and target.is_contiguous() and len(source) == count
    grid = (min(CTAS, triton.cdiv(count, BLOCK)),)
    _copy[grid](source.data_ptr(), target.data_ptr(), count, BLOCK=BLOCK)


@kernel("source", "target", "count")  # type: ignore[untyped-decorator]
def _copy(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    source_ptr = source.to(tl.pointer_type(tl.int32))
    target_ptr = target.to(tl.pointer_type(tl.int32))
    column = tl.arange(0, BLOCK)
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        mask = first + column < count
        data = tl.load(source_ptr + first + column, mask=mask)
        tl.store(target_ptr + first + column, data, mask=mask)
