"""Bytes and speed of codecs, on objects of a real model.

Alone: one thread encodes and decodes all objects, each codec in turn; its CPU time counts, so that
what else the machine does does not. `zlib` is Python's, level 1,
over the same objects as they are. In a store: the same objects under new keys are written and read
through a store with each codec, and without one, in turn. Speeds count the bytes of pages.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from kvtide.bench.progress import ShowProgress
from kvtide.storage import ObjectFormat, Store, StoreError, open_store
from kvtide.storage.codec import CodedStore, coded_object
from kvtide.storage.codec.opening import CODECS, NO_CODEC
from kvtide.storage.trial import in_memory, memories, new_keys, new_space

ZLIB = "zlib"
CALL_BYTES = 32 << 20
"""Of a call of the store, as the cache makes them."""

FormattedObjects = Sequence[tuple[ObjectFormat, bytes]]
Coder = tuple[Callable[[], Sequence[memoryview]], Callable[[Sequence[memoryview]], object]]
"""Encodes all objects; decodes what was made of them."""


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """`ratio`: bytes of objects over coded ones. Speeds: a thread's CPU time, medians of turns."""

    codec: str
    raw_bytes: int
    coded_bytes: int
    ratio: float
    encode_gb_s: float
    decode_gb_s: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StoreGain:
    """Pages through a store with a codec. The ratios are to the store without one, by turn."""

    codec: str
    write_gb_s: float
    read_gb_s: float
    write_ratio: float
    read_ratio: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


# -- alone ------------------------------------------------------------------------------------


def alone(objects: FormattedObjects, turns: int, progress: ShowProgress) -> list[CodecSpeed]:
    coders = {ZLIB: _zlib(objects), **{name: _coder(name, objects) for name in CODECS}}
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    coded_bytes: dict[str, int] = {}
    for _ in progress(range(turns), turns, "codecs alone"):
        for name, (encode, decode) in coders.items():
            start = time.thread_time()
            coded = encode()
            middle = time.thread_time()
            decode(coded)
            took[name, "encode"].append(middle - start)
            took[name, "decode"].append(time.thread_time() - middle)
            coded_bytes[name] = sum(map(len, coded))
    raw = sum(len(one) for _, one in objects)
    return [
        CodecSpeed(
            name,
            raw,
            coded_bytes[name],
            raw / coded_bytes[name],
            *(raw / statistics.median(took[name, way]) / 1e9 for way in ("encode", "decode")),
        )
        for name in coders
    ]


def _coder(name: str, objects: FormattedObjects) -> Coder:
    codec, key = CODECS[name](), bytes(32)
    codec.expect(_formats(objects))
    places = memories([coded_object.bound(codec, len(one)) for _, one in objects])
    targets = memories([len(one) for _, one in objects])

    def encode() -> list[memoryview]:
        return [
            place[: coded_object.encode(codec, key, memoryview(one), place)]
            for (_, one), place in zip(objects, places, strict=True)
        ]

    def decode(coded: Sequence[memoryview]) -> None:
        for one, target in zip(coded, targets, strict=True):
            coded_object.decode(codec, key, one, target)

    return encode, decode


def _zlib(objects: FormattedObjects) -> Coder:
    def encode() -> list[memoryview]:
        return [memoryview(zlib.compress(one, 1)) for _, one in objects]

    def decode(coded: Sequence[memoryview]) -> None:
        for one in coded:
            zlib.decompress(one)

    return encode, decode


# -- in a store -------------------------------------------------------------------------------


def in_store(
    url: str,
    objects: FormattedObjects,
    size: int,
    turns: int,
    progress: ShowProgress,
    codecs: Sequence[str] = tuple(CODECS),
) -> list[StoreGain]:
    """Write and read about so many bytes of pages, without a codec and with each of these;
    everything is removed again."""
    count = max(1, -(-size // sum(len(one) for _, one in objects)))
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    with ExitStack() as opened:
        stores = {name: _opened(url, name, objects, opened) for name in (NO_CODEC, *codecs)}
        for _ in progress(range(turns), turns, "codecs in the store"):
            for name, store in stores.items():
                contents = dict(_keyed(objects, count))
                took[name, "write"].append(_timed(store, contents, _write))
                took[name, "read"].append(_timed(store, contents, _read))
                store.clear()
    raw = count * sum(len(one) for _, one in objects)
    return [_gain(name, raw, took) for name in stores]


def _opened(url: str, codec: str, objects: FormattedObjects, opened: ExitStack) -> Store:
    joined = f"{url}{'&' if '?' in url else '?'}codec={codec}"
    store = open_store(joined, new_space())
    opened.callback(store.close)
    opened.callback(store.clear)
    if isinstance(store, CodedStore):
        store.expect(_formats(objects))
    return store


def _gain(name: str, raw: int, took: Mapping[tuple[str, str], Sequence[float]]) -> StoreGain:
    speeds = [raw / statistics.median(took[name, way]) / 1e9 for way in ("write", "read")]
    ratios = [
        statistics.median(
            plain / mine for plain, mine in zip(took[NO_CODEC, way], took[name, way], strict=True)
        )
        for way in ("write", "read")
    ]
    return StoreGain(name, *speeds, *ratios)


def _keyed(objects: FormattedObjects, count: int) -> Iterator[tuple[bytes, bytes]]:
    for _ in range(count):
        yield from zip(new_keys(len(objects)), (one for _, one in objects), strict=True)


def _timed(
    store: Store,
    contents: Mapping[bytes, bytes],
    call: Callable[[Store, list[bytes], list[memoryview]], int],
) -> float:
    """The seconds of calls over all objects; memory is made ready before each."""
    keys, seconds = list(contents), 0.0
    step = max(1, CALL_BYTES // max(map(len, contents.values())))
    for at in range(0, len(keys), step):
        some = keys[at : at + step]
        memory = in_memory({key: contents[key] for key in some})
        start = time.perf_counter()
        wrong = call(store, some, memory)
        seconds += time.perf_counter() - start
        if wrong:
            raise StoreError(
                f"storage {store.name}: {wrong} objects refused or lost; raise its capacity"
            )
    return seconds


def _write(store: Store, keys: list[bytes], memory: list[memoryview]) -> int:
    return store.write(keys, memory).count(False)


def _read(store: Store, keys: list[bytes], memory: list[memoryview]) -> int:
    lengths = store.read(keys, memory)
    return sum(n != len(one) for n, one in zip(lengths, memory, strict=True))


def _formats(objects: FormattedObjects) -> list[ObjectFormat]:
    return list({id(one): one for one, _ in objects}.values())
