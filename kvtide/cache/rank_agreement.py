"""Ranks that serve one model keep the same tree, so all must end every transfer alike.

Every rank makes the same calls in the same order and so has the same transfers in flight; only the
time when one is done differs. In every `land` the ranks take the minimum of their verdicts: pending
if pending anywhere, failed if failed anywhere, landed only if landed everywhere. That is one small
all-reduce, and none when nothing is in flight. `all_true` agrees on the rest when it comes up: what
stores hold of a prompt, once per fetch, and whether a step that waited for a prefix succeeded.

A local event (a copy that broke, a clock that ran out) never changes a rank's tree by itself: it
becomes a verdict first, and all ranks act on the agreed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

WIDTH = 192
"""Verdicts per exchange. Older transfers come first; the rest waits for the next."""


class Agreement(Protocol):
    def all_min(self, values: Sequence[int], clock: int = 0) -> list[int]:
        """The minimum over all ranks of each value; at most the first WIDTH values.

        `clock` is the logical time of the rank's tree, which is the same on all ranks.
        """

    def all_true(self, bits: Sequence[bool]) -> list[bool]:
        """Which of these hold on every rank; all ranks pass as many."""


class Alone:
    """One rank agrees with itself."""

    def all_true(self, bits: Sequence[bool]) -> list[bool]:
        return list(bits)

    def all_min(self, values: Sequence[int], clock: int = 0) -> list[int]:
        return list(values)


class RanksDivergedError(RuntimeError):
    """Ranks made different calls: their trees differ, and pages may be wrong."""


class Ranks:
    """Agreement over a process group of torch.distributed (the default group if none is given).

    The tensor has a fixed length, so that ranks that diverged raise instead of hanging. It begins
    with the number of values and the clock, and with their negatives; the minima cancel if all
    agree. A rank that is alone in an exchange raises after `timeout_s`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._group = group
        self._device = device or torch.device("cpu")
        self._timeout_s = timeout_s

    def all_min(self, values: Sequence[int], clock: int = 0) -> list[int]:
        shown = list(values[:WIDTH])
        padding = [0] * (WIDTH - len(shown))
        count = len(values)
        sent = [count, clock, -count, -clock, *shown, *padding]
        min_count, min_clock, max_count, max_clock, *found = self._reduce(sent)
        if (min_count, min_clock) != (-max_count, -max_clock):
            raise RanksDivergedError(
                f"this rank has {count} transfers in flight at step {clock} of its tree, others "
                f"from {min_count} to {-max_count} at steps {min_clock} to {-max_clock}: they were "
                "not given the same calls; restart all ranks"
            )
        return found[: len(shown)]

    def all_true(self, bits: Sequence[bool]) -> list[bool]:
        if not bits:
            return []
        return [bool(bit) for bit in self._reduce([int(bit) for bit in bits])]

    def _reduce(self, sent: list[int]) -> list[int]:
        tensor = torch.tensor(sent, device=self._device)
        try:
            work = dist.all_reduce(tensor, dist.ReduceOp.MIN, self._group, async_op=True)
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise RanksDivergedError(
                f"other ranks did not answer within {self._timeout_s:g} s ({error}): they have "
                "nothing in flight, or are gone; restart all ranks"
            ) from error
        found: list[int] = tensor.tolist()
        return found
