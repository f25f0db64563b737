"""Ranks that compute a layer together, each with its share of the heads, channels or experts.

What divides is decided where weights are read (`Blueprint`): a rank has the rows of a projection
that give its own heads, and the columns of the next one that take them. What comes out is then
a part of a sum, and `total` adds the parts up. Everything between layers is whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorRanks:
    """The `rank`-th of `count` that divide every layer; `group` connects them."""

    rank: int = 0
    count: int = 1
    group: dist.ProcessGroup | None = None

    def total(self, part: Tensor) -> Tensor:
        """The sum of what all ranks have; it may be written over `part`."""
        if self.count > 1:
            part = part.contiguous()
            dist.all_reduce(part, group=self.group)
        return part

    def share(self, units: int) -> range | None:
        """Which of so many units are this rank's: several, or one that it shares with others.

        None where they do not divide. A field of the memory divides in the same way.
        """
        if units % self.count == 0:
            each = units // self.count
            return range(self.rank * each, (self.rank + 1) * each)
        if self.count % units == 0:
            one = self.rank * units // self.count
            return range(one, one + 1)
        return None


ALONE = TensorRanks()
