"""Text as it comes, up to a stop string, beside an implementation that looks at all again."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtide.engine.text import OutputText
from kvtide.models.token_bytes import Spelling
from kvtide.models.tokenizer import Detokenizer

SILENT = 0
"""A token that is no text."""


def text_of(tokens: Sequence[bytes], stops: Sequence[str]) -> OutputText:
    """Token i + 1 stands for the i-th of these."""
    spelling = Spelling(
        token=str,
        read=lambda written: tokens[int(written) - 1],
        silent=frozenset({SILENT}),
    )
    return OutputText(Detokenizer(spelling, drop_space=False), stops)


def streamed(tokens: Sequence[bytes], stops: Sequence[str]) -> tuple[list[str], str | None]:
    """What came with each token, and last what came at the end; and what ended it."""
    text = text_of(tokens, stops)
    came = []
    for token in range(1, len(tokens) + 1):
        came.append(text.feed(token))
        if text.stopped:
            break
    return [*came, text.finish()], text.stopped


def decoded(data: bytes, *, final: bool = False) -> str:
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final)


def cut(text: str, stops: Sequence[str]) -> str | None:
    """The text before the first stop string, if there is one."""
    found = [text.index(stop) for stop in stops if stop in text]
    return text[: min(found)] if found else None


def naive(tokens: Sequence[bytes], stops: Sequence[str]) -> str:
    for count in range(1, len(tokens) + 1):
        text = cut(decoded(b"".join(tokens[:count])), stops)
        if text is not None:
            return text
    text = decoded(b"".join(tokens), final=True)
    found = cut(text, stops)
    return text if found is None else found


@pytest.mark.parametrize(
    ("tokens", "stops", "came"),
    [
        pytest.param(["ab", "cd"], [], ["ab", "cd", ""], id="none"),
        pytest.param(["abc", "def"], ["cd"], ["ab", "", ""], id="across two tokens"),
        pytest.param(list("xSTOPy"), ["STOP"], ["x", "", "", "", "", ""], id="across many"),
        pytest.param(["STOP", "x"], ["STOP"], ["", ""], id="at the very start"),
        pytest.param(["a", "ST", "O"], ["STOP"], ["a", "", "", "STO"], id="not finished"),
        pytest.param(["a", "ST", "x"], ["STOP"], ["a", "", "STx", ""], id="not one after all"),
        pytest.param(list("aaba!"), ["aab!"], ["", "", "", "aab", "a!", ""], id="again"),
        pytest.param(["a", "b", "c"], ["abd", "bc"], ["", "", "a", ""], id="one within another"),
        pytest.param(["xbcabc"], ["abc", "bc"], ["x", ""], id="the first to begin"),
        pytest.param(["nn", "n\n", "\n"], ["\n\n"], ["nn", "n", "", ""], id="newlines"),
    ],
)
def test_text_before_a_stop_string_comes_as_soon_as_it_is_certain(
    tokens: list[str], stops: list[str], came: list[str]
) -> None:
    assert streamed([token.encode() for token in tokens], stops)[0] == came


def test_characters_and_stop_strings_may_be_spread_over_tokens() -> None:
    data = "a世b世界c".encode()
    tokens = [data[at : at + 1] for at in range(len(data))]
    came, stopped = streamed(tokens, ["世界"])
    assert "".join(came) == "a世b"
    assert stopped == "世界"
    assert came[1:4] == ["", "", ""], "what might become the stop string is held back"
    assert came[4] == "世b"


def test_bytes_that_are_no_characters_end_as_such() -> None:
    assert streamed([b"a", b"\xe4\xb8"], ["x"]) == (["a", "", "\ufffd"], None)
    assert streamed([b"a\xe4", b"b"], [])[0] == ["a", "\ufffdb", ""]


def test_tokens_that_are_no_text_do_not_part_a_stop_string() -> None:
    text = text_of([b"ST", b"OP"], ["STOP"])
    assert [text.feed(token) for token in (1, SILENT, 2)] == ["", "", ""]
    assert text.stopped == "STOP"


def test_nothing_comes_after_a_stop_string() -> None:
    text = text_of([b"a!b", b"c"], ["!"])
    assert [text.feed(1), text.feed(2), text.finish(), text.finish()] == ["a", "", "", ""]


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(AssertionError):
        text_of([], [""])


letters = st.sampled_from(["a", "b", "ab", "é", "世", "😀", "\ufffd"])
words = st.lists(letters, min_size=1, max_size=4).map("".join)


@st.composite
def cut_up(draw: st.DrawFn) -> list[bytes]:
    """A text in tokens that care for no character; sometimes with bytes that are none."""
    data = b"".join(
        draw(st.lists(st.one_of(words.map(str.encode), st.just(b"\xe4"), st.just(b"")), max_size=8))
    )
    places = draw(st.lists(st.integers(0, len(data)), max_size=12))
    return [data[a:b] for a, b in pairwise([0, *sorted(places), len(data)])]


@settings(max_examples=250, deadline=None)
@given(tokens=cut_up(), stops=st.lists(words, max_size=3))
@example(tokens=[b"a", b"b", b"a", b"b", b"b"], stops=["abb", "bab"])
def test_streams_say_what_a_naive_implementation_says(
    tokens: list[bytes], stops: list[str]
) -> None:
    came, stopped = streamed(tokens, stops)
    expected = naive(tokens, stops)
    assert "".join(came) == expected
    whole = decoded(b"".join(tokens), final=True)
    assert (stopped is None) == (expected == whole and cut(whole, stops) is None)
    assert not any(stop in expected for stop in stops)


@settings(max_examples=120, deadline=None)
@given(tokens=cut_up(), stops=st.lists(words, max_size=3))
def test_no_more_is_held_back_than_might_become_a_stop_string(
    tokens: list[bytes], stops: list[str]
) -> None:
    came, stopped = streamed(tokens, stops)
    for count in range(1, len(came) - 1):
        whole = decoded(b"".join(tokens[:count]))
        held = whole.removeprefix("".join(came[:count]))
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    assert stopped is None or stopped in stops
