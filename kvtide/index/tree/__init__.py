"""The radix tree of all pages, and every count that must agree with it.

`tree`      the small steps (hold, drop, split …); only it, `joining` and `pins` change a node
`joining`   merging nodes that differ no more
`node`      a run of pages on which everything is the same: the unit of the tree
`node_keys`  the keys of its pages
`cells`     one anchor in one tier: slots, eviction queue, page counts
`slots`     reserve → take → forfeit
`holds`     what leases, arrivals, imports and departures hold
`pins`      which pages must stay
`presence`  which pages carry their optional sidecars
`event_source`  events from nodes, without hashing
`tree_reading`  all that events would tell of the tree, read in slices
`tree_survey`  the tree in outline, found a few nodes at a time
"""
