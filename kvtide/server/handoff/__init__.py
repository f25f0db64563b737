"""Handoffs at the server's edge: which side a server is, and what routers say of a request.

`server_handoff`     a server's part in handoffs, as its application and command see it; start here
`handoff_settings`   the role, the peers, where to listen, and the shared secret
`handoff_fields`     what a request says of its handoff, whichever convention its router has
`conventions`        the fields of routers, read and answered
`router_routes`      what routers ask of a worker
`decode_side`        a decode server's leader, with a `prefill_connection` to each prefill server
`prefill_servers`    which server of `--prefill-from` prefills a prompt
`prefill_side`       a prefill server's leader: connections of decode servers
`peer_commands`      what peers say, as engine commands for all ranks
`rank_handoff`       one rank's memory as peers see it, its transports, its sender
`handoff_metrics`    both sides, for Prometheus

Which pages are asked for, and what becomes of them, is decided in `engine.handoff`.
"""
