"""KV events: which blocks this server holds, published as vLLM does, for routers and indexers.

    index ──events──▶ EventQueue ──feeds──▶ publisher_process: blocks, hashes ──ZMQ PUB──▶ consumers
    (engine thread)   (server's process)     ▲       │ replay buffer ◀── ZMQ ROUTER: "from n on"
                                             └─ journals of the store's folder

In the server's process:

`kv_event_settings`  the flags `--kv-events…`
`publishing`         a server's publisher: it follows the index and the attached store
`publisher`, `publisher_counts`  the process's other end, which feeds it; what has been done
`index_feed`         the index's events, bounded, in order, packed
`kv_event_metrics`   counts for Prometheus

In the publisher's:

`publisher_process`  its loop
`block_table`        the index's changes as blocks that appear on a medium or leave it
`folder_pages`       which of these blocks the store's folder has
`block_hashes`       the hash of a block: vLLM's, or our page keys
`event_encoding`     changes of blocks as vLLM's maps in msgpack
`broadcast`, `replay_buffer`  the sockets; the last batches, by number

In both: `publisher_messages`, what they exchange; `kv_groups`, a model's anchors as vLLM's KV cache
groups, and media. Only `publisher_process`, `broadcast` and `event_encoding` import zmq or msgpack,
and nothing that the process imports needs torch.
"""
