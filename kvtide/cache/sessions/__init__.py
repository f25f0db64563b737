"""Conversations between their turns.

`session_pins`  whose prefix stays, for how long, and what changed in their prompts
`prefetching`   prefixes that are brought up before the next turn
"""
