"""Traces: what is read, what is refused and in which words, and what prompts are made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.planner.traces import (
    BLOCK_TOKENS,
    Trace,
    TraceError,
    TraceRequest,
    block_tokens,
    footprint_tokens,
    load,
)
from tests.grids import everything

PUBLIC = Path(__file__).resolve().parents[3] / "shared" / "traces"

Write = Callable[..., Path]


def mooncake(**changes: Any) -> dict[str, Any]:
    line = {"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [4, 7]}
    return {**line, **changes}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_lines(*lines: object) -> Path:
        path = tmp_path / "trace.jsonl"
        texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        path.write_text("".join(f"{text}\n" for text in texts))
        return path

    return write_lines


def prompts(trace: Trace) -> list[list[int]]:
    return [request.prompt.tolist() for request in trace]


def of_prompts(*given_prompts: list[int]) -> Trace:
    requests = [TraceRequest(0.0, np.array(p, dtype=np.int32), 0) for p in given_prompts]
    lengths = [len(p) for p in given_prompts]
    return Trace(
        "made", len(requests), sum(lengths), max(lengths, default=0), lambda: iter(requests)
    )


# -- what is read ---------------------------------------------------------------------------


def test_mooncake_line_becomes_a_request(write: Write) -> None:
    trace = load(write(mooncake(session_id="a"), mooncake(timestamp=2000.5, input_length=1024)))
    first, second = trace
    assert (trace.name, trace.requests, len(trace), trace.prompt_tokens) == (
        "trace.jsonl", 2, 2, 1724,
    )  # fmt: skip
    assert (first.arrival_s, len(first.prompt), first.output_tokens, first.session) == (
        1.5, 700, 9, "a",
    )  # fmt: skip
    assert (second.arrival_s, len(second.prompt), second.session) == (2.0005, 1024, None)
    assert first.prompt.dtype == np.int32


def test_equal_hash_ids_share_exactly_their_blocks(write: Write) -> None:
    a, b = load(
        write(
            mooncake(input_length=1024, hash_ids=[1, 2]),
            mooncake(input_length=1024, hash_ids=[1, 3]),
        )
    )
    same = a.prompt == b.prompt
    assert same[:BLOCK_TOKENS].all()
    assert not same[BLOCK_TOKENS:].any()


def test_ids_past_the_end_of_the_input_are_ignored(write: Write) -> None:
    (request,) = load(write(mooncake(input_length=512, hash_ids=[1, 2, 3])))
    assert len(request.prompt) == 512


def test_hash_ids_of_any_size_and_sign_are_names(write: Write) -> None:
    ids = [1, -1, 2**20 + 1, 2**31 + 1, 2**32 + 1, 2**64 + 1]
    trace = load(write(*(mooncake(input_length=1, hash_ids=[block]) for block in ids)))
    assert len({int(request.prompt[0]) for request in trace}) == len(ids)


@pytest.mark.parametrize("name", ["tokens", "prompt_token_ids"])
@pytest.mark.parametrize("output", ["output_length", "output_tokens"])
def test_token_ids_are_taken_as_they_stand(write: Write, name: str, output: str) -> None:
    (request,) = load(write({name: [0, 5, 2**31 - 1], "timestamp": 250, output: 3}))
    assert request.prompt.tolist() == [0, 5, 2**31 - 1]
    assert (request.arrival_s, request.output_tokens) == (0.25, 3)


def test_line_without_timestamp_arrives_with_the_line_before(write: Write) -> None:
    trace = load(write({"tokens": [1]}, {"tokens": [1], "timestamp": 4000}, {"tokens": [2]}))
    assert [r.arrival_s for r in trace] == [0.0, 4.0, 4.0]
    assert [r.output_tokens for r in trace] == [0, 0, 0]


def test_prompts_of_a_file_of_tokens_cannot_be_changed(write: Write) -> None:
    (request,) = load(write({"tokens": [1, 2]}))
    with pytest.raises(ValueError, match="read-only"):
        request.prompt[0] = 9


def test_order_of_lines_is_the_order_of_arrival(write: Write) -> None:
    trace = load(write(mooncake(timestamp=9), mooncake(timestamp=3)))
    assert [r.arrival_s for r in trace] == [0.009, 0.003]


def test_walks_repeat_and_may_interleave(write: Write) -> None:
    trace = load(write(mooncake(), mooncake(hash_ids=[8, 9])))
    assert prompts(trace) == prompts(trace)
    pairs = zip(trace, trace, strict=True)
    assert all((a.prompt == b.prompt).all() for a, b in pairs)


def test_blank_lines_a_byte_order_mark_and_crlf_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"tokens": [1]}\r\n\r\n   \n{"tokens": [2]}')
    assert prompts(load(path)) == [[1], [2]]


# -- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (mooncake(hash_ids="abc"), "hash_ids must be a list of integers, got 'abc'"),
        (mooncake(hash_ids=[1, "x"]), "hash_ids must be a list of integers, got 'x' at index 1"),
        (mooncake(hash_ids=[1, True]), "got True at index 1"),
        (mooncake(hash_ids=[1, 2.0]), r"got 2\.0 at index 1"),
        (mooncake(input_length=-1), "input_length must be a whole number from 1 to .*, got -1"),
        (mooncake(input_length=0), "input_length must be a whole number from 1"),
        (mooncake(input_length=True), "input_length must be a whole number .* got True"),
        (mooncake(input_length=1.5), r"input_length must be a whole number .* got 1\.5"),
        (mooncake(input_length=1025), "is 1025 but 2 hash_ids cover at most 1024 tokens"),
        (mooncake(output_length=-3), "output_length must be a whole number from 0"),
        (mooncake(output_length=2**31), "output_length must be a whole number"),
        (mooncake(timestamp=-1), "timestamp must be a number of milliseconds"),
        (mooncake(timestamp="1"), "timestamp must be a number of milliseconds"),
        (mooncake(timestamp=False), "timestamp must be a number of milliseconds"),
        (mooncake(timestamp=10**400), "timestamp must be a number of milliseconds"),
        (mooncake(timestamp=float("nan")), "expected numbers, got NaN"),
        (mooncake(session_id=5), "session_id must be a string, got 5"),
        ({"timestamp": 0, "input_length": 1, "hash_ids": [1]}, "output_length is missing"),
        ({"tokens": [1]}, "input_length is missing; expected"),
        ("[1, 2]", r"expected one JSON object, got \[1, 2\]"),
        ("{", "expected one JSON object .Expecting property name"),
        ("1e400", "expected one JSON object, got inf"),
        ("[" * 100_000, "expected one JSON object .maximum recursion"),
        ("1" * 5000, "a number far too long"),
    ],
)
def test_broken_mooncake_line_is_named_with_what_was_expected(
    write: Write, line: object, message: str
) -> None:
    path = write(mooncake(), "", line, mooncake())
    with pytest.raises(TraceError, match=rf"trace\.jsonl, line 3: .*{message}"):
        load(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"tokens": []}, "tokens is empty; expected at least one token id"),
        ({"tokens": [2**31]}, "tokens must lie in 0 to 2.31 - 1, got 2147483648"),
        ({"tokens": [1, -1]}, "tokens must lie in 0 to 2.31 - 1, got -1"),
        ({"tokens": [10**30]}, "tokens must lie in"),
        ({"tokens": [1.0]}, r"tokens must be a list of integers, got 1\.0 at index 0"),
        ({"tokens": [True]}, "tokens must be a list of integers, got True"),
        ({"tokens": None}, "tokens must be a list of integers, got None"),
        ({"tokens": [1], "output_tokens": -1}, "output_tokens must be a whole number from 0"),
        ({"tokens": [1], "timestamp": None}, "timestamp must be a number"),
        (mooncake(), "prompt_token_ids is missing; expected"),
    ],
)
def test_broken_line_of_token_ids_is_named(write: Write, line: object, message: str) -> None:
    with pytest.raises(TraceError, match=rf"line 2: {message}"):
        load(write({"tokens": [1]}, line))


def test_unknown_first_line_lists_the_formats_and_what_it_has(write: Write) -> None:
    with pytest.raises(TraceError, match=r"line 1: expected .*Mooncake.*token ids.*got 'prompt'"):
        load(write({"prompt": "hello"}))


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_file_without_requests_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="no requests in it; expected one JSON object a line"):
        load(path)


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\x89PNG\xff\xfe\x00")
    with pytest.raises(TraceError, match="line 1: expected one JSON object in UTF-8"):
        load(path)


@pytest.mark.parametrize("name", ["absent.jsonl", "", "a\0b"])
def test_what_is_not_a_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceError, match="give the path of a trace file"):
        load(tmp_path / name)


@given(st.binary(max_size=200))
@settings(max_examples=100 if everything() else 30, deadline=None)
def test_arbitrary_bytes_load_or_raise_trace_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("any") / "t.jsonl"
    path.write_bytes(content)
    _loads_or_refuses(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
FIELDS = (
    "timestamp", "input_length", "output_length", "output_tokens",
    "hash_ids", "tokens", "prompt_token_ids", "session_id",
)  # fmt: skip
VALUES = JSON | st.integers(0, 2000) | st.lists(st.integers(), max_size=4)
LINES = st.lists(st.dictionaries(st.sampled_from(FIELDS), VALUES) | JSON, max_size=4)


@given(LINES)
@settings(max_examples=100 if everything() else 30, deadline=None)
def test_arbitrary_json_lines_load_or_raise_trace_error(
    tmp_path_factory: pytest.TempPathFactory, lines: list[object]
) -> None:
    path = tmp_path_factory.mktemp("json") / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    _loads_or_refuses(path)


def _loads_or_refuses(path: Path) -> None:
    try:
        trace = load(path)
    except TraceError:
        return
    walked = list(trace)
    assert len(walked) == trace.requests
    assert sum(len(r.prompt) for r in walked) == trace.prompt_tokens
    assert all(r.prompt.dtype == np.int32 and r.prompt.min() >= 0 for r in walked)


# -- made-up tokens -------------------------------------------------------------------------


def test_different_blocks_differ_in_every_token() -> None:
    numbers = np.r_[np.arange(300), 2**31 - np.arange(1, 300)].astype(np.int64)
    blocks = block_tokens(numbers, len(numbers) * BLOCK_TOKENS).reshape(-1, BLOCK_TOKENS)
    assert blocks.min() >= 0
    assert all(len(set(column)) == len(numbers) for column in blocks.T.tolist())


def test_tokens_of_a_block_do_not_depend_on_its_neighbours() -> None:
    both = block_tokens(np.array([5, 6], dtype=np.int64), 1024)
    alone = block_tokens(np.array([6], dtype=np.int64), 100)
    assert (both[512:612] == alone).all()


# -- footprint ------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=12), st.integers(1, 4)
)
def test_footprint_counts_each_distinct_prefix_of_whole_pages_once(
    given_prompts: list[list[int]], page: int
) -> None:
    prefixes = {tuple(p[:end]) for p in given_prompts for end in range(page, len(p) + 1, page)}
    assert footprint_tokens(of_prompts(*given_prompts), page) == len(prefixes) * page


def test_footprint_of_pages_without_tokens_is_refused() -> None:
    with pytest.raises(TraceError, match="a page of 0 tokens; use at least 1"):
        footprint_tokens(of_prompts([1]), 0)


def test_footprint_of_no_requests_is_zero() -> None:
    assert footprint_tokens(of_prompts(), 4) == 0


# -- the public traces ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "requests", "tokens"),
    [
        pytest.param("conversation", 12_031, 144_793_823, marks=pytest.mark.full),
        ("synthetic", 3_993, 61_194_628),
    ],
)
def test_public_trace_has_the_published_size_and_block_footprint(
    name: str, requests: int, tokens: int
) -> None:
    path = PUBLIC / f"{name}_trace.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} is not at ../shared/traces")
    trace = load(path)
    assert (trace.requests, trace.prompt_tokens) == (requests, tokens)
    assert footprint_tokens(trace, 64) == _block_footprint(path, 64)


def _block_footprint(path: Path, page: int) -> int:
    """Counted from the file itself: an id names a block with its prefix, so ids suffice."""
    longest: dict[int, int] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        for k, block in enumerate(line["hash_ids"]):
            held = min(BLOCK_TOKENS, line["input_length"] - k * BLOCK_TOKENS) // page * page
            longest[block] = max(held, longest.get(block, 0))
    return sum(longest.values())
