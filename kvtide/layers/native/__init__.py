"""Operations on a CPU by C++ kernels, compiled on the user's machine at the first start.

`build`              compiles and loads the kernels; None where that is not possible
`c_functions`        their C functions, and the structures that these take
`layer_calls`        what calls take of a layer: made once for its place
`native_ops`         the operations of layers by them; the torch references do the rest
`native_arithmetic`  GEMMs by them, also of weights that stay packed

| file | computes | torch reference (in `layers/reference/`) |
|---|---|---|
| `attention.cpp` | attention over pages, and over MLA latents | `attention`, `mla` |
| `linear.cpp` | a GEMM; of few rows, it reads every weight once | `backend/arithmetic` |
| `packed.cpp` | the same of packed weights, in the forms of `packed.h` | `models/gguf/quants` |
| `gemm.cpp` | GEMMs of many rows, for both: panels that stay in the cache | `backend/arithmetic` |
| `layer.cpp` | attention and gated MLPs with their projections | `backend/torch_ops` |
| `rows.cpp` | norms, gated activations, heads into pages | `layers/elementwise`, `qkv` |
| `recurrent.cpp` | single steps of recurrent states | `gated_delta`, `ssd_scan` |
| `calls.h` | the C functions, and the structures that they take | — |
| `vectors.h`, `room.h` | vectors as wide as the CPU has them; memory between calls | — |

Kernels compute in fp32, in batched arithmetic. A row's result may depend on the other rows of its
step in the last bits, as it does with torch.
"""
