"""Where every page is, logically: no bytes, no threads, no I/O.

`index`       the verbs; start here
`match`       the one rule of reuse
`leasing`     pin, reserve, commit, release
`moving`      copies between tiers: begun, landed, failed
`outside`     pages that come from a store and go there; `boundaries` the rule over such pages
`room`        eviction, and promising slots
`evict`       the queue of victims; `policies` and `tide` their order, `choice` by name
`placement`   where checkpoints go; `costs` learns it
`books`       the tree and its counts; `node` its unit; `cells` one anchor in one tier
`holding`     what leases and arrivals hold; `pins` what must stay
`hiding`      what nobody may find again
`keys`        namespaces, prompts, page keys; `slots` reserve → take → forfeit
`events`      what was stored and removed; `invariants` what always holds
"""

from kvtide.index.choice import DEFAULT_POLICY, POLICIES
from kvtide.index.costs import CostBased
from kvtide.index.events import Event, EventKind, Listener
from kvtide.index.holding import Arrival, Departing, Departure, Import, Lease
from kvtide.index.index import Index
from kvtide.index.keys import DEFAULT_NAMESPACE, Namespace, Prompt
from kvtide.index.match import Hit, Stop
from kvtide.index.outside import Outline, Wanted
from kvtide.index.placement import Branches, EveryPages, LastPage, Placement

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
    "LastPage",
    "Lease",
    "Listener",
    "Namespace",
    "Outline",
    "Placement",
    "Prompt",
    "Stop",
    "Wanted",
]
