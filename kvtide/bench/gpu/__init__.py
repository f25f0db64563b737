"""How fast models are served on a GPU, with the cache and without: random weights of real shapes.

`shapes`             model configs, and random weights for them
`engine_bed`         an engine over one of them, and request timing
`ceilings`           the limits of the machine: GEMM, memory bandwidth, host link
`ttft`               time to first token, by the tier that holds the prefix
`history`            a CUDA graph of a decode step over a random KV history
`throughput`         prefill and decode beside their FLOPs and bytes
`overheads`          the price of write-through backup and of sampling
`constrained`        the price of grammars in half of a batch
`drafted_shapes`     the same configs beside a draft: EAGLE3, MTP
`draft_rounds`       a round of speculation beside a decode step
`multi_turn`         many conversations on a device with too little memory
`sparse`             hot residency beside pages that are all on the device
`transformers_peer`  the same model in `transformers`
`plot`               bar charts
"""
