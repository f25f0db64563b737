"""A folder of safetensors: its tensors by name, as they lie there, in one file or in shards."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from kvtide.models.model_errors import CheckpointError
from kvtide.models.weight_digest import Stored


@dataclass(frozen=True, slots=True)
class WeightOutline:
    """What a weight is, without its bytes.

    dtype  of the numbers that `get` gives
    form   as `packed` gives the matrix, with so many bytes of a row; None where it gives none
    """

    dtype: torch.dtype
    form: str | None = None
    row_bytes: int = 0


class StoredTensors(Protocol):
    """Tensors by name, as they lie on disk or will."""

    def names(self) -> Collection[str]: ...

    def has(self, name: str) -> bool: ...

    def get(self, name: str) -> torch.Tensor: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def get_rows(self, name: str, rows: range) -> torch.Tensor: ...

    def stored(self, name: str) -> Stored: ...


class _Shard(Protocol):
    """A mapped safetensors file."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...

    def get_slice(self, name: str) -> _ShardSlice: ...


class _ShardSlice(Protocol):
    """A tensor of a mapped file, of which parts can be read."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, rows: slice) -> torch.Tensor: ...


class SafetensorsWeights:
    """The weights of a folder, in one file or in shards. Every shard is there and can be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._homes: dict[str, _Shard] = {}
        for file in _weight_files(folder):
            shard = _opened(file)
            self._homes.update(dict.fromkeys(shard.keys(), shard))

    def names(self) -> Collection[str]:
        return self._homes.keys()

    def has(self, name: str) -> bool:
        return name in self._homes

    def get(self, name: str) -> torch.Tensor:
        return self._home(name).get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._home(name).get_slice(name).get_shape())

    def get_rows(self, name: str, rows: range) -> torch.Tensor:
        return self._home(name).get_slice(name)[rows.start : rows.stop]

    def _home(self, name: str) -> _Shard:
        if name not in self._homes:
            raise missing(self._folder, name)
        return self._homes[name]

    def stored(self, name: str) -> Stored:
        tensor = self.get(name)
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        rows = max(1, tensor.shape[:-1].numel())
        return Stored(f"{tensor.dtype} {tuple(tensor.shape)}", data, data.size // rows)


def missing(path: Path, name: str) -> CheckpointError:
    """What to say where a tensor is not."""
    return CheckpointError(
        f"{path}: there is no tensor {name}, which the config asks for; use the config.json that "
        "the weights were saved with"
    )


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as flaw:
        raise CheckpointError(f"{path}: not readable as JSON ({flaw}); download it again") from None
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{path}: holds a {type(values).__name__}, not a JSON object; download it again"
        )
    return values


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not index.is_file():
        raise CheckpointError(
            f"{folder}: neither model.safetensors nor {index.name} is here; save the model with "
            "save_pretrained, which writes safetensors"
        )
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise CheckpointError(f"{index}: there is no `weight_map` in it; download it again")
    shards = sorted({str(shard) for shard in places.values()})
    if gone := [shard for shard in shards if not (folder / shard).is_file()]:
        raise CheckpointError(
            f"{folder}: {len(gone)} of {len(shards)} shards are missing, {gone[0]} first; "
            "download them"
        )
    return [folder / shard for shard in shards]


def _opened(file: Path) -> _Shard:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as flaw:
        raise CheckpointError(
            f"{file}: not readable as safetensors ({flaw}); download it again"
        ) from None
