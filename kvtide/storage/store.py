"""What a store is: bytes under keys, for one model, in batches.

A store holds the objects of one *space*: a model's fingerprint, given when it is opened. Keys are
32 bytes and never reused for other contents, so a store need not ever replace an object, and may
lose any at any time. What it may not do is to return other bytes than were written; even that is
checked by the cache, which seals every object with a checksum (`objects`).

The rules, which `conformance` checks:

- Calls come from several threads at once. A call handles its batch with whatever parallelism is
  good for the store, and returns, or raises, within the store's time-out.
- A whole call that cannot work (server gone, no permission) raises `StoreError`, with a sentence.
  Single objects that cannot be read or written do not fail the others of their batch.
- Nothing is visible before it is whole: an object that `exists` can be read, all of it, unless it
  was removed since. `write` returns True for an object only if a reader that opens the store anew
  will find it (how far that holds across a crash of the process or the machine, a store documents).
- Memory given to a call is the caller's again when the call returns or raises. A store that
  cannot promise this after an error raises `LingeringError` instead, and the memory is not used
  again for the time that it names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

KEY_BYTES = 32
SPACE_BYTES = 32
MISSING = -1
"""The result of `read` for an object that does not exist, or could not be read."""

CORRUPT = -2
"""The result of `read` for an object that is there, and is not what was written. The store has
logged the reason; the caller removes it."""

DEFAULT_TIMEOUT_S = 5.0
"""The time-out of a call; the URL may set another (`?timeout=2.5`)."""


class StoreError(RuntimeError):
    """A store that cannot be opened, or a call that did not work. The message names the remedy."""


class LingeringError(StoreError):
    """A failed call whose memory may still be read or written for `lingers_s` seconds."""

    def __init__(self, message: str, lingers_s: float) -> None:
        super().__init__(message)
        self.lingers_s = lingers_s


@dataclass(frozen=True, slots=True)
class Removed:
    """What `clear` removed. `bytes` is None where the store cannot tell."""

    objects: int
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """How a store stands. None: the store cannot tell, or has no limit of its own.

    objects, bytes    of this space
    all_bytes         of all spaces together, where `capacity_bytes` is a limit on them
    notes             sentences for the operator: what is unusual, what was refused and how often
    """

    objects: int | None = None
    bytes: int | None = None
    all_bytes: int | None = None
    capacity_bytes: int | None = None
    notes: tuple[str, ...] = ()


class Store(Protocol):
    """See the module. `name` is what people read in logs: a URL without its secrets."""

    name: str

    def lend(self, block: memoryview) -> None:
        """Targets and sources of later calls will lie in this memory, which outlives the store.

        For stores that register memory once; others do nothing. Other memory stays allowed.
        """

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """For every key: is there an object? Cheap, and no promise that it stays."""

    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[int]:
        """Read objects into the memory given; for each its length, MISSING or CORRUPT.

        An object that is longer than its target is MISSING; what the target then holds is
        undefined, as it is behind a shorter object.
        """

    def write(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> list[bool]:
        """Store objects; for each, whether it is there now.

        False: this one was refused (store full, or object too large). An existing object stays.
        """

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove objects; how many of them were there."""

    def clear(self) -> Removed:
        """Remove every object of this space, and nothing else."""

    def status(self) -> StoreStatus:
        """How the store stands; may take as long as any other call."""

    def close(self) -> None:
        """Let go of files, connections and threads. What was acknowledged stays. Idempotent."""
