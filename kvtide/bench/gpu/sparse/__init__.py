"""Hot residency on a GPU, beside pages that are all on the device.

`sparse_residency`  decode, prefill and first tokens, by real engines
`driven_choices`    selections of a given overlap, in the place of an indexer's own
`hot_reads`         what was on the device of what queries selected
`host_span`         how much host memory rows come from, and in which pages it is
`row_reads`         scattered rows from pinned host memory, by a swap-in
"""
