"""Handoffs at the server's edge: which side a server is, and what routers say of a request.

`handoff_settings`   the role, the peers, where to listen, and the shared secret
`handoff_fields`     what a request says of its handoff, whichever convention its router has
`conventions`        the fields of routers, read and answered
"""
