"""KV events: which blocks this server holds, published as vLLM does, for routers and indexers.

    index ──events──▶ bounded queue ──▶ publisher's thread: blocks, hashes ──ZMQ PUB──▶ consumers
    (engine thread)                        │ replay buffer ◀──── ZMQ ROUTER: "from number n on"

`kv_event_settings`  the flags `--kv-events…`
`kv_groups`          a model's anchors as vLLM's KV cache groups; media
`block_hashes`       the hash of a block: vLLM's, or our page keys
`block_table`        the index's events as blocks that appear on a medium or leave it
`event_encoding`     those as vLLM's maps in msgpack
`replay_buffer`      the last batches, by number
`publisher`, `publisher_counts`  the thread that has the sockets
`open_publisher`, `publishing`     opening it; for a server
`kv_event_metrics`   its counts for Prometheus

Only `event_encoding` and `publisher` import msgpack and zmq; `open_publisher` imports them when a
server publishes.
"""
