"""Compiles grammars for the engine's tokenizer.

llguidance walks a trie of the vocabulary's bytes, which is built once, at the first grammar. One
token more than the vocabulary stands for the end of the text: a request has stop ids of its own.
Special tokens are no text. A grammar names them (`<name>`), or they never occur.

Compilation runs on the caller's thread, without Python's lock. Limits on the text's size, on the
grammar and on its lexer bound its time and memory.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import replace
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from kvtide.engine.grammar.grammar import MAX_GRAMMAR_BYTES, Grammar
from kvtide.engine.grammar.grammar_rules import content_rule
from kvtide.engine.grammar.token_matcher import CompiledGrammar, TokenMatcher
from kvtide.engine.request import CheckedRequest, RequestError
from kvtide.models.tokenizer import Tokenizer

CACHED_BYTES = 1 << 20
"""Text of all compiled grammars that are kept."""
_PROBES = 8
_OWN_LINE = re.compile(r"\n *\d+ \| ")
"""How an error shows a line of the grammar."""
_UNSATISFIABLE = "Unsatisfiable schema"
_DEAD_END = "NoExtension"
"""llguidance's word for a text that no token of the vocabulary continues."""
_LIMITS = LLParserLimits(
    max_grammar_size=200_000,
    initial_lexer_fuel=1_000_000,
    max_lexer_states=131_072,  # 0.6 KB each; four a character where a text has a longest length.
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    verbose_errors=False,
)
_NAMES = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "choice": "list of choices",
    "lark": "grammar",
}
_EXACT = '%llguidance {"no_forcing": true}\n'
"""Masks have every token that can go on, not only those of the usual spelling."""


class GrammarError(RequestError):
    """A grammar that cannot be enforced; `reason` says why."""

    def __init__(self, grammar: Grammar, reason: str) -> None:
        name = _NAMES[grammar.kind]
        super().__init__(f"the {name} cannot be enforced: {reason}; simplify it, or leave it out")
        self.reason = reason

    @property
    def matches_nothing(self) -> bool:
        """No text satisfies it."""
        return self.reason.startswith((_UNSATISFIABLE, _DEAD_END))


class GrammarCompiler:
    """Any thread may call it. `vocabulary`: tokens of the model, which may be more than the
    tokenizer's; those are never allowed. Without a tokenizer there are no grammars."""

    def __init__(self, tokenizer: Tokenizer | None, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._lock, self._building = Lock(), Lock()
        self._trie: LLTokenizer | None = None
        self._cached: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()

    def compiled(self, checked: CheckedRequest) -> CheckedRequest:
        """The request with its grammar compiled."""
        grammar = checked.params.grammar
        return checked if grammar is None else replace(checked, compiled=self.compile(grammar))

    def matcher(self, checked: CheckedRequest) -> TokenMatcher | None:
        """Where the request's output starts; None without a grammar."""
        compiled = self.compiled(checked).compiled if checked.compiled is None else checked.compiled
        return None if compiled is None else TokenMatcher(compiled)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises `GrammarError` for a grammar that cannot be enforced."""
        with self._lock:
            if (known := self._cached.get(grammar)) is not None:
                self._cached.move_to_end(grammar)
                return known
        compiled = self._compile(grammar)
        with self._lock:
            self._cached[grammar] = compiled
            while sum(len(each.text) for each in self._cached) > CACHED_BYTES:
                self._cached.popitem(last=False)
        return compiled

    def warm_up(self) -> None:
        """Build the vocabulary's trie, if it is not there yet."""
        if self._tokenizer is not None:
            self._built_trie(self._tokenizer)

    def _built_trie(self, tokenizer: Tokenizer) -> LLTokenizer:
        with self._building:
            if self._trie is None:
                self._trie = _trie(tokenizer, self._vocabulary)
            return self._trie

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        if self._tokenizer is None:
            raise RequestError(
                "a format of the output needs a tokenizer, and this model came without one; ask "
                "for plain text",
                param="response_format",
            )
        size = len(grammar.text.encode(errors="replace"))
        if size > MAX_GRAMMAR_BYTES:
            raise GrammarError(
                grammar, f"it has {size} bytes, and {MAX_GRAMMAR_BYTES} are the most"
            )
        trie, text = self._built_trie(self._tokenizer), _lark(grammar)
        start = LLMatcher(trie, text, log_level=0, limits=_LIMITS)
        if start.is_error():
            raise GrammarError(grammar, _reason(start.get_error()))
        compiled = CompiledGrammar(start)
        self._probe(grammar, compiled)
        return compiled

    def _probe(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        """Try the first masks: some grammars compile, and exceed a limit at once."""
        state = compiled.start()
        tokens = _allowed(state, self._vocabulary)
        for token in tokens[:: max(1, len(tokens) // _PROBES)] if not state.is_error() else ():
            after = compiled.start()
            if after.consume_token(token):
                after.compute_bitmask()
            if after.is_error() and not after.get_error().startswith(_DEAD_END):
                raise GrammarError(grammar, _reason(after.get_error()))
        if state.is_error():
            raise GrammarError(grammar, _reason(state.get_error()))
        if not tokens:
            raise GrammarError(grammar, "no text but the empty one matches it")


def _trie(tokenizer: Tokenizer, vocabulary: int) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, vocabulary)), eos_token=vocabulary)


class _Vocabulary:
    """The tokens' bytes, as `TokenizerWrapper` reads them; tokens without any are never allowed."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocabulary)]
        self.tokens.append(b"<end of text>")
        self.eos_token_id, self.bos_token_id = vocabulary, None
        special = (token for token in tokenizer.special_ids if token < vocabulary)
        self.special_token_ids = [*sorted(special), vocabulary]

    def __call__(self, text: str | bytes) -> list[int]:
        """Text is encoded only where a grammar forces a spelling, which none does here."""
        raise TypeError("grammars force no spelling")


def _lark(grammar: Grammar) -> str:
    text = grammar.text
    if grammar.kind != "lark":
        try:
            name, body = content_rule(grammar)
        except ValueError as flaw:
            raise GrammarError(grammar, str(flaw)) from None
        text = f"start: {name}\n{name}: {body}"
    return LLMatcher.grammar_from_lark(_EXACT + text)


def _allowed(state: LLMatcher, vocabulary: int) -> list[int]:
    words = np.frombuffer(state.compute_bitmask(), np.uint8)
    bits = np.unpackbits(words, bitorder="little", count=vocabulary)
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


def _reason(error: str) -> str:
    """The error without the place in our own text, and without the text itself."""
    first = _OWN_LINE.split(error, maxsplit=1)[0].split("\n<", 1)[0]
    place, _, rest = first.partition(": ")
    found = rest if place.startswith("at ") else first
    for before in ("failed to compile JSON schema: ", "\nerror: "):
        found = found.rpartition(before)[2]
    return " ".join(found.split())[:300]
