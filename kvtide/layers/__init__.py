"""What models are made of: torch on any device, over paged state.

`step`        what a forward pass is given
`forward`     a step as layers see it: state read and written through page tables
`packing`     what layers see of an entry, and how a pool stores it
`arithmetic`  the order of sums, chosen once: batched, or deterministic to the bit
`attending`, `heads`, `selecting`, `scan`, `delta`, `elementary`, `rope`   the arithmetic of layers,
              without pages
`blueprint`   what layers are built from: weights by name, the config, the declared memory
`ranks`       those that compute a layer together
`dense`, `attention`, `latent`, `compressing`, `recurrent`, `associative`, `moe`, `streams`   layers
`programs`    what layers do, as programs of a CUDA device
"""

from kvtide.layers.arithmetic import Arithmetic, Batched, Deterministic
from kvtide.layers.backend import choose
from kvtide.layers.blueprint import Blueprint, Weights
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.ops import Ops
from kvtide.layers.self_attention import Attention
from kvtide.layers.step import Rows, Step

__all__ = [
    "Arithmetic",
    "Attention",
    "Batched",
    "Blueprint",
    "Deterministic",
    "ForwardPass",
    "Ops",
    "Place",
    "Rows",
    "Step",
    "Weights",
    "choose",
]
