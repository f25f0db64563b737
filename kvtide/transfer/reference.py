"""The CPU reference: plain memory copies, one after another. What the other backends must equal."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import pairwise

from kvtide.transfer.strided import Strided, runs


class Reference:
    """Copies at once, on the calling thread; the interpreter is free meanwhile."""

    name = "reference"

    def issue(self, works: Sequence[Strided], legs: int) -> Iterator[None]:
        source, target, sizes, bounds = runs(works, legs)
        copies = list(zip(target.tolist(), source.tolist(), sizes.tolist(), strict=True))
        for start, end in pairwise(bounds):
            for copy in copies[start:end]:
                ctypes.memmove(*copy)
            yield
