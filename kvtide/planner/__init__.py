"""The capacity planner: traffic replayed through the index, without a model.

`traces`      requests in order, read from a file; `workloads` makes synthetic ones,
              of `agent_sessions` and `synthetic_texts`
`replay`      a trace through the real index: hits, moves, misses, and times from assumed rates
`storage_admission`  when a replay copies pages down, and what storage admits
`hit_curve`   the hit rate at every capacity in one pass, and its knee
`study`       the replays of a plan: the given tiers, other placements, other sizes
`handoff_plan`  how many prefill and decode machines a load needs
`chart_data`  charts as data; `html_page` draws them as SVG, `charts` as PNG, and writes files
"""
