"""Handoffs at the server's edge: which side a server is, and what routers say of a request.

`handoff_settings`   the role, the peers, where to listen, and the shared secret
`handoff_fields`     what a request says of its handoff, whichever convention its router has
`conventions`        the fields of routers, read and answered
`decode_side`        a decode server's leader: connections to all prefill servers
`prefill_side`       a prefill server's leader: connections of decode servers

Which pages are asked for, and what becomes of them, is decided in `engine.handoff`.
"""
