"""Which shapes have pages in a store: each that stores any leaves a *mark* there, a small object.

A store does not list its keys. Without marks a look-up asks for a missing page in every shape that
there may be, with each prompt. With them it asks for all marks, at most every `REFRESH_S`, and for
missing pages in those shapes alone that left one.

    a shape stores pages ──▶ its mark ──at most REFRESH_S──▶ known to the ranks of other shapes

A mark that the store evicts is renewed beside later pages, by its own shape and by each rank that
knows it. A shape that is known stays so. Where a mark is missing, pages are computed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kvtide.spec import RankShape
from kvtide.storage.objects import LabelledFormat, ObjectFormat

REFRESH_S = 10.0
"""Between two look-ups of marks, and between two checks of those that this rank keeps there."""

_PAGE_KEY = hashlib.sha256(b"the mark of a shape").digest()


def mark_key(first_rank: ObjectFormat) -> bytes:
    """The key of a shape's mark, from the objects of its first rank."""
    return first_rank.key(_PAGE_KEY)


class StoreCall(Protocol):
    """Makes a call of the store: its answers, one for every key."""

    def __call__(
        self, call: str, keys: Sequence[bytes], *memory: Sequence[memoryview]
    ) -> Sequence[Any]: ...


class ShapeMarks:
    """The marks that this rank looks for, and those that it leaves.

    own     the objects of this rank, if it is the first one of its shape: only that one's mark is
            looked for
    others  those of the first ranks of all other shapes
    """

    def __init__(
        self,
        own: ObjectFormat | None,
        others: Callable[[], Mapping[RankShape, ObjectFormat]],
        space: bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = () if own is None else (mark_key(own),)
        self._others = others
        self._format = LabelledFormat(0, b"mark", space)
        self._clock = clock
        self._known: dict[RankShape, bytes] = {}
        self._refresh_at = self._check_at = -float("inf")

    def known(self, call: StoreCall) -> list[RankShape]:
        """The other shapes that have left a mark, as far as this rank has asked."""
        now = self._clock()
        if now >= self._refresh_at:
            asked = {
                shape: mark_key(one)
                for shape, one in self._others().items()
                if shape not in self._known
            }
            there = call("exists", [*asked.values()]) if asked else ()
            marked = zip(asked.items(), there, strict=True)
            self._known = {**self._known, **{shape: key for (shape, key), has in marked if has}}
            self._refresh_at = now + REFRESH_S
        return list(self._known)

    def missing(self, call: StoreCall) -> Mapping[bytes, memoryview]:
        """By key, the marks of this shape and of those that are known which the store has not."""
        now, keys = self._clock(), [*self._own, *self._known.values()]
        if now < self._check_at or not keys:
            return {}
        missing = [key for key, has in zip(keys, call("exists", keys), strict=True) if not has]
        if not missing:
            self._check_at = now + REFRESH_S
        return {key: self._sealed(key) for key in missing}

    def _sealed(self, key: bytes) -> memoryview:
        memory = memoryview(bytearray(self._format.bytes))
        self._format.seal(memory, key)
        return memory
