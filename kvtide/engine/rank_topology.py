"""A rank's stage and tensor rank, and what ranks exchange.

    stage 0  ── hidden states ──▶  stage 1  ── … ──▶  last stage ── logits ──▶ all ranks

A stage owns a range of layers; its tensor ranks divide each of them, and the vocabulary. Every rank
has an engine that gets the same calls in the same order, and so keeps the same tree. All ranks
compute a step. The tensor ranks of the last stage gather the logits of all tokens; earlier stages
get them from one of these, the *logits rank*. Rank 0 *leads*: it receives the server's
engine commands and broadcasts them.

A step has no early exit, or other ranks would wait for ever: see `Runner`.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from kvtide.layers.tensor_ranks import ALONE, RankGroup, TensorRanks

LEADER = 0
GLOO, NCCL = "gloo", "nccl"
"""How ranks exchange tensors."""
NEVER = timedelta(days=365)
"""How long ranks wait for the leader's next command."""
HEAD_BYTES, LENGTH_BYTES = 1024, 8
"""A short command takes one broadcast: its length, then its bytes."""


@dataclass(frozen=True, slots=True)
class RankTopology:
    """Stage `stage` of `stages`, and one of its tensor ranks.

    Tensors go over `group`; commands over the default group, on the host.
    """

    stage: int = 0
    stages: int = 1
    tensor: TensorRanks = ALONE
    group: RankGroup = field(default_factory=RankGroup)

    @classmethod
    def joined(cls, stages: int, tensor_ranks: int, backend: str = GLOO) -> RankTopology:
        """This process's place among the ranks that have joined.

        With gloo, tensors of a GPU go through host memory, and ranks may share one. With nccl every
        rank has a GPU of its own.
        """
        stage, tensor_rank = divmod(dist.get_rank(), tensor_ranks)
        all_ranks = dist.new_group(backend=backend)
        rows = [range(n * tensor_ranks, (n + 1) * tensor_ranks) for n in range(stages)]
        groups = [dist.new_group(list(row), backend=backend) for row in rows]
        through_host = backend == GLOO
        tensor = TensorRanks(tensor_rank, tensor_ranks, RankGroup(groups[stage], through_host))
        return cls(stage, stages, tensor, RankGroup(all_ranks, through_host))

    @property
    def ranks(self) -> int:
        return self.stages * self.tensor.count

    @property
    def rank(self) -> int:
        return self.stage * self.tensor.count + self.tensor.rank

    # -- a step -----------------------------------------------------------------------------

    @property
    def logits_rank(self) -> int:
        """It broadcasts logits and drafts: the first rank of the last stage."""
        return (self.stages - 1) * self.tensor.count

    @property
    def is_logits_rank(self) -> bool:
        return self.rank == self.logits_rank

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits, together with the tensor ranks of its stage."""
        return self.stage == self.stages - 1

    def receive_hidden(self, room: Tensor) -> Tensor:
        """Hidden states of the stage before, into `room`."""
        return self.group.receive(room, self.rank - self.tensor.count)

    def send_hidden(self, hidden: Tensor) -> None:
        """Hidden states to the next stage, if there is one."""
        if self.stage + 1 < self.stages:
            self.group.send(hidden, self.rank + self.tensor.count)

    def broadcast_logits(self, logits: Tensor) -> Tensor:
        """The logits rank's tensor, on every rank; may overwrite the argument."""
        return logits if self.ranks == 1 else self.group.broadcast(logits, self.logits_rank)

    # -- engine commands --------------------------------------------------------------------

    def broadcast_command(self, command: bytes) -> None:
        """What the other ranks `receive_command`."""
        head = bytearray(HEAD_BYTES)
        rest = HEAD_BYTES - LENGTH_BYTES
        head[:LENGTH_BYTES] = len(command).to_bytes(LENGTH_BYTES, "little")
        head[LENGTH_BYTES : LENGTH_BYTES + len(command[:rest])] = command[:rest]
        _broadcast(head)
        if command[rest:]:
            _broadcast(bytearray(command[rest:]))

    def receive_command(self) -> bytes:
        """The leader's next command."""
        head = _broadcast(bytearray(HEAD_BYTES))
        length, command = int.from_bytes(head[:LENGTH_BYTES], "little"), head[LENGTH_BYTES:]
        if length > len(command):
            command += _broadcast(bytearray(length - len(command)))
        return bytes(command[:length])


def open_store(host: str) -> tuple[Store, int]:
    """Where ranks find each other: the leader's end, on this address alone, and its port.

    torch's store asks for no proof: any process that reaches the port can change what is in it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listening:
        port = int(listening.getsockname()[1])
        store = TCPStore(
            host,
            port,
            is_master=True,
            timeout=NEVER,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    return store, port


def reach_store(host: str, port: int) -> Store:
    """The other ranks' end."""
    return TCPStore(host, port, timeout=NEVER, wait_for_workers=False)


def join_ranks(rank: int, ranks: int, store: Store) -> None:
    """Wait for the other ranks at the store."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=NEVER)


def leave_ranks() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _broadcast(command: bytearray) -> bytearray:
    dist.broadcast(torch.frombuffer(command, dtype=torch.uint8), LEADER)
    return command
