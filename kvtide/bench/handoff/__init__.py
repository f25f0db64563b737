"""Handoffs between two processes: a server that prefills, and one that decodes.

    this process: decode server ◀──channel──▶ child process: prefill server
              host arena ◀──────pages, by shared memory──────┘

Both are real: engine, service, channel and page sender as `kvtide serve` has them, without HTTP.
Models have random weights.

`handoff_case`        what both processes are made with
`served_engine`       an engine behind its service, called from a plain thread
`prefill_process`     the child, and its remote control
`switched_transport`  a transport that writes straight to the host, or stages pages on a device
`plain_copies`        the link's own speed
`handoff_bed`         both servers, and one handoff
`handoff_speed`       what is measured
`decode_beside`       decode speed while pages land, and while prompts are prefilled
"""
