"""A model on disk: its config, its weights and its tokenizer, from a folder or from a GGUF file.

A folder holds `config.json` and `model.safetensors`, or shards and their index, as
`save_pretrained` and the labs write them. A GGUF file is read as the folder it was made from: the
same config fields, the same names of weights. What is published in eight or four bits with scales
is read as numbers (`published`).

Files are mapped and a weight is read when it is asked for: a pipeline stage that asks for its own
layers touches only those. What can be known to be wrong is refused on opening.

The fingerprint stands for the weights in the keys of stored pages. By default it takes a sample of
large tensors (`weight_digest`) and small ones whole, with all names, dtypes and shapes and the
config: 16 GB in a second, where hashing every byte takes two cores seven. After an edit of single
numbers by hand, ask for every byte.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from kvtide.layers import Weights
from kvtide.layers.backend.packed_weight import PackedWeight
from kvtide.models.gguf import GGUF, architectures
from kvtide.models.gguf.tensors import packed_matrix, read_tensor, tensor_outline
from kvtide.models.model_errors import CheckpointError
from kvtide.models.quantized_weights import METHODS, PublishedWeights
from kvtide.models.safetensors_folder import WeightOutline, missing, read_json
from kvtide.models.weight_digest import Stored, digest_weight

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
)

NOT_THE_MODEL = {"_name_or_path", "transformers_version"}
"""Fields of a config that say where it was written, not what the model computes."""


class StoredWeights(Weights, Protocol):
    """Weights on disk, by HF's names.

    `get` gives one on the CPU: float32 where it was quantised (MXFP4: bf16, which has every value
    of it), else as it was stored. It may lie in the mapped file: copy it before writing to it.
    `names` and `stored` are of what lies on disk, where a weight may be several tensors.
    """

    def names(self) -> Collection[str]: ...

    def stored(self, name: str) -> Stored: ...

    def outline(self, name: str) -> WeightOutline:
        """What `get` and `packed` give; no weight is read."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open checkpoint. `tokenizer_files` are a folder's own; a GGUF file is `gguf` itself."""

    path: Path
    config: Mapping[str, object]
    weights: StoredWeights
    tokenizer_files: Mapping[str, Path]
    gguf: GGUF | None = None

    def fingerprint(self, *, every_byte: bool = False) -> bytes:
        """32 bytes that stand for config and weights, however they are sharded."""
        described = {k: v for k, v in self.config.items() if k not in NOT_THE_MODEL}
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
        hashed = partial(_digest, self.weights, every_byte=every_byte)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for part in pool.map(hashed, sorted(self.weights.names())):
                digest.update(part)
        return digest.digest()


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A checkpoint's weights, copied to the device of the model."""

    weights: Weights
    device: torch.device

    def get(self, name: str) -> torch.Tensor:
        return self.weights.get(name).to(self.device)

    def has(self, name: str) -> bool:
        return self.weights.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights.shape(name)

    def get_rows(self, name: str, rows: range) -> torch.Tensor:
        return self.weights.get_rows(name, rows).to(self.device)

    def packed(self, name: str) -> PackedWeight | None:
        return None if self.device.type == "cuda" else self.weights.packed(name)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The model in this folder or GGUF file."""
    place = Path(path)
    if place.is_dir():
        return _open_folder(place)
    if not place.exists():
        raise CheckpointError(
            f"{place}: no such file or folder; pass a folder with a config.json or a .gguf file"
        )
    file = GGUF(place)
    return Checkpoint(place, architectures.config(file), GGUFWeights(file), {}, file)


# -- folders -----------------------------------------------------------------------------------


def _open_folder(folder: Path) -> Checkpoint:
    config = _config(folder)
    method = config.get("quantization_config")
    name = method.get("quant_method", "unknown") if isinstance(method, Mapping) else method
    if name is not None and name not in METHODS:
        raise CheckpointError(
            f"{folder}: the weights are quantised ({name}), which is not read here; use a "
            "checkpoint in bf16, fp16, fp32, block-scaled fp8 or mxfp4, or a GGUF file"
        )
    files = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
    return Checkpoint(folder, config, PublishedWeights.open(folder, method), files)


def _config(folder: Path) -> dict[str, object]:
    path = folder / "config.json"
    if path.is_file():
        return read_json(path)
    if found := sorted(folder.glob("*.gguf")):
        raise CheckpointError(f"{folder}: no config.json here; pass the file itself: {found[0]}")
    raise CheckpointError(
        f"{folder}: no config.json here; put the model's there, or pass the folder that has it"
    )


# -- GGUF --------------------------------------------------------------------------------------


class GGUFWeights:
    """The weights of a GGUF file under HF's names, in HF's order of rows."""

    def __init__(self, file: GGUF) -> None:
        self._file = file
        self._sources = architectures.sources(file)

    def names(self) -> Collection[str]:
        return self._sources.keys()

    def has(self, name: str) -> bool:
        return name in self._sources

    def get(self, name: str) -> torch.Tensor:
        source = self._source(name)
        tensor = read_tensor(self._file, source.name)
        return tensor if source.change is None else source.change(tensor)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._source(name).name].shape

    def get_rows(self, name: str, rows: range) -> torch.Tensor:
        source = self._source(name)
        if source.change is not None or len(self.shape(name)) == 1:  # A change may move rows.
            return self.get(name)[rows.start : rows.stop]
        return read_tensor(self._file, source.name, rows)

    def packed(self, name: str) -> PackedWeight | None:
        source = self._source(name)
        packed = packed_matrix(self._file, source.name)
        if packed is None or source.change is None:
            return packed
        return packed.moved(source.change)

    def outline(self, name: str) -> WeightOutline:
        return tensor_outline(self._file, self._source(name).name)

    def _source(self, name: str) -> architectures.Source:
        if name not in self._sources:
            raise missing(self._file.path, name)
        return self._sources[name]

    def stored(self, name: str) -> Stored:
        source = self._sources[name].name
        tensor = self._file.tensors[source]
        form = f"{tensor.form.name} {tensor.shape}"
        return Stored(form, self._file.raw(source), tensor.row_bytes)


# -- fingerprints ------------------------------------------------------------------------------


def _digest(weights: StoredWeights, name: str, *, every_byte: bool) -> bytes:
    return digest_weight(name, weights.stored(name), every_byte=every_byte)
