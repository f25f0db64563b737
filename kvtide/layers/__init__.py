"""What models are made of: layers over paged state, on any device.

`step`          what the engine hands to a forward pass
`forward`       a step as layers see it: state read and written through page tables
`packing`       what layers see of an entry, and how a pool stores it
`blueprint`     what layers are built from: weights by name, the config, the declared memory
`tensor_ranks`  tensor parallelism

Which implementation runs
`ops`           the operations that layers call
`torch_ops`     each of them by its torch reference
`triton_ops`    each of them by its kernel
`backend`       chooses one of the two, once per model
`kernel_args`   what operations take beside tensors
`arithmetic`    the order of sums in references: batched, or deterministic to the bit
`kernels`       Triton kernels

Torch references, named as their kernels
`attention` (`kernels/attention_*`), `mla`, `indexer`, `compressor`, `qkv`, `rope`, `kv_write`,
`causal_conv`, `ssd_scan`, `gated_delta`, `gated_norm`, `moe_routing`, `moe_experts`,
`hyper_connections`, `elementwise`

Layers
`dense`             projections, norms, the gated MLP
`self_attention`    attention by head
`mla`               latent attention
`compressor`        compressed streams
`mamba`             Mamba2; `causal_conv` has the short convolution
`linear_attention`  gated delta and KDA
`moe`               routers and experts
`hyper_connections` residual streams around a sublayer
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
