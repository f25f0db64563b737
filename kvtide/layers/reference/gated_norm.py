"""What closes a recurrent layer: a norm by group of channels and a gate, in either order."""

from __future__ import annotations

from torch import Tensor

from kvtide.layers.backend.arithmetic import Arithmetic
from kvtide.layers.backend.kernel_args import GatedNorm
from kvtide.layers.elementwise import rms_norm


def gated_norm(arithmetic: Arithmetic, x: Tensor, gate: Tensor, how: GatedNorm) -> Tensor:
    """Of (tokens, channels) each, in the dtype of the gate."""

    def normed(x: Tensor) -> Tensor:
        if (weight := how.weight) is None:
            return x
        grouped = x.view(len(x), how.groups, -1)
        return arithmetic.rowwise(lambda rows: rms_norm(rows, weight, how.eps), grouped).flatten(1)

    opened = arithmetic.rowwise(how.activation, gate.float())
    closed = normed(x) * opened if how.norm_first else normed(x * opened)
    return closed.to(gate.dtype)
