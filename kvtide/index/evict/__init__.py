"""Which pages go when a cell is full.

`allocation`      promises slots, and evicts to make room for them
`eviction_queue`  the evictable nodes of a cell, in the order of its policy
`policies`        the eviction policies, by name
`reuse_rates`     how soon pages are used again, learned from the traffic
`use_history`     the uses that the rates are learned from, and what is left of evicted branches
"""
