"""What a model keeps between tokens, as data.

`pool`      one kind of state: cost of a page, whose slots, what a resume needs
`memory`    all pools of a model; anchors and sidecars, drafts, slices for ranks
`config`    a published `config.json`, read field by field
`families`  from such a config to a memory, one function per family
`catalog`   models known by name
`residency` which pools stay on the host while requests run
`tier`      device, host, storage; the values that request copies
`sizing`    how many pages of every anchor so many bytes hold
"""

from kvtide.spec.memory import ModelMemory, RankShape, RankSlice, with_draft
from kvtide.spec.pool import ALL, DType, Encoding, Entry, Field, PoolSpec, Reach, Reuse, SpecError
from kvtide.spec.tier import PageMove, Slots, Tier

__all__ = [
    "ALL",
    "DType",
    "Encoding",
    "Entry",
    "Field",
    "ModelMemory",
    "PageMove",
    "PoolSpec",
    "RankShape",
    "RankSlice",
    "Reach",
    "Reuse",
    "Slots",
    "SpecError",
    "Tier",
    "with_draft",
]
