"""The one way in which this room refuses what it is given.

`CheckpointError`, a ValueError, is a checkpoint or a tokenizer that cannot be read or used.
`TemplateError`, one of those, is a conversation that the chat template does not take.
"""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message says which, why, and the remedy."""


class TemplateError(CheckpointError):
    """A conversation that cannot be rendered: the request is at fault, not the checkpoint."""
