"""How much cache is worth having: traffic replayed through the index, without a model.

`traces`     requests in order, read from a file; `workloads` made-up ones
`replay`     a trace through the real index: hits, moves, misses, and times from assumed rates
`capacity`   the hit rate at every capacity in one pass, and its knee
`study`      the replays a plan is made of: as asked, other placements, other sizes
`curve`      charts as data; `page` draws them for HTML, `charts` as PNG, and writes both
"""
