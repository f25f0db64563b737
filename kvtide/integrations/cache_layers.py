"""What a `DynamicCache` of transformers holds, as pools; its tensors to pages and back.

| layer of the cache | pool | a page holds |
|---|---|---|
| `DynamicLayer` | `kv`: everything before a boundary | keys and values of its tokens |
| `DynamicSlidingWindowLayer` | `swa`: the last W−1 tokens | the same |
| `LinearAttentionLayer` | `state`: checkpoints | the states after its last token |
| `LinearAttentionAndFullAttentionLayer` | `kv` and `state` | both |

Layers of one kind, window and shape are one pool. Layers that stay empty (MLPs, shared KV) have
none. The declaration is read off a cache that the model has filled, so it holds for every family
whose cache consists of these layers; any other layer is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy.typing as npt
import torch
from transformers import cache_utils

from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec, Reuse
from kvtide.tiers.buffers import TORCH_DTYPES

Slots = npt.NDArray[Any]
View = Callable[[str, int], Mapping[str, torch.Tensor]]
"""A layer's rows of a pool by field, as `TieredCache.view`."""

_KV = (cache_utils.DynamicLayer, cache_utils.LinearAttentionAndFullAttentionLayer)
_WINDOW = (cache_utils.DynamicSlidingWindowLayer,)
_STATE = (cache_utils.LinearAttentionLayer, cache_utils.LinearAttentionAndFullAttentionLayer)
_DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}


class UnsupportedModelError(ValueError):
    """A model whose cache cannot be kept; the message names the reason."""


class _Kind(Enum):
    KV = "kv"
    WINDOW = "swa"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class _Part:
    """What distinguishes pools: layers with equal parts are one pool."""

    kind: _Kind
    window: int
    fields: tuple[Field, ...]

    def spec(self, name: str, layers: tuple[int, ...], checkpoint_tokens: int) -> PoolSpec:
        entry = Entry(self.fields)
        match self.kind:
            case _Kind.KV:
                return PoolSpec(name, layers, entry)
            case _Kind.WINDOW:
                return PoolSpec(name, layers, entry, reuse=Reuse(reach=self.window - 1))
            case _Kind.STATE:
                reuse = Reuse(reach=1, stride=checkpoint_tokens)
                return PoolSpec(name, layers, entry, tail_entries=1, reuse=reuse)


class CacheLayers:
    """The pools of one model's cache, and the copies between its tensors and their pages."""

    def __init__(self, cache: Any, model: str, page_tokens: int, checkpoint_tokens: int) -> None:
        """`cache` has been filled by the model with any tokens."""
        layers: dict[_Part, list[int]] = {}
        for number, layer in enumerate(cache.layers):
            for part in _parts(layer, f"{model}: layer {number}"):
                layers.setdefault(part, []).append(number)
        self._pools: dict[str, _Part] = {}
        for part in layers:
            alike = sum(one.kind is part.kind for one in self._pools.values())
            self._pools[f"{part.kind.value}{alike or ''}"] = part
        self.memory = ModelMemory(
            model,
            page_tokens,
            tuple(
                part.spec(name, tuple(layers[part]), checkpoint_tokens)
                for name, part in self._pools.items()
            ),
            len(cache.layers),
        )

    @property
    def state_pools(self) -> tuple[str, ...]:
        return tuple(name for name, part in self._pools.items() if part.kind is _Kind.STATE)

    @staticmethod
    def record_windows(cache: Any) -> None:
        """Keep what leaves a window until `trim`, so that its pages can be saved."""
        for layer in cache.layers:
            if isinstance(layer, _WINDOW):
                layer.activate_past_recording()

    @staticmethod
    def trim(cache: Any) -> None:
        """Drop what has left the windows."""
        for layer in cache.layers:
            if isinstance(layer, _WINDOW) and layer.is_initialized:
                layer.crop(0)

    def save(
        self, cache: Any, view: View, tables: Mapping[str, Slots], start: int, end: int
    ) -> None:
        """Copy the pages of tokens [start, end), where `tables` have a slot for them.

        States are those after the last token: `end` is where the cache stands.
        """
        page = self.memory.page_tokens
        assert not (start % page or end % page) and start < end
        for name, part in self._pools.items():
            first = start // page if part.kind is not _Kind.STATE else end // page - 1
            slots = torch.from_numpy(tables[name][first : end // page]).long()
            kept = (slots >= 0).nonzero().flatten()
            for layer in self.memory.pool(name).layers if kept.numel() else ():
                rows = view(name, layer)
                source = cache.layers[layer]
                if part.kind is _Kind.STATE:
                    for field, state in _states(source):
                        rows[field][slots[-1], 0] = state[0]
                else:
                    _save_tokens(source, rows, slots, kept, range(start, end, page))

    def restore(self, cache: Any, view: View, tables: Mapping[str, Slots], tokens: int) -> None:
        """Fill an empty cache with the first `tokens` tokens."""
        page = self.memory.page_tokens
        assert tokens % page == 0
        for name, part in self._pools.items():
            start = tokens - {_Kind.KV: tokens, _Kind.WINDOW: part.window - 1}.get(part.kind, 1)
            first = max(0, start) // page
            slots = torch.from_numpy(tables[name][first : tokens // page]).long()
            assert bool((slots >= 0).all()), f"pool {name}: a page of the prefix has no slot"
            for layer in self.memory.pool(name).layers:
                rows, target = view(name, layer), cache.layers[layer]
                if part.kind is _Kind.STATE:
                    _restore_states(target, rows, slots)
                else:
                    # Transformers keeps the whole window, and not more of it.
                    _restore_tokens(target, rows, slots, max(0, start) - first * page)
                if part.kind is _Kind.WINDOW:
                    target.cumulative_length = tokens


def _restore_tokens(
    layer: Any, rows: Mapping[str, torch.Tensor], slots: torch.Tensor, skip: int
) -> None:
    """Pages of one attention layer, without the first `skip` tokens."""
    k, v = (rows[field][slots].flatten(0, 1)[skip:].transpose(0, 1)[None] for field in "kv")
    layer.update(k.contiguous(), v.contiguous())


def _save_tokens(
    layer: Any,
    rows: Mapping[str, torch.Tensor],
    slots: torch.Tensor,
    kept: torch.Tensor,
    pages: range,
) -> None:
    """Whole pages of one attention layer; `kept` are the numbers of those that have slots."""
    held = layer.keys.shape[-2]
    offset = layer.get_seq_length() - held
    first = pages[int(kept[0])]
    assert first >= offset, "a page has left its window"
    span = slice(first - offset, pages[-1] + pages.step - offset)
    kept = kept.to(layer.keys.device)
    for field, tensor in (("k", layer.keys), ("v", layer.values)):
        by_page = tensor[0, :, span].unflatten(1, (-1, pages.step)).permute(1, 2, 0, 3)
        rows[field][slots[kept.cpu()].to(by_page.device)] = by_page[kept - kept[0]]


def _restore_states(layer: Any, rows: Mapping[str, torch.Tensor], slots: torch.Tensor) -> None:
    for field, tensor in rows.items():
        if field == "pad":
            continue
        kind, number = field.split("_")
        state = tensor[slots, 0]
        if kind == "conv":
            layer.update_conv_state(state.clone(), int(number))
        else:
            layer.update_recurrent_state(state.clone(), int(number))
        layer.has_previous_state[int(number)] = True


# -- the declaration ---------------------------------------------------------------------------


def refuse_unsupported(cache: Any, model: str) -> None:
    """Raise unless all layers of the model's cache, which is empty, can be kept."""
    for number, layer in enumerate(cache.layers):
        kind = type(layer)
        if kind not in {*_KV, *_WINDOW, *_STATE}:
            raise UnsupportedModelError(
                f"{model}: layer {number} keeps its state in a {kind.__name__}; use a model whose "
                "cache has full attention, sliding windows and linear attention only"
            )
        if kind in _WINDOW and layer.sliding_window < 2:
            raise UnsupportedModelError(
                f"{model}: layer {number} has a window of {layer.sliding_window}; use at least 2"
            )
    if not any(type(layer) in (*_KV, *_WINDOW) for layer in cache.layers):
        raise UnsupportedModelError(
            f"{model}: its cache has no attention layer, and does not count its tokens; use a "
            "model with attention layers"
        )


def _parts(layer: Any, name: str) -> Iterator[_Part]:
    kind = type(layer)
    if kind in _STATE and (states := list(_states(layer))):
        yield _Part(_Kind.STATE, 0, _state_fields(states, name))
    if kind in (*_KV, *_WINDOW) and layer.is_initialized:
        fields = tuple(
            Field(field, (tensor.shape[1], tensor.shape[3]), _dtype(tensor, name))
            for field, tensor in (("k", layer.keys), ("v", layer.values))
        )
        if kind in _WINDOW:
            yield _Part(_Kind.WINDOW, int(layer.sliding_window), fields)
        else:
            yield _Part(_Kind.KV, 0, fields)


def _states(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The states of a layer by field, the widest elements first, so that all are aligned."""
    named = [
        (f"{kind}_{number}", tensor)
        for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
        for number, tensor in states.items()
        if tensor is not None
    ]
    yield from sorted(named, key=lambda one: -one[1].element_size())


def _state_fields(states: list[tuple[str, torch.Tensor]], name: str) -> tuple[Field, ...]:
    fields = [Field(field, tuple(state.shape[1:]), _dtype(state, name)) for field, state in states]
    widest = max(field.dtype.size_bytes for field in fields)
    if rest := -sum(field.bytes for field in fields) % widest:
        fields.append(Field("pad", (rest,), DType.UINT8))
    return tuple(fields)


def _dtype(tensor: torch.Tensor, name: str) -> DType:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        known = ", ".join(str(one).removeprefix("torch.") for one in _DTYPES)
        kept = str(tensor.dtype).removeprefix("torch.")
        raise UnsupportedModelError(f"{name} keeps {kept}; use one of {known}")
    return dtype
