"""The library's face: a model's memory over device, host and storage, as one cache.

`cache`             the verbs; start here
`cache_config`      what a cache is made with
`lease`             what a caller holds: a match, a lease; what a poll brought to leases
`write_policies`    when pages are copied to the host
`inflight`          arrivals of the index and transfers of bytes, tied together
`storage_tier`      a store attached to the cache
`fetching`          reads from it; `write_behind` writes to it; `store_removals` removes from it
`supplements/`      draft pages for pages that are held without them
`receiving`         pages that a peer writes
`sessions/`         conversations whose prefix must stay; prefixes that are brought up before
`rank_agreement`    agreement between the ranks of one model; `agreed_events` what follows from it
`hardware`          the memory of both tiers and the copier between them
`cache_stats`       counters; `cache_invariants` what must hold
"""

from kvtide.cache.cache import TieredCache
from kvtide.cache.cache_config import CacheConfig, FetchPatience
from kvtide.cache.cache_stats import PageCount, Stats
from kvtide.cache.fetching import Fetch
from kvtide.cache.hardware import Hardware
from kvtide.cache.lease import Lease, Match, Progress
from kvtide.cache.rank_agreement import Agreement, Alone, Ranks, RanksDivergedError
from kvtide.cache.receiving import Receipt, Receiving
from kvtide.cache.sessions.prefetching import Prefetch, Prefetched, SessionTurn
from kvtide.cache.sessions.prompt_lines import PromptChange
from kvtide.cache.storage_tier import StorageStats
from kvtide.cache.supplements.supplements import Supplement
from kvtide.index import Branches, CostBased, EveryPages, LastPage, Namespace
from kvtide.spec import Tier
from kvtide.tiers import Bytes, Layout, Ratio, TierError, Tokens
from kvtide.transfer.lane import TransferError

__all__ = [
    "Agreement",
    "Alone",
    "Branches",
    "Bytes",
    "CacheConfig",
    "CostBased",
    "EveryPages",
    "Fetch",
    "FetchPatience",
    "Hardware",
    "LastPage",
    "Layout",
    "Lease",
    "Match",
    "Namespace",
    "PageCount",
    "Prefetch",
    "Prefetched",
    "Progress",
    "PromptChange",
    "Ranks",
    "RanksDivergedError",
    "Ratio",
    "Receipt",
    "Receiving",
    "SessionTurn",
    "Stats",
    "StorageStats",
    "Supplement",
    "Tier",
    "TierError",
    "TieredCache",
    "Tokens",
    "TransferError",
]
