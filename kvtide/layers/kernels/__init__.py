"""Triton kernels of the layers. A kernel and its torch reference have the same file name, if any.

Triton is imported here and by the kernels that copy in `transfer`: only a CUDA device needs it.
`layers/backend/triton_ops.py` offers the kernels to layers, and `layers/backend/choice.py` decides
by device. All kernels also run in Triton's interpreter on a CPU, where tests compare them with the
torch reference.

| file | computes | torch reference (in `layers/reference/`) |
|---|---|---|
| `attention/attention_prefill` | paged FlashAttention of prefill; entry point | `attention` |
| `attention/prefill_schedule` | which CTA of prefill takes which blocks and splits | — |
| `attention/attention_decode` | paged decode attention, split-KV (Flash-Decoding) | `attention` |
| `attention/attention_cascade` | cascade: the shared prefix of a decode batch | `attention` |
| `attention/attention_tiles` | online softmax over tiles of keys, for these three | `attention` |
| `attention/mla` | paged attention over MLA latents, or a window and compressed entries | `mla` |
| `attention/mla_tiles` | online softmax and split-KV of `mla` | `attention` |
| `attention/indexer` | scores and top-k of sparse attention | `indexer` |
| `swap_in` | selected entries of a hot pool to the device, new ones to the host | `swap_in` |
| `swap_plan` | hits, misses and slots of a swap-in | `swap_in` |
| `compressor` | DeepSeek-V4's compressed entries | `compressor` |
| `qkv` | norms and rope of queries and keys, and the KV write | `qkv` |
| `kv_write` | packing and writing of entries into pages | `kv_write` |
| `rope` | norm and rope of interleaved pairs | `layers/rope` |
| `recurrent/causal_conv` | causal depthwise convolution | `causal_conv` |
| `recurrent/ssd_scan` | Mamba2's selective scan (SSD) | `ssd_scan` |
| `recurrent/gated_delta` | the gated delta rule, and KDA | `gated_delta` |
| `recurrent/gated_norm` | output norm and gate of recurrent layers | `gated_norm` |
| `hyper_connections` | mixing of residual streams | `hyper_connections` |
| `moe_experts` | grouped GEMM of experts | `moe_experts` |
| `moe_routing` | top-k experts and their weights | `moe_routing` |
| `norms` | RMS norm, layer norm, residual add, GLU | `layers/elementwise` |
| `sampling` | greedy argmax, and sampling from candidates | `engine/sampling/sampler` |
| `host_copy` | small copies between host and device | `Tensor.copy_` |
| `elementwise` | device functions of single elements | `layers/elementwise` |
| `query_blocks` | blocks of new tokens, for kernels that take several | — |
| `grid` | sizes of tiles and grids, SM count | — |
| `jit` | the decorator of kernels: what Triton may specialize on | — |
"""
