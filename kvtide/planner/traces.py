"""Traces: the requests a replay sends through the index, in order of arrival.

A `Trace` can be walked any number of times and yields the same requests each time. Prompts are
made one by one while walking: a trace file is kept as block ids that expand to token ids, so
an hour of traffic with 145 million prompt tokens costs a few megabytes.

`load` reads a whole file before it returns, so a broken line is refused before anything runs.
Two formats of JSON lines; the first line decides which:

  Mooncake   timestamp (ms), input_length, output_length, hash_ids: one id per 512-token block
  token ids  tokens or prompt_token_ids; timestamp (ms) and output_length or output_tokens if known

Either may carry a `session_id`. The order of the lines is the order of arrival, whatever the
timestamps are. The later prompts of a conversation contain its earlier outputs, so outputs are
not added to prompts.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 512

TokenArray = npt.NDArray[np.int32]


class TraceError(ValueError):
    """A trace or workload that cannot be replayed. The message says where, and what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One prompt that arrives. The prompt is not the caller's to change."""

    arrival_s: float
    prompt: TokenArray
    output_tokens: int
    session: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in order of arrival. Every walk calls `source` and starts from the beginning."""

    name: str
    requests: int
    prompt_tokens: int
    longest_tokens: int
    source: Callable[[], Iterator[TraceRequest]]

    def __iter__(self) -> Iterator[TraceRequest]:
        return self.source()

    def __len__(self) -> int:
        return self.requests


def load(path: str | os.PathLike[str]) -> Trace:
    """Read and check a trace file; a `TraceError` names the first line that is wrong."""
    file = Path(path)
    recording: _Recording | None = None
    for number, line in _lines(file):
        try:
            fields = _fields(line)
            recording = recording or _recording_for(fields)
            recording.add(fields)
        except _BrokenLineError as broken:
            raise TraceError(f"{file}, line {number}: {broken}") from None
    if recording is None:
        raise TraceError(f"{file}: no requests in it; expected one JSON object a line: {_FORMATS}")
    return recording.trace(file.name)


def footprint_tokens(trace: Trace, page_tokens: int) -> int:
    """Tokens a cache would hold if it kept every whole page of every prompt, each prefix once.

    Equal pages behind different prefixes count twice, as they do in a cache.
    """
    keys = [prefix_keys(request.prompt, page_tokens) for request in trace]
    return len(np.unique(np.concatenate(keys))) * page_tokens if keys else 0


def prefix_keys(prompt: TokenArray, page_tokens: int) -> npt.NDArray[np.uint64]:
    """For each whole page, a 64-bit key of all tokens up to its end.

    A page is a weighted sum of its tokens, stirred together with its place; a prefix is the sum
    of its pages. With ten million keys the chance that any two collide is about 3 in a million.
    """
    weights = _page_weights(page_tokens)
    pages = len(prompt) // page_tokens
    tokens = prompt[: pages * page_tokens].astype(np.uint64)
    sums = tokens.reshape(pages, page_tokens) @ weights
    stirred = sums + np.arange(1, pages + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        stirred = (stirred ^ stirred >> np.uint64(shift)) * np.uint64(factor)
    return np.cumsum(stirred ^ stirred >> np.uint64(31), dtype=np.uint64)


@cache
def _page_weights(page_tokens: int) -> npt.NDArray[np.uint64]:
    if page_tokens < 1:
        raise TraceError(f"a page of {page_tokens} tokens; use at least 1")
    weights = np.random.default_rng(0).integers(1 << 64, size=page_tokens, dtype=np.uint64)
    return weights | np.uint64(1)


# -- token ids for blocks that are known by number only -------------------------------------


def block_tokens(blocks: npt.NDArray[np.int64], count: int) -> TokenArray:
    """The first `count` token ids of a run of 512-token blocks; ids lie in [0, 2^31).

    Equal numbers give equal blocks. Different numbers (below 2^31) give blocks that differ in
    every token, because for each position the number is mapped one to one.
    """
    names = _scrambled(blocks).astype(np.uint32)
    tokens = (names[:, np.newaxis] ^ _POSITIONS).reshape(-1)
    return tokens[:count].view(np.int32)


def _scrambled(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A fixed permutation of [0, 2^31): odd factors and shifted xors are each one to one."""
    mask = (1 << 31) - 1
    mixed = numbers * 0x2545F491 & mask
    mixed ^= mixed >> 16
    mixed = mixed * 0x1B873593 & mask
    return mixed ^ mixed >> 15


_POSITIONS = _scrambled((1 << 30) + np.arange(BLOCK_TOKENS, dtype=np.int64)).astype(np.uint32)


# -- reading lines --------------------------------------------------------------------------

_FORMATS = (
    "either timestamp, input_length, output_length and hash_ids (Mooncake), "
    "or tokens or prompt_token_ids (token ids)"
)


class _BrokenLineError(Exception):
    """What is wrong with one line; `load` adds where."""


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Every line that is not blank, with its number."""
    try:
        with file.open("rb") as opened:
            for number, line in enumerate(opened, 1):
                if line.strip():
                    yield number, line
    except (OSError, ValueError) as failure:  # ValueError: a path with a null byte in it
        reason = getattr(failure, "strerror", None) or failure
        raise TraceError(f"{file}: {reason}; give the path of a trace file") from None


def _fields(line: bytes) -> dict[str, Any]:
    try:
        value = _DECODER.decode(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise _BrokenLineError("expected one JSON object in UTF-8, got other bytes") from None
    except (json.JSONDecodeError, RecursionError) as failure:
        raise _BrokenLineError(f"expected one JSON object ({failure})") from None
    except ValueError:  # the interpreter's bound on the digits of one integer
        raise _BrokenLineError("expected one JSON object, got a number far too long") from None
    if not isinstance(value, dict):
        raise _BrokenLineError(f"expected one JSON object, got {_shown(value)}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise _BrokenLineError(f"expected numbers, got {name}")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


# -- checking fields ------------------------------------------------------------------------


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise _BrokenLineError(f"{name} is missing; expected {_FORMATS}")
    return fields[name]


def _count(fields: Mapping[str, Any], name: str, minimum: int = 0) -> int:
    value = _field(fields, name)
    if type(value) is not int or not minimum <= value < 1 << 31:
        raise _BrokenLineError(
            f"{name} must be a whole number from {minimum} to 2^31 - 1, got {_shown(value)}"
        )
    return value


def _seconds(fields: Mapping[str, Any], name: str) -> float:
    value = _field(fields, name)
    # The upper bound, some 30 million years, also keeps out infinities and NaN.
    if type(value) not in (int, float) or not 0 <= value <= 1e18:
        raise _BrokenLineError(
            f"{name} must be a number of milliseconds, 0 or more, got {_shown(value)}"
        )
    return float(value) / 1000


def _integers(fields: Mapping[str, Any], name: str) -> list[int]:
    values = _field(fields, name)
    if type(values) is not list:
        raise _BrokenLineError(f"{name} must be a list of integers, got {_shown(values)}")
    if not set(map(type, values)) <= {int}:
        at, wrong = next((i, v) for i, v in enumerate(values) if type(v) is not int)
        raise _BrokenLineError(
            f"{name} must be a list of integers, got {_shown(wrong)} at index {at}"
        )
    return values


def _session(fields: Mapping[str, Any]) -> str | None:
    value = fields.get("session_id")
    if value is not None and not isinstance(value, str):
        raise _BrokenLineError(f"session_id must be a string, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    return reprlib.repr(value)


# -- what is kept of a file -----------------------------------------------------------------


class _Recording(ABC):
    """A file in memory, column by column; each format says how it keeps prompts."""

    def __init__(self) -> None:
        self._arrivals_s: list[float] = []
        self._prompt_tokens: list[int] = []
        self._output_tokens: list[int] = []
        self._sessions: list[str | None] = []

    def add(self, fields: Mapping[str, Any]) -> None:
        self._prompt_tokens.append(self._keep_prompt(fields))
        self._arrivals_s.append(self._arrival_s(fields))
        self._output_tokens.append(self._output(fields))
        self._sessions.append(_session(fields))

    def trace(self, name: str) -> Trace:
        lengths = self._prompt_tokens
        return Trace(name, len(lengths), sum(lengths), max(lengths), self._requests)

    def _requests(self) -> Iterator[TraceRequest]:
        columns = zip(self._arrivals_s, self._output_tokens, self._sessions, strict=True)
        for number, (arrival_s, output_tokens, session) in enumerate(columns):
            yield TraceRequest(arrival_s, self._prompt(number), output_tokens, session)

    @abstractmethod
    def _keep_prompt(self, fields: Mapping[str, Any]) -> int:
        """Keep one more prompt; how many tokens it has."""

    @abstractmethod
    def _prompt(self, number: int) -> TokenArray: ...

    @abstractmethod
    def _arrival_s(self, fields: Mapping[str, Any]) -> float: ...

    @abstractmethod
    def _output(self, fields: Mapping[str, Any]) -> int: ...


class _BlockRecording(_Recording):
    """Mooncake: block ids, numbered by first appearance so that ids of any size are fine."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}
        self._blocks: list[npt.NDArray[np.int32]] = []

    def _keep_prompt(self, fields: Mapping[str, Any]) -> int:
        length = _count(fields, "input_length", minimum=1)
        ids = _integers(fields, "hash_ids")
        if length > len(ids) * BLOCK_TOKENS:
            raise _BrokenLineError(
                f"input_length is {length} but {len(ids)} hash_ids cover at most "
                f"{len(ids) * BLOCK_TOKENS} tokens; expected one id per {BLOCK_TOKENS} tokens"
            )
        numbers = self._numbers
        used = ids[: math.ceil(length / BLOCK_TOKENS)]
        blocks = [numbers.setdefault(block, len(numbers)) for block in used]
        self._blocks.append(np.array(blocks, dtype=np.int32))
        return length

    def _prompt(self, number: int) -> TokenArray:
        blocks = self._blocks[number].astype(np.int64)
        return block_tokens(blocks, self._prompt_tokens[number])

    def _arrival_s(self, fields: Mapping[str, Any]) -> float:
        return _seconds(fields, "timestamp")

    def _output(self, fields: Mapping[str, Any]) -> int:
        return _count(fields, "output_length")


class _TokenRecording(_Recording):
    """Token ids as they stand. A line without a timestamp arrives with the line before it."""

    def __init__(self) -> None:
        super().__init__()
        self._prompts: list[TokenArray] = []

    def _keep_prompt(self, fields: Mapping[str, Any]) -> int:
        name = "tokens" if "tokens" in fields else "prompt_token_ids"
        ids = _integers(fields, name)
        if not ids:
            raise _BrokenLineError(f"{name} is empty; expected at least one token id")
        if min(ids) < 0 or max(ids) >= 1 << 31:
            wrong = next(i for i in ids if not 0 <= i < 1 << 31)
            raise _BrokenLineError(f"{name} must lie in 0 to 2^31 - 1, got {_shown(wrong)}")
        prompt = np.array(ids, dtype=np.int32)
        prompt.setflags(write=False)
        self._prompts.append(prompt)
        return len(prompt)

    def _prompt(self, number: int) -> TokenArray:
        return self._prompts[number]

    def _arrival_s(self, fields: Mapping[str, Any]) -> float:
        if "timestamp" in fields:
            return _seconds(fields, "timestamp")
        return self._arrivals_s[-1] if self._arrivals_s else 0.0

    def _output(self, fields: Mapping[str, Any]) -> int:
        name = next((n for n in ("output_length", "output_tokens") if n in fields), None)
        return 0 if name is None else _count(fields, name)


def _recording_for(fields: Mapping[str, Any]) -> _Recording:
    """The first line decides the format of the file."""
    if "hash_ids" in fields:
        return _BlockRecording()
    if "tokens" in fields or "prompt_token_ids" in fields:
        return _TokenRecording()
    found = ", ".join(map(_shown, list(fields)[:8])) or "no fields"
    raise _BrokenLineError(f"expected {_FORMATS}; got {found}")
