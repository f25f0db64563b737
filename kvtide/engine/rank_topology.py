"""A rank's topology among those that serve one model together, and what passes between seats.

    stage 0  ── hidden states ──▶  stage 1  ── … ──▶  last stage ── logits ──▶ everybody

A stage has a range of layers, and its tensor ranks divide each of them. Every rank has an engine
that is given the same calls in the same order, and so keeps the same tree; a pass is computed by
all of them, and what they choose by is the logits of one rank, the *speaker*. Rank 0 *leads*: it
is told what to do by others, and tells all the rest.

Nobody may leave a pass halfway, or others would wait for ever: see `Runner`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from kvtide.layers.tensor_ranks import ALONE, TensorRanks

LEADER = 0
NEVER = timedelta(days=365)
"""How long ranks wait for their leader, who may have nothing to say for days."""
HEAD_BYTES, LENGTH_BYTES = 1024, 8
"""Short words take one exchange: their length, and they themselves behind it."""


@dataclass(frozen=True, slots=True)
class RankTopology:
    """Stage `stage` of `stages`, and one of its tensor ranks.

    Tensors go over `group`; words of the leader over the default group, on the host.
    """

    stage: int = 0
    stages: int = 1
    tensor: TensorRanks = ALONE
    group: dist.ProcessGroup | None = None

    @classmethod
    def taken(cls, stages: int, tensor_ranks: int, device: torch.device) -> RankTopology:
        """This process's topology among those that have met."""
        backend = "nccl" if device.type == "cuda" else "gloo"
        stage, tensor_rank = divmod(dist.get_rank(), tensor_ranks)
        everybody = dist.new_group(backend=backend)
        rows = [range(n * tensor_ranks, (n + 1) * tensor_ranks) for n in range(stages)]
        groups = [dist.new_group(list(row), backend=backend) for row in rows]
        tensor = TensorRanks(tensor_rank, tensor_ranks, groups[stage])
        return cls(stage, stages, tensor, everybody)

    @property
    def ranks(self) -> int:
        return self.stages * self.tensor.count

    @property
    def rank(self) -> int:
        return self.stage * self.tensor.count + self.tensor.rank

    # -- a pass -----------------------------------------------------------------------------

    @property
    def logits_rank(self) -> int:
        """Whose logits count: the first rank of the last stage."""
        return (self.stages - 1) * self.tensor.count

    @property
    def is_logits_rank(self) -> bool:
        return self.rank == self.logits_rank

    def receive_hidden(self, room: Tensor) -> Tensor:
        """What the stage before gives, in the room made for it."""
        dist.recv(room, self.rank - self.tensor.count, self.group)
        return room

    def send_hidden(self, hidden: Tensor) -> None:
        """Give hidden states to the next stage, if there is one."""
        if self.stage + 1 < self.stages:
            dist.send(hidden.contiguous(), self.rank + self.tensor.count, self.group)

    def broadcast_logits(self, said: Tensor) -> Tensor:
        """What the speaker has, on every rank; it may be written over `said`."""
        if self.ranks > 1:
            said = said.contiguous()
            dist.broadcast(said, self.logits_rank, self.group)
        return said

    # -- the leader's words -----------------------------------------------------------------

    def broadcast_command(self, words: bytes) -> None:
        """What the others `hear`."""
        head = bytearray(HEAD_BYTES)
        rest = HEAD_BYTES - LENGTH_BYTES
        head[:LENGTH_BYTES] = len(words).to_bytes(LENGTH_BYTES, "little")
        head[LENGTH_BYTES : LENGTH_BYTES + len(words[:rest])] = words[:rest]
        _said(head)
        if words[rest:]:
            _said(bytearray(words[rest:]))

    def receive_command(self) -> bytes:
        """What the leader tells, whenever that is."""
        head = _said(bytearray(HEAD_BYTES))
        length, words = int.from_bytes(head[:LENGTH_BYTES], "little"), head[LENGTH_BYTES:]
        if length > len(words):
            words += _said(bytearray(length - len(words)))
        return bytes(words[:length])


def join_ranks(rank: int, ranks: int, place: Path) -> None:
    """Wait for the others, at a file that all know and that is new."""
    dist.init_process_group(
        "gloo", init_method=f"file://{place}", rank=rank, world_size=ranks, timeout=NEVER
    )


def leave_ranks() -> None:
    """Leave the others."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _said(words: bytearray) -> bytearray:
    dist.broadcast(torch.frombuffer(words, dtype=torch.uint8), LEADER)
    return words
