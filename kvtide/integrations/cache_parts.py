"""What one layer of a cache of transformers keeps in one pool; its tensors as entries and back.

| part | a page holds | a resume needs |
|---|---|---|
| `HistoryPart` | keys, values, and an indexed layer's index keys | all before the boundary |
| `WindowPart` | keys and values | the last W−1 tokens |
| `CompressedPart` | DeepSeek-V4's entries, each of several tokens | all before the boundary |
| `StatePart` | recurrent and convolution states after its last token | those at the boundary |
| `CompressorStatePart` | DeepSeek-V4's window and overlaps, the same | those at the boundary |

DeepSeek-V4's layers trim their window themselves and keep nothing that leaves it. So the window
goes with the states, which exist at the cache's end only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import cache_utils

from kvtide.spec import DType, Entry, Field, PoolSpec, Reuse
from kvtide.tiers.buffers import TORCH_DTYPES

HISTORY = (
    cache_utils.DynamicLayer,
    cache_utils.DynamicIndexedLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer,
)
STATES_AND_WINDOW = (cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,)
WINDOW = (cache_utils.DynamicSlidingWindowLayer, *STATES_AND_WINDOW)
STATES = (
    cache_utils.LinearAttentionLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer,
    *STATES_AND_WINDOW,
)
_COMPRESSED = ("compressed_sparse_attention", "heavily_compressed_attention")
_DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}


class UnsupportedModelError(ValueError):
    """A model whose cache cannot be kept; the message names the reason."""


def compressed_layers() -> tuple[type, ...]:
    """DeepSeek-V4's, which are registered when a model of it is made."""
    known = cache_utils.DYNAMIC_LAYER_TYPE_MAPPING
    return tuple(known[name] for name in _COMPRESSED if name in known)


@dataclass(frozen=True, slots=True)
class CachePart(ABC):
    """Layers with equal parts share a pool."""

    fields: tuple[Field, ...]
    kind: ClassVar[str]

    @abstractmethod
    def spec(self, name: str, layers: tuple[int, ...], checkpoint_tokens: int) -> PoolSpec: ...

    @abstractmethod
    def needed_tokens(self, tokens: int) -> int:
        """How many tokens before a boundary a resume needs."""

    @abstractmethod
    def read(self, layer: Any, pages: range, page_tokens: int) -> Mapping[str, Tensor]:
        """The layer's entries of these pages by field: (pages, entries, *shape)."""

    @abstractmethod
    def write(self, layer: Any, rows: Mapping[str, Tensor], tokens: int) -> None:
        """Fill a layer that is empty from entries by field, which end at so many tokens."""


@dataclass(frozen=True, slots=True)
class HistoryPart(CachePart):
    kind: ClassVar[str] = "kv"

    def spec(self, name: str, layers: tuple[int, ...], checkpoint_tokens: int) -> PoolSpec:
        return PoolSpec(name, layers, Entry(self.fields))

    def needed_tokens(self, tokens: int) -> int:
        return tokens

    def read(self, layer: Any, pages: range, page_tokens: int) -> Mapping[str, Tensor]:
        entries = {"k": layer.keys[0].transpose(0, 1), "v": layer.values[0].transpose(0, 1)}
        if any(field.name == "index" for field in self.fields):
            entries["index"] = layer.indexer_keys[0]
        return _by_page(entries, pages, page_tokens, 0)

    def write(self, layer: Any, rows: Mapping[str, Tensor], tokens: int) -> None:
        layer.update(*(_heads_first(rows[field]) for field in "kv"))
        if "index" in rows:
            layer.update_indexer(rows["index"][None])


@dataclass(frozen=True, slots=True)
class WindowPart(CachePart):
    window: int
    kind: ClassVar[str] = "swa"

    def spec(self, name: str, layers: tuple[int, ...], checkpoint_tokens: int) -> PoolSpec:
        return PoolSpec(name, layers, Entry(self.fields), reuse=Reuse(reach=self.window - 1))

    def needed_tokens(self, tokens: int) -> int:
        return min(tokens, self.window - 1)

    def read(self, layer: Any, pages: range, page_tokens: int) -> Mapping[str, Tensor]:
        entries = {"k": layer.keys[0].transpose(0, 1), "v": layer.values[0].transpose(0, 1)}
        left = layer.get_seq_length() - layer.keys.shape[-2]
        assert pages.start * page_tokens >= left, "a page has left its window"
        return _by_page(entries, pages, page_tokens, left)

    def write(self, layer: Any, rows: Mapping[str, Tensor], tokens: int) -> None:
        # Transformers keeps the whole window, and not more of it.
        held = self.needed_tokens(tokens)
        layer.update(*(_heads_first(rows[field][-held:]) for field in "kv"))
        layer.cumulative_length = tokens


@dataclass(frozen=True, slots=True)
class CompressedPart(CachePart):
    tokens_per_entry: int
    kind: ClassVar[str] = "compressed"

    def spec(self, name: str, layers: tuple[int, ...], checkpoint_tokens: int) -> PoolSpec:
        return PoolSpec(name, layers, Entry(self.fields), self.tokens_per_entry)

    def needed_tokens(self, tokens: int) -> int:
        return tokens

    def read(self, layer: Any, pages: range, page_tokens: int) -> Mapping[str, Tensor]:
        entries = {field.name: layer.compressed_kv[field.name][0] for field in self.fields}
        return _by_page(entries, pages, page_tokens // self.tokens_per_entry, 0)

    def write(self, layer: Any, rows: Mapping[str, Tensor], tokens: int) -> None:
        for name, entries in rows.items():
            layer.update_compressor_states(name, entries[None])


@dataclass(frozen=True, slots=True)
class _AtTheEnd(CachePart):
    """What exists at the cache's end only: a page has it if the cache stood at the page's end."""

    def spec(self, name: str, layers: tuple[int, ...], checkpoint_tokens: int) -> PoolSpec:
        reuse = Reuse(reach=1, stride=checkpoint_tokens)
        return PoolSpec(name, layers, Entry(self.fields), tail_entries=1, reuse=reuse)

    def needed_tokens(self, tokens: int) -> int:
        return 1

    def read(self, layer: Any, pages: range, page_tokens: int) -> Mapping[str, Tensor]:
        assert len(pages) == 1
        return {field: state[None] for field, state in self.states(layer)}

    @abstractmethod
    def states(self, layer: Any) -> Iterator[tuple[str, Tensor]]:
        """By field, each as (1, *shape)."""


@dataclass(frozen=True, slots=True)
class StatePart(_AtTheEnd):
    kind: ClassVar[str] = "state"

    def states(self, layer: Any) -> Iterator[tuple[str, Tensor]]:
        return _linear_states(layer)

    def write(self, layer: Any, rows: Mapping[str, Tensor], tokens: int) -> None:
        for field, state in rows.items():
            kind, number = field.split("_")
            update = layer.update_conv_state if kind == "conv" else layer.update_recurrent_state
            update(state.clone(), int(number))
            layer.has_previous_state[int(number)] = True


@dataclass(frozen=True, slots=True)
class CompressorStatePart(_AtTheEnd):
    window: int
    kind: ClassVar[str] = "compressor"

    def states(self, layer: Any) -> Iterator[tuple[str, Tensor]]:
        return _compressor_states(layer)

    def write(self, layer: Any, rows: Mapping[str, Tensor], tokens: int) -> None:
        keys = rows["window"][:, :, -min(tokens, self.window - 1) :]
        layer.update(keys, keys)
        layer.cumulative_length = tokens
        for name in getattr(layer, "overlap_kv", ()):
            layer.overlap_kv[name] = rows[f"{name}_kv"].clone()
            layer.overlap_gate[name] = rows[f"{name}_gate"].clone()


# -- the declaration ---------------------------------------------------------------------------


def parts_of(layer: Any, name: str) -> Iterator[CachePart]:
    """What a layer that the model has filled keeps. Some stay empty: MLPs, shared KV."""
    kind = type(layer)
    if kind in STATES and (states := list(_linear_states(layer))):
        yield StatePart(_fields(states, name))
    if kind in (*HISTORY, *WINDOW) and layer.is_initialized:
        entries = [("k", layer.keys[0].transpose(0, 1)), ("v", layer.values[0].transpose(0, 1))]
        if kind in WINDOW:
            yield WindowPart(_fields(entries, name), int(layer.sliding_window))
        else:
            yield HistoryPart(_fields([*entries, *_index_keys(layer, name)], name))
    if kind in compressed_layers():
        yield CompressorStatePart(
            _fields(_compressor_states(layer), name), int(layer.sliding_window)
        )
        entries = [(field, kept[0]) for field, kept in layer.compressed_kv.items()]
        yield CompressedPart(_fields(entries, name), int(layer.compress_rate))


def _index_keys(layer: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if getattr(layer, "indexer_position_ids", None) is not None:
        raise UnsupportedModelError(
            f"{name} keeps positions of several dimensions beside its index keys, which tokens "
            "do not determine; use a model of text alone"
        )
    if getattr(layer, "indexer_keys", None) is not None:
        yield "index", layer.indexer_keys[0]


def _linear_states(layer: Any) -> Iterator[tuple[str, Tensor]]:
    for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
        yield from ((f"{kind}_{n}", state) for n, state in states.items() if state is not None)


def _compressor_states(layer: Any) -> Iterator[tuple[str, Tensor]]:
    """Blocks are whole at a page's end, so that a compressor has nothing else open there."""
    missing = layer.sliding_window - 1 - layer.keys.shape[-2]
    yield "window", torch.nn.functional.pad(layer.keys, (0, 0, missing, 0))
    for name, kept in getattr(layer, "overlap_kv", {}).items():
        yield f"{name}_kv", kept
        yield f"{name}_gate", layer.overlap_gate[name]


def _fields(entries: Iterable[tuple[str, Tensor]], name: str) -> tuple[Field, ...]:
    """One field for each tensor of (entries, *shape): the widest elements first, so that all are
    aligned."""
    fields = [Field(field, tuple(kept.shape[1:]), _dtype(kept, name)) for field, kept in entries]
    fields.sort(key=lambda field: -field.dtype.size_bytes)
    if rest := -sum(field.bytes for field in fields) % fields[0].dtype.size_bytes:
        fields.append(Field("pad", (rest,), DType.UINT8))
    return tuple(fields)


def _dtype(tensor: Tensor, name: str) -> DType:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        known = ", ".join(str(one).removeprefix("torch.") for one in _DTYPES)
        kept = str(tensor.dtype).removeprefix("torch.")
        raise UnsupportedModelError(f"{name} keeps {kept}; use one of {known}")
    return dtype


# -- tensors -----------------------------------------------------------------------------------


def _by_page(
    entries: Mapping[str, Tensor], pages: range, page_entries: int, left: int
) -> Mapping[str, Tensor]:
    """Of entries of which `left` are gone at the front, those of these pages."""
    span = slice(pages.start * page_entries - left, pages.stop * page_entries - left)
    return {field: held[span].unflatten(0, (-1, page_entries)) for field, held in entries.items()}


def _heads_first(rows: Tensor) -> Tensor:
    return rows.transpose(0, 1)[None].contiguous()
