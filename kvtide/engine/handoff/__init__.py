"""Prefill → decode handoff: one server prefills a prompt, another decodes it.

`handoffs`       both sides, as the engine calls them
`handoff_state`  the states of a handoff, as a diagram and a table
`messages`       what the two servers tell each other
`incoming`       the decode side: slots for pages, what lands there, the tail
`outgoing`       the prefill side: what is computed is written to the peer at once
`page_writer`    from computed pages to writes into a peer's memory
`own_memory`     this rank's memory as a peer sees it
`reports`        what all ranks of the prefill side have written
"""
