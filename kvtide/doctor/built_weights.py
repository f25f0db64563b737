"""How many bytes a model's weights take once they are built, as its layers decide it.

The model is built from its weights in outline, on torch's meta device: so every layer keeps
packed, joins and unpacks what it does for a server, and nothing is read or computed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from kvtide.engine.declared_state.reachable_tensors import tensors
from kvtide.layers import choose
from kvtide.layers.backend.arithmetic import Batched
from kvtide.layers.backend.packed_weight import PackedWeight
from kvtide.layers.backend.torch_ops import TorchOps
from kvtide.models import build
from kvtide.models.checkpoint import Checkpoint, OnDevice
from kvtide.models.outlined_weights import META, OutlinedWeights
from kvtide.server.settings import MTP, Settings
from kvtide.server.setup.speculation_setup import build_draft, choose_speculation


class _Outlining(Batched):
    """Keeps weights packed as another arithmetic does, and unpacks nothing."""

    def __init__(self, packed_forms: Collection[str]) -> None:
        self.packed_forms = packed_forms

    def unpacked(self, weight: PackedWeight) -> torch.Tensor:
        return torch.empty(len(weight), weight.inputs, dtype=torch.float32, device=META)


def weight_bytes(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> int:
    """Of the model and of the draft that a server gives it by itself, on one device."""
    on_cpu = device.type == "cpu"
    forms = choose(False, device).arithmetic.packed_forms if on_cpu else ()
    ops = TorchOps(_Outlining(forms))
    choice = choose_speculation(Settings(), checkpoint)
    weights = OutlinedWeights(checkpoint.weights)
    outlined = replace(checkpoint, weights=weights)
    if choice.draft is not None:
        draft = choice.draft
        own = replace(draft.checkpoint, weights=OutlinedWeights(draft.checkpoint.weights))
        choice = replace(choice, draft=replace(draft, checkpoint=own))
    with META:
        model = build(
            outlined.config,
            OnDevice(weights, META),
            dtype=dtype,
            mtp=choice.method == MTP,
            draft=choice.draft,
            ops=ops,
        )
        drafting = build_draft(choice, outlined, model)
    return held_bytes(META, model, drafting)


def held_bytes(device: torch.device, *built: object) -> int:
    """Of all tensors on this device that can be reached from what was built."""
    found = [sighting.tensor for sighting in tensors(built, "built").values()]
    storages = [tensor.untyped_storage() for tensor in found if tensor.device == device]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
