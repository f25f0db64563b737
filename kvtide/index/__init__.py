"""Where every page is, logically: no bytes, no threads, no I/O.

`index`       the verbs; start here
`match`       the one rule of reuse
`leasing`     pin, reserve, commit, release
`moving`      copies between tiers: begun, landed, failed
`outside`     pages that come from a store and go there; `boundaries` the rule over such pages
`room`        eviction, and promising slots
`evict`       the queue of victims; `policies` and `tide` their order, `choice` by name
`placement`   where checkpoints go; `costs` learns it
`tree`       the tree and its counts; `node` its unit; `cells` one anchor in one tier
`holding`     what leases and arrivals hold; `pins` what must stay
`hiding`      what nobody may find again
`keys`        namespaces, prompts, page keys; `slots` reserve → take → forfeit
`events`      what was stored and removed; `invariants` what always holds
"""

from kvtide.index.events import Event, EventKind, Listener
from kvtide.index.evict.policy_registry import DEFAULT_POLICY, POLICIES
from kvtide.index.index import Index
from kvtide.index.keys import DEFAULT_NAMESPACE, Namespace, Prompt
from kvtide.index.leases.imports_exports import Outline, WantedPages
from kvtide.index.match.match import Hit, Stop
from kvtide.index.placement.learned_placement import CostBased
from kvtide.index.placement.placement import Branches, EveryPages, LastPage, Placement
from kvtide.index.tree.holds import Arrival, Departing, Departure, Import, IndexLease

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
    "EveryPages",
    "Hit",
    "Import",
    "Index",
    "IndexLease",
    "LastPage",
    "Listener",
    "Namespace",
    "Outline",
    "Placement",
    "Prompt",
    "Stop",
    "WantedPages",
]
