"""Which pages go when a cell is full.

`allocation`      promises slots, and evicts to make room for them
`eviction_queue`  the evictable nodes of a cell, and what a policy has to answer
`policies`        the registry of policies by name, and the textbook ones
`tide`            the default policy
"""
