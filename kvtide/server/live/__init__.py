"""What a running server shows of itself: `GET /`, `GET /admin/live`, and `kvtide top`.

`live_routes`     the page, and the stream of snapshots behind it
`live_publisher`  one snapshot per interval for all viewers; nothing without a viewer
`engine_snapshot` engine and cache at one instant, taken on the engine's thread in bounded time
`stored_branches` which branches of the tree a store has
`request_rows`    running and waiting requests, and why they found no longer prefix
`finished`        what finished requests leave: TTFT by origin, misses, tokens not computed
`page.html`       the page; `uplot/` the library that draws its charts, with its licence
"""
