"""Bad input to a command: one way to refuse it."""

from __future__ import annotations


class CommandError(Exception):
    """Bad input, in a sentence that names the remedy; printed without a traceback, exit code 2."""
