"""Prefill → decode handoff: one server prefills a prompt, another decodes it.

`handoffs`       both sides, as the engine calls them
`handoff_state`  the states of a handoff, as a diagram and a table
`messages`       what the two servers exchange; `request_fields` is a request as JSON
`handoff_source`  what a request says about its handoff
`decode_handoffs`   the decode side asks a peer for missing pages: slots, what lands, the tail
`prefill_handoffs`  the prefill side writes to the peer what it has computed, at once
`page_writer`    from computed pages to writes into a peer's memory
`own_memory`     this rank's memory as a peer sees it
`reports`        what all ranks of the prefill side have written
`rank_exchange`  bytes that every rank has, given to all ranks

Connections between the servers, and the fields of their users, are `server.handoff`'s.
"""
