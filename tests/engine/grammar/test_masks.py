"""Masks against all texts of a small alphabet: a token is allowed where some continuation matches.

The oracle is Python's own `re` over every text up to a length that the grammars do not exceed.
"""

from __future__ import annotations

import random
import re

import pytest
from llguidance import LLParserLimits

from kvtide.engine import RequestError
from kvtide.engine.grammar import grammar_compiler, step_masks
from kvtide.engine.grammar.grammar import Grammar
from tests.engine.grammar.small_vocabulary import SmallVocabulary, Walk, texts

SPELT = [b"a", b"b", b"c", b"ab", b"ba", b"abc", b"bb", b"ca", b"", b"<s>", b"</s>", b"cc", b"aa"]
SPECIAL, STOP = frozenset({9, 10}), 10
PADDED = 40
"""Rows of the model: more than there are tokens."""
EVERY_TEXT = texts("abc", 7)
VOCABULARY = SmallVocabulary(SPELT, SPECIAL)

REGEXES = (
    "a(b|ba){0,3}",
    "(ab){1,3}c?",
    "[abc]{7}",
    "a{0,3}(bc|c)a{0,2}",
    "(abc|ab|a)(c|bc)?",
    "c",
)


def words(regex: str) -> set[str]:
    return {text for text in EVERY_TEXT if re.fullmatch(regex, text)}


def oracle(language: set[str], written: str) -> set[int]:
    prefixes = {word[:n] for word in language for n in range(len(word) + 1)}
    tokens = {t for t, each in enumerate(SPELT) if each and t not in SPECIAL}
    found = {t for t in tokens if written + SPELT[t].decode() in prefixes}
    return found | ({STOP} if written in language else set())


@pytest.mark.parametrize("kind", ["regex", "choice"])
@pytest.mark.parametrize("regex", REGEXES)
def test_a_mask_has_what_some_continuation_has(regex: str, kind: str) -> None:
    language, rng = words(regex), random.Random(regex)
    grammar = Grammar("regex", regex)
    if kind == "choice":
        listed = " | ".join(f'"{word}"' for word in sorted(language))
        grammar = Grammar("lark", f"start: TEXT\nTEXT: {listed}")
    seen = set()
    for _ in range(12):
        walk, written = Walk(VOCABULARY, grammar, [STOP], PADDED), ""
        while True:
            (allowed,) = walk.allowed()
            assert allowed == oracle(language, written), written
            seen.add(written)
            if not (going_on := sorted(allowed - {STOP})):
                assert walk.matcher.complete
                break
            token = rng.choice(going_on)
            assert walk.matcher.consume(token)
            written += SPELT[token].decode()
            assert walk.matcher.complete == (oracle(language, written) == {STOP}), written
    assert len(seen) > 1


@pytest.mark.parametrize("regex", REGEXES)
def test_rows_behind_drafts_have_the_masks_of_the_text_with_them(regex: str) -> None:
    """Whatever is drafted: a refused draft is not in its row's mask, so none behind is accepted."""
    language, rng = words(regex), random.Random(regex)
    refused = 0
    for _ in range(40):
        walk, written = Walk(VOCABULARY, Grammar("regex", regex), [STOP], PADDED), ""
        for _ in range(rng.randrange(3)):
            if going_on := sorted(oracle(language, written) - {STOP}):
                token = rng.choice(going_on)
                assert walk.matcher.consume(token)
                written += SPELT[token].decode()
        drafts = [rng.randrange(len(SPELT)) for _ in range(rng.randrange(1, 5))]
        if rng.random() < 0.7 and (going_on := sorted(oracle(language, written) - {STOP})):
            drafts[0] = rng.choice(going_on)
        rows, text, run = walk.allowed(drafts), written, 0
        for row, draft in zip(rows, drafts, strict=False):
            assert row == oracle(language, text), (written, drafts)
            if draft not in row or draft == STOP:
                refused += 1
                break
            text, run = text + SPELT[draft].decode(), run + 1
        assert step_masks.cut_drafts(walk.matcher, tuple(drafts)) == tuple(drafts[:run])
        assert walk.allowed() == [oracle(language, written)], "drafts leave no trace"
    assert refused > 5


def test_padding_special_tokens_and_tokens_without_bytes_are_never_allowed() -> None:
    (allowed,) = Walk(VOCABULARY, Grammar("regex", r"(.|\n){1,9}"), [], PADDED).allowed()
    assert allowed == {t for t, each in enumerate(SPELT) if each and t not in SPECIAL}


@pytest.mark.parametrize("vocabulary", [len(SPELT), 31, 32, 33, 63, 64])
def test_stop_ids_stand_for_the_end_in_any_vocabulary(vocabulary: int) -> None:
    grammar, ids = Grammar("regex", "ab?"), [STOP, 3, vocabulary - 1, vocabulary, 10**6, -1]
    walk = Walk(VOCABULARY, grammar, ids, vocabulary)
    assert walk.allowed() == [{0, 3}]
    assert walk.matcher.consume(0)
    assert walk.allowed() == [{1, STOP, 3, vocabulary - 1}]


def test_a_grammar_names_special_tokens() -> None:
    walk = Walk(VOCABULARY, Grammar("lark", 'start: "a" <s> "b"'), [STOP], PADDED)
    for token in (0, 9, 1):
        assert walk.allowed() == [{token}]
        assert walk.matcher.consume(token)
    assert walk.matcher.complete and walk.allowed() == [{STOP}]


def test_a_token_that_the_grammar_refuses_fails_the_matcher() -> None:
    walk = Walk(VOCABULARY, Grammar("regex", "ab"), [STOP], PADDED)
    assert not walk.matcher.consume(1) and walk.matcher.failed
    assert not walk.matcher.consume(0) and not walk.matcher.complete
    assert walk.matcher.allowed_run([0]) == 0
    assert walk.allowed([0]) == [{*range(PADDED)}] * 2  # It ends with its next token.


def test_a_text_that_no_token_continues_fails_the_matcher() -> None:
    walk = Walk(SmallVocabulary([b"a", b"ab"]), Grammar("regex", "aac"), [1], 2)
    assert walk.matcher.consume(0) and walk.matcher.consume(0)
    assert walk.allowed() == [{0, 1}] and walk.matcher.failed


def test_a_text_that_needs_too_many_states_fails_the_matcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every count of characters has states of its own."""
    limits = LLParserLimits(max_lexer_states=2000, verbose_errors=False)
    monkeypatch.setattr(grammar_compiler, "_LIMITS", limits)
    walk = Walk(VOCABULARY, Grammar("regex", r"(.|\n){0,20000}"), [STOP], PADDED)
    done = 0
    while not walk.matcher.failed:
        walk.allowed()
        done += walk.matcher.consume(0)
    assert 100 < done < 2000
    assert walk.allowed([0]) == [{*range(PADDED)}] * 2


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("regex", "["), "unclosed character class"),
        (Grammar("regex", "(?=a)b"), "look-around"),
        (Grammar("regex", "a{0}"), "no text but the empty one"),
        (Grammar("regex", "(" * 2000 + "a" + ")" * 2000), "nested parentheses"),
        (Grammar("regex", "a" * 300_000), "262144 are the most"),
        (Grammar("lark", "start: nowhere"), "unknown name"),
        (Grammar("lark", "start: <nothing>"), "unknown special token"),
        (Grammar("lark", 'start: a\n\n\na: %json {"format": "poem"}'), "Unknown format: poem"),
        (Grammar("json_schema", "[]"), "not a JSON object"),
        (Grammar("json_schema", "{"), "not JSON"),
        (Grammar("json_schema", "[" * 100_000), "not JSON"),
        (Grammar("json_schema", '{"type": "poem"}'), "Invalid type: poem"),
        (Grammar("json_schema", '{"not": {}}'), "Unimplemented keys"),
        (Grammar("json_schema", '{"not": {}, "x-guidance": {"lenient": true}}'), "Unimplemented"),
        (Grammar("json_schema", '{"type": "string", "minLength": 3, "maxLength": 1}'), "Unsat"),
        (Grammar("json_schema", '{"$ref": "http://elsewhere/schema"}'), "not present"),
    ],
    ids=lambda each: each.text[:20] if isinstance(each, Grammar) else "",
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(grammar: Grammar, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as refusal:
        Walk(VOCABULARY, grammar, [], PADDED)
    assert "cannot be enforced" in str(refusal.value) and len(str(refusal.value)) < 500
    assert str(refusal.value).endswith("simplify it, or leave it out")
    assert "%json" not in str(refusal.value), "the grammar itself is not shown"


def test_a_kind_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="json_schema, regex, choice, lark"):
        Grammar("poem", "roses are red")
