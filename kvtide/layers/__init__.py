"""What models are made of: layers over paged state, on any device.

`step`          what the engine hands to a forward pass
`forward`       a step as layers see it: state read and written through page tables
`packing`       what layers see of an entry, and how a pool stores it
`blueprint`     what layers are built from: weights by name, the config, the declared memory
`tensor_ranks`  tensor parallelism; collectives, and send and receive between stages
`elementwise`   functions of rows: activations and norms

Layers
`dense`             projections, norms, the gated MLP
`self_attention`    attention by head
`rope`              rotary position embeddings
`mla`               latent attention
`compressor`        compressed streams
`mamba`             Mamba2; `causal_conv` has the short convolution
`linear_attention`  gated delta and KDA
`moe`               routers and experts
`hyper_connections` residual streams around a sublayer

The operations that layers call, in four folders
`backend`    the operations, and which implementation of them runs
`reference`  each operation as a torch reference
`kernels`    each operation as a Triton kernel, under the file name of its reference
`native`     operations as C++ kernels, for a CPU
"""

from kvtide.layers.backend.arithmetic import Arithmetic, Batched, Deterministic
from kvtide.layers.backend.choice import choose
from kvtide.layers.backend.ops import Ops
from kvtide.layers.blueprint import Blueprint, Weights
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.self_attention import Attention
from kvtide.layers.step import HOT_ROWS, HotPool, Rows, Step, host_table

__all__ = [
    "HOT_ROWS",
    "Arithmetic",
    "Attention",
    "Batched",
    "Blueprint",
    "Deterministic",
    "ForwardPass",
    "HotPool",
    "Ops",
    "Place",
    "Rows",
    "Step",
    "Weights",
    "choose",
    "host_table",
]
