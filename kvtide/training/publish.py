"""A trained draft on disk, in the published format: `config.json` and `model.safetensors`.

Weights are bf16. The head may be fp8 with block scales (`lm_head.weight_scale_inv`).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvtide.models import fp8
from kvtide.models.checkpoint import Checkpoint
from kvtide.models.draft_checkpoint import DraftCheckpoint
from kvtide.models.quantized_weights import PublishedWeights
from kvtide.models.safetensors_folder import missing
from kvtide.models.weight_digest import Stored
from kvtide.spec.config import Config
from kvtide.training.draft_shape import HeadFormat
from kvtide.training.draft_vocabulary import DraftVocabulary
from kvtide.training.trainable_eagle3 import TrainableEagle3

HEAD = "lm_head.weight"


class TensorsInMemory:
    """Tensors as `safetensors_folder.StoredTensors`."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise missing(Path("a draft in training"), name)
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.get(name).shape)

    def get_rows(self, name: str, rows: range) -> Tensor:
        return self.get(name)[rows.start : rows.stop]

    def stored(self, name: str) -> Stored:
        data = self._tensors[name].contiguous().view(torch.uint8).numpy().reshape(-1)
        shape = tuple(self._tensors[name].shape)
        return Stored(f"{self._tensors[name].dtype} {shape}", data, data.size // shape[0])


@dataclass(frozen=True, slots=True)
class TrainedDraft:
    """A draft's config and tensors, as they are published."""

    config: dict[str, object]
    tensors: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        draft: TrainableEagle3,
        vocabulary: DraftVocabulary | None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> TrainedDraft:
        tensors = draft.tensors(dtype)
        if draft.shape.lm_head is HeadFormat.FP8:
            head, scales = fp8.quantise(draft.lm_head.weight.detach().cpu())
            tensors |= {HEAD: head, f"{HEAD}_scale_inv": scales}
        if vocabulary is not None:
            tensors |= {"d2t": vocabulary.d2t.int(), "t2d": vocabulary.t2d}
        return cls(draft.shape.config(), tensors)

    def opened(self) -> DraftCheckpoint:
        """As `open_draft` gives it from disk."""
        config = Config("the draft in training", self.config)
        weights = PublishedWeights(Path(), TensorsInMemory(self.tensors))
        return DraftCheckpoint(Checkpoint(Path(), self.config, weights, {}), config)

    def publish(self, folder: Path) -> int:
        """Write the folder's two files, each whole or not at all; returns the weights' bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        weights, config = folder / "model.safetensors", folder / "config.json"
        save_file(self.tensors, weights.with_suffix(".new"), {"format": "pt"})
        config.with_suffix(".new").write_text(json.dumps(self.config, indent=2) + "\n", "utf-8")
        for file in (weights, config):
            new = file.with_suffix(".new")
            new.chmod(0o644)
            new.replace(file)
        return weights.stat().st_size
