"""How far one request has come in its grammar.

A matcher belongs to its request and stays with it through retraction. Its lexer builds states as
tokens are tried: a matcher whose grammar needs too many of them fails, and ends its request.
"""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher


class CompiledGrammar:
    """A grammar, compiled for one tokenizer: where every matcher starts."""

    def __init__(self, start: LLMatcher) -> None:
        self._start = start

    def start(self) -> LLMatcher:
        return self._start.deep_copy()


class TokenMatcher:
    """`failed`: a limit of the grammar was exceeded, and its masks are not known."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        self.failed = False
        self.state = compiled.start()

    def consume(self, token: int) -> bool:
        """One more token of output; False if the grammar does not allow it."""
        self.failed = self.failed or not self.state.consume_token(token)
        return not self.failed

    def allowed_run(self, drafts: Sequence[int]) -> int:
        """How many of these drafts the grammar allows, from the first on."""
        return 0 if self.failed else self.state.validate_tokens(list(drafts))

    @property
    def complete(self) -> bool:
        """No token can follow."""
        return self.state.is_stopped() and not self.state.is_error()
