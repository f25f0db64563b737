"""Conversations between their turns.

`session_pins`  whose prefix stays, for how long
`prompt_lines`  which of a session's conversations a prompt continues, and what it changed
`prefetching`   prefixes that are brought up before the next turn
"""
