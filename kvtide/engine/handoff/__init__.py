"""Prefill → decode handoff: one server prefills a prompt, another decodes it.

`handoff_state`  the states of a handoff, drawn and tabled
`messages`       what the two servers tell each other
`incoming`       the decode side: slots for pages, what lands there, the tail
`outgoing`       the prefill side: what is computed is written to the peer at once
`page_writer`    from computed pages to writes into a peer's memory
`reports`        what all ranks of the prefill side have written
"""
