"""Tensor parallelism: ranks that compute a layer together, each with a shard of its weights.

`Blueprint` shards weights as it reads them. A rank has the rows of a projection that give its own
heads, channels or experts, and the columns of the next projection that take them. Each rank then
has a partial sum, and `all_reduce` adds them up. Between layers, activations are whole on every
rank. Embedding and head are sharded by tokens of the vocabulary: `all_reduce` completes the rows of
the one, `all_gather` the logits of the other. Pipeline stages `send` and `receive` hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that exchange tensors.

    through_host  tensors of a GPU are copied to the host and back: gloo's group. NCCL's group takes
                  them where they are.
    """

    group: dist.ProcessGroup | None = None
    through_host: bool = True

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of the parts of all ranks; it may be written over `part`."""
        part = part.contiguous()
        there = self._there(part)
        dist.all_reduce(there, group=self.group)
        return _back(there, part)

    def all_gather(self, columns: Tensor, count: int) -> Tensor:
        """The columns of `count` ranks side by side."""
        there = self._there(columns.contiguous())
        parts = [torch.empty_like(there) for _ in range(count)]
        dist.all_gather(parts, there, group=self.group)
        return torch.cat(parts, dim=-1).to(columns.device)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of rank `source`, on every rank; may overwrite the argument."""
        tensor = tensor.contiguous()
        there = self._there(tensor)
        dist.broadcast(there, source, self.group)
        return _back(there, tensor)

    def send(self, tensor: Tensor, target: int) -> None:
        dist.send(self._there(tensor.contiguous()), target, self.group)

    def receive(self, room: Tensor, source: int) -> Tensor:
        """What rank `source` sends, in `room`."""
        there = self._there(room)
        dist.recv(there, source, self.group)
        return _back(there, room)

    def _there(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if self.through_host else tensor


def _back(there: Tensor, tensor: Tensor) -> Tensor:
    return tensor if there is tensor else tensor.copy_(there)


@dataclass(frozen=True, slots=True)
class TensorRanks:
    """The `rank`-th of `count` that divide every layer; `group` connects them."""

    rank: int = 0
    count: int = 1
    group: RankGroup = RankGroup()

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of the parts of all ranks; it may be written over `part`."""
        return part if self.count == 1 else self.group.all_reduce(part)

    def all_gather(self, columns: Tensor) -> Tensor:
        """The columns of all ranks side by side; every rank has equally many, and gets the same
        bits."""
        return columns if self.count == 1 else self.group.all_gather(columns, self.count)

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

    def vocabulary_shard(self, tokens: int) -> range:
        """Which of so many tokens this rank has; the last ranks have fewer where they do not
        divide, and may have none."""
        each = self.vocabulary_rows(tokens)
        return range(min(tokens, self.rank * each), min(tokens, (self.rank + 1) * each))

    def vocabulary_rows(self, tokens: int) -> int:
        """How many rows every rank has for its tokens, with padding."""
        return -(-tokens // self.count)


ALONE = TensorRanks()
