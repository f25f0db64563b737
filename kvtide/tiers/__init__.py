"""Where bytes live: the device's memory and the host's.

`layout`     what lies where; the only place with strides
`buffers`    a tier's bytes, and how model code sees them: by pool and global layer
`arena`      getting the memory: pinned, in huge pages, or refused with what the machine has
`hot_buffers`  entries of running requests whose pages are on the host
`manifest`   what a rank tells a peer about its rows
`pairing`    which bytes of one side's memory belong where in the other's
`row_copies` those as copies, and as plain runs of certain pages
`tier_size`  how large a tier is: a ratio, bytes or tokens
"""

from kvtide.tiers.arena import (
    Arena,
    MachineMemory,
    TierError,
    device_arena,
    device_memory,
    host_arena,
    machine_memory,
)
from kvtide.tiers.buffers import Buffers
from kvtide.tiers.hot_buffers import HotBuffers
from kvtide.tiers.layout import Arrangement, Layout
from kvtide.tiers.manifest import (
    PAGES,
    RUNNING,
    TAIL,
    Area,
    ManifestError,
    MemoryKind,
    MemoryManifest,
    running_areas,
)
from kvtide.tiers.pairing import Pairing, PairingError, pair
from kvtide.tiers.row_copies import DestinationError, RegionRuns, RowCopy, expand
from kvtide.tiers.tier_size import Bytes, Ratio, TierSize, Tokens, capacity_pages

__all__ = [
    "PAGES",
    "RUNNING",
    "TAIL",
    "Area",
    "Arena",
    "Arrangement",
    "Buffers",
    "Bytes",
    "DestinationError",
    "HotBuffers",
    "Layout",
    "MachineMemory",
    "ManifestError",
    "MemoryKind",
    "MemoryManifest",
    "Pairing",
    "PairingError",
    "Ratio",
    "RegionRuns",
    "RowCopy",
    "TierError",
    "TierSize",
    "Tokens",
    "capacity_pages",
    "device_arena",
    "device_memory",
    "expand",
    "host_arena",
    "machine_memory",
    "pair",
    "running_areas",
]
