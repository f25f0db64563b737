"""Which backend and host layout work where: one table, from which the tests are made.

| backend     | copies by                                                        |
|-------------|------------------------------------------------------------------|
| `reference` | plain memory copies on a CPU                                     |
| `kernel`    | a device kernel that reads and writes pinned host memory         |
| `direct`    | the copy engine, in batches                                      |
| `auto`      | `direct` for long runs and `kernel` for short ones, as measured  |

`CacheConfig` checks the cell once, before any memory is taken. A cell that is not in the table is
refused with the choices that are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvtide.tiers.arena import TierError
from kvtide.tiers.buffers import Buffers
from kvtide.tiers.layout import Layout
from kvtide.transfer.copy_engine import Direct
from kvtide.transfer.copy_jobs import Copier
from kvtide.transfer.lane import Backend, Lane
from kvtide.transfer.measured_backend import fastest_of_both
from kvtide.transfer.strided import Reference, Way
from kvtide.transfer.timeline import CudaTimeline, HostTimeline
from kvtide.transfer.triton_copies import strided_kernel

ANY = frozenset(Layout)

CELLS: Mapping[tuple[str, str], frozenset[Layout]] = {
    ("cpu", "reference"): ANY,
    ("cuda", "kernel"): ANY,
    ("cuda", "direct"): ANY,
    ("cuda", "auto"): ANY,
}
"""Kind of device and backend → the host layouts that the backend works with there."""

DEFAULTS = {"cpu": "reference", "cuda": "auto"}


def check(device: torch.device, backend: str, layout: Layout) -> None:
    """Refuse a cell that is not in the table, naming those that are."""
    if layout in CELLS.get((device.type, backend), ()):
        return
    valid = [
        f"{name} (host layout {', '.join(sorted(one.value for one in layouts))})"
        for (kind, name), layouts in CELLS.items()
        if kind == device.type
    ]
    if not valid:
        kinds = " or ".join(sorted({kind for kind, _ in CELLS}))
        raise TierError(f"device {device.type}: nothing copies to and from it; use {kinds}")
    raise TierError(
        f"backend {backend} with host layout {layout.value} does not work on {device.type}; "
        f"use {' or '.join(valid)}"
    )


def open_backend(name: str, device: Buffers, host: Buffers) -> Backend:
    """The backend of that name, which the configuration has checked.

    `auto` measures in the tiers' memory, which must be empty yet.
    """
    if name == "reference":
        return Reference()
    if name == "direct":
        return Direct()
    if name == "auto":
        return fastest_of_both(device, host)
    assert name == "kernel", f"no backend named {name}"
    return strided_kernel(device.data.device)


def open_copier(name: str, device: Buffers, host: Buffers) -> Copier:
    """A copier with a lane in each direction."""
    backend = open_backend(name, device, host)
    on = device.data.device
    lanes = {
        way: Lane(
            way.name.lower(),
            CudaTimeline(on) if on.type == "cuda" else HostTimeline(),
            backend,
        )
        for way in Way
    }
    return Copier(device, host, lanes)
