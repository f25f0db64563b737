"""Tensor parallelism: ranks that compute a layer together, each with a shard of its weights.

`Blueprint` shards weights as it reads them. A rank has the rows of a projection that give its own
heads, channels or experts, and the columns of the next projection that take them. Each rank then
has a partial sum, and `all_reduce` adds them up. Between layers, activations are whole on every
rank.
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

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of the parts of all ranks; it may be written over `part`."""
        if self.count > 1:
            part = part.contiguous()
            dist.all_reduce(part, group=self.group)
        return part

    def shard(self, units: int) -> range | None:
        """Which of so many units this rank has: several, or one that other ranks have too.

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
