"""Joining the process group of all ranks: over which interface, on which device."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import torch
from torch._C._distributed_c10d import Store

from kvtide.engine import RankTopology
from kvtide.engine.rank_topology import GLOO, NCCL, join_ranks
from kvtide.server.ranks.network_interfaces import interface_of, local_address
from kvtide.server.setting_values import SettingsError
from kvtide.server.settings import Settings

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the interface of connections between ranks."""


def join_group(
    rank: int, settings: Settings, store: Store, host: str, port: int
) -> tuple[Settings, RankTopology]:
    """Join the ranks that meet at this place: this rank's settings and topology."""
    device = torch.device(settings.device)
    if device.type == "cuda":
        number = rank % settings.node_ranks % torch.cuda.device_count()
        settings = replace(settings, device=f"cuda:{number}")
        torch.cuda.set_device(number)
    _choose_interface(host, port)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // settings.node_ranks))
    join_ranks(rank, settings.ranks, store)
    return settings, RankTopology.joined(settings.pp, settings.tp, rank_backend(settings))


def rank_backend(settings: Settings) -> str:
    """How ranks exchange tensors."""
    return settings.rank_backend or (NCCL if settings.on_gpu else GLOO)


def ranks_per_gpu(settings: Settings) -> int:
    """How many ranks of a machine share a GPU: with NCCL none do."""
    if rank_backend(settings) == NCCL:
        return 1
    return -(-settings.node_ranks // max(1, torch.cuda.device_count()))


def _choose_interface(host: str, port: int) -> None:
    """The one by which this machine reaches the meeting place, unless the environment says."""
    if sys.platform != "linux" or all(name in os.environ for name in INTERFACES):
        return
    address = local_address(host, port)
    interface = interface_of(address)
    if interface is None:
        raise SettingsError(
            f"no network interface has the address {address}, from which {host} is reached; set "
            f"{INTERFACES[0]} to the one that ranks connect over"
        )
    for name in INTERFACES:
        os.environ.setdefault(name, interface)
