"""Elementwise device functions in fp32, without a grid. Torch reference: `layers/elementwise.py`.

They use only what every device has. Where they overflow, they overflow to their limit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):  # type: ignore[no-untyped-def]
    """log(1 + exp x), also exact where the exponential is small."""
    small = tl.exp(-tl.abs(x))
    whole = 1.0 + small
    left = tl.where(whole == 1.0, 1.0, whole - 1.0)
    return tl.where(whole == 1.0, small, tl.log(whole) * (small / left)) + tl.maximum(x, 0.0)


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    folded = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - folded) / (1.0 + folded)
    return tl.where(x < 0, -size, size)


@triton.jit  # type: ignore[untyped-decorator]
def activated(x, gain, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """An activation by its name in `layers/elementwise.py`; `gain` is the slope of a swish."""
    if KIND == "swish":
        result = x / (1.0 + tl.exp(-gain * x))
    elif KIND == "sigmoid":
        result = sigmoid(x)
    elif KIND == "gelu_tanh":
        # (1 + tanh z) / 2 is σ(2z); the number is √(8 / π).
        result = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(KIND == "relu_squared")
        result = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return result
