"""kvtide inside other engines. Each module is imported by its engine's users, none by kvtide.

`transformers`       `PrefixCache`: prefixes of `model.generate` over device, host and a store
`lmcache`            `KvtideL2Adapter`: an L2 adapter of its server over any store
`sglang`             `KvtideStorage`: a `dynamic` backend of HiCache over any store
`vllm`               `KvtideTier`: a secondary tier of the tiering offload manager over any store
`vllm_connector`     `KvtideConnector`: a KV connector of a vLLM on CPUs over any store
`page_objects`       pages of another engine as objects of a store: keys, labels, checksums
`cache_layers`       what a cache of transformers holds, as pools; its tensors to pages and back
`cache_parts`        what one layer of it keeps in one pool
`page_tasks`         tasks over pages, on threads, that an engine submits and asks about later
`block_plan`         a connector's half in the scheduler: look-ups, what to load and to save
`block_moves`        its half in a worker: blocks of the cache to objects and back
`engine_settings`    what the settings of every plug-in have in common
`engine_versions`    the versions that an integration was tested with, checked before it starts
`engine_metrics`     counters for Prometheus, in the registry that the engine exports

Importing this package imports no engine. [INTEGRATIONS](../../docs/INTEGRATIONS.md) is the guide.
"""
