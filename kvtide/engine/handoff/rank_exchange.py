"""Bytes that every rank has, given to all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from kvtide.engine.rank_topology import RankTopology


def exchange(topology: RankTopology, mine: bytes) -> list[bytes]:
    """What each rank passed, in the order of ranks. All ranks call it at the same time."""
    if topology.ranks == 1:
        return [mine]
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(topology.ranks)]
    dist.all_gather(lengths, torch.tensor([len(mine)]))
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
    gathered = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(gathered, padded)
    pairs = zip(gathered, lengths, strict=True)
    return [bytes(each.numpy().tobytes()[: int(length)]) for each, length in pairs]
