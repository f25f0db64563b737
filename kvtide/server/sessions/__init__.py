"""Sessions over HTTP: what keeps a conversation's prefix whole, and what brings it back.

`session_routes`    /v1/sessions, /v1/prefetch, /admin/sessions
`session_commands`  what they change, as engine commands
`session_settings`  the defaults of a request's session
`stable_prefix`     rules against noise at the front of conversations
`prompt_changes`    what changed at the front, in a sentence
`session_metrics`   for Prometheus
"""
