"""Where every page is, logically: no bytes, no threads, no I/O.

`index`             the verbs; start here
`match/`            the one rule of reuse
`leases/`           leases, arrivals, imports and departures, each from beginning to end
`evict/`            allocation, eviction queues, policies
`placement/`        where checkpoints go
`tree/`             the radix tree, its nodes, slots, pins and counts
`keys`              namespaces, prompts, page keys
`events`            what became readable where, and what ceased to be
`index_invariants`  what always holds
"""

from kvtide.index.events import Event, EventKind, EventListener
from kvtide.index.evict.policies import DEFAULT_POLICY, POLICIES
from kvtide.index.index import Index
from kvtide.index.keys import DEFAULT_NAMESPACE, Namespace, Prompt
from kvtide.index.leases.imports_exports import Outline, WantedPages
from kvtide.index.match.match import Hit, Stop
from kvtide.index.placement.learned_placement import CostBased
from kvtide.index.placement.placement import Branches, EveryPages, LastPage, Placement
from kvtide.index.tree.holds import (
    Arrival,
    Departing,
    Departure,
    Import,
    IndexLease,
    LackingPage,
    SidecarImport,
    Taken,
)
from kvtide.index.tree.tree_reading import TreeReading
from kvtide.index.tree.tree_survey import TreeBranch, TreeSurvey

__all__ = [
    "DEFAULT_NAMESPACE",
    "DEFAULT_POLICY",
    "POLICIES",
    "Arrival",
    "Branches",
    "CostBased",
    "Departing",
    "Departure",
    "Event",
    "EventKind",
    "EventListener",
    "EveryPages",
    "Hit",
    "Import",
    "Index",
    "IndexLease",
    "LackingPage",
    "LastPage",
    "Namespace",
    "Outline",
    "Placement",
    "Prompt",
    "SidecarImport",
    "Stop",
    "Taken",
    "TreeBranch",
    "TreeReading",
    "TreeSurvey",
    "WantedPages",
]
