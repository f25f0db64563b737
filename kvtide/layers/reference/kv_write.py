"""A step's entries into their pages: the torch reference."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.packing import Fields, plain

_Targets = tuple[Tensor, Tensor, Tensor]


def kv_write(run: ForwardPass, place: Place, entries: Mapping[str, Tensor]) -> Fields:
    """Writes the step's entries where their page has a slot, and returns them as written.

    There is one for every token; in a pool of one entry for r tokens, one for every r-th token
    that the step completes, sequence by sequence.
    """
    each = place.pool.tokens_per_entry
    rows, slots, within = run.shared(("targets", place.anchor, each), lambda: _targets(run, place))
    view = run.step.view(place.pool.name, place.layer)
    kept = place.packing.pack(entries)
    for name, value in kept.items():
        plain(view[name])[slots, within] = plain(value)[rows]
    return place.packing.unpack(kept, *entries)


def _targets(run: ForwardPass, place: Place) -> _Targets:
    """The new entries that have a slot, each one's slot, and its place in the page."""
    each, per_page = place.pool.tokens_per_entry, run.entries_per_page(place)
    numbers = [
        torch.arange(s.past // each, s.total // each, device=run.positions.device)
        for s in run.sequences
    ]
    slots = torch.cat(
        [
            s.slots[place.anchor][ours // per_page]
            for s, ours in zip(run.sequences, numbers, strict=True)
        ]
    )
    kept = torch.nonzero(slots >= 0).squeeze(1)
    return kept, slots[kept], torch.cat(numbers)[kept] % per_page
