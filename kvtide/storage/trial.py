"""Objects to try a store with, the memory they lie in, and whether they come back.

What `conformance` and `kvtide bench storage` are made of. Contents follow from keys, so nothing
need be remembered to compare them.
"""

from __future__ import annotations

import mmap
import random
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvtide.storage.store import KEY_BYTES, SPACE_BYTES, Store, StoreError

Objects = Mapping[bytes, bytes]
PAGE = mmap.PAGESIZE


def write_all(store: Store, objects: Objects, shift: int = 0) -> Iterator[str]:
    answer = store.write(list(objects), in_memory(objects, shift))
    if answer != [True] * len(objects):
        refused = [len(c) for c, ok in zip(objects.values(), answer, strict=False) if not ok]
        yield (
            f"write refused {len(refused)} of {len(objects)} objects, the first of "
            f"{refused[0] if refused else '?'} B; raise its capacity, or name what it cannot hold"
        )


def find_all(store: Store, objects: Objects, extra: int = 0, shift: int = 0) -> Iterator[str]:
    """Are these objects there, and as they were written? `extra`: how much longer targets are."""
    keys, sizes = list(objects), [len(content) for content in objects.values()]
    if (answer := store.exists(keys)) != [True] * len(keys):
        yield f"exists is wrong for {differences(answer, [True] * len(keys))} of {len(keys)} keys"
    targets = memories([size + extra for size in sizes], shift)
    lengths = store.read(keys, targets)
    if lengths != sizes:
        wrong = [(size, got) for size, got in zip(sizes, lengths, strict=False) if size != got]
        size, got = wrong[0] if wrong else (len(sizes), len(lengths))
        notes = "; ".join(["", *store.status().notes])
        yield f"read returns {got} for an object of {size:,} B, wrong for {len(wrong)}{notes}"
    for key, target, length in zip(keys, targets, lengths, strict=False):
        if length == len(objects[key]) and target[:length] != objects[key]:
            yield f"an object of {length:,} B has other bytes than were written"
            return


def together(tasks: Sequence[Callable[[int], list[str]]]) -> list[str]:
    """Run every task in a thread of its own; what they found, or raised."""

    def run(number: int) -> list[str]:
        try:
            return tasks[number](number)
        except StoreError as error:
            return [f"raised {type(error).__name__} with several threads at work: {error}"]

    with ThreadPoolExecutor(len(tasks)) as pool:
        return [text for found in pool.map(run, range(len(tasks))) for text in found]


def kinds(call: str, answer: object, kind: type, count: int) -> Iterator[str]:
    right = isinstance(answer, list) and len(answer) == count
    if not right or any(type(one) is not kind for one in answer):  # type: ignore[attr-defined]
        yield f"{call} answers {answer!r} to {count} keys, which is not a list of {kind.__name__}"


def differences(answer: Sequence[object], expected: Sequence[object]) -> int:
    pairs = zip(answer, expected, strict=False)
    return sum(a != b for a, b in pairs) + abs(len(answer) - len(expected))


def new_space() -> bytes:
    return secrets.token_bytes(SPACE_BYTES)


def new_keys(count: int) -> list[bytes]:
    return [secrets.token_bytes(KEY_BYTES) for _ in range(count)]


def content_of(seed: bytes, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def new_objects(sizes: Sequence[int]) -> dict[bytes, bytes]:
    return {
        key: content_of(key, size) for key, size in zip(new_keys(len(sizes)), sizes, strict=True)
    }


def in_memory(objects: Objects, shift: int = 0) -> list[memoryview]:
    """The objects in memory of their own."""
    placed = memories([len(content) for content in objects.values()], shift)
    for memory, content in zip(placed, objects.values(), strict=True):
        memory[:] = content
    return placed


def memories(sizes: Sequence[int], shift: int = 0) -> list[memoryview]:
    """Zeroed memory, each piece `shift` bytes behind the beginning of a page."""
    if not sizes:
        return []
    steps = [-(-(shift + size) // PAGE) * PAGE for size in sizes]
    block = memoryview(mmap.mmap(-1, sum(steps)))
    starts = [sum(steps[:n]) + shift for n in range(len(steps))]
    return [block[start : start + size] for start, size in zip(starts, sizes, strict=True)]
