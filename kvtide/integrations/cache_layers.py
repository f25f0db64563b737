"""What a `DynamicCache` of transformers holds, as pools; its tensors to pages and back.

| layer of the cache | parts (`cache_parts`) |
|---|---|
| `DynamicLayer`, `DynamicIndexedLayer` | history |
| `DynamicSlidingWindowLayer` | window |
| `LinearAttentionLayer` | states |
| `LinearAttentionAndFullAttentionLayer` | history and states |
| `LinearAttentionAndSlidingWindowAttentionLayer` | window and states |
| DeepSeek-V4's compressed layers | compressed entries and compressor states |

Layers with equal parts are one pool. Layers that stay empty (MLPs, shared KV) have none. The
declaration is read off a cache that the model has filled, so it holds for every family whose cache
consists of these layers; any other layer is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy.typing as npt
import torch
from transformers import cache_utils

from kvtide.integrations.cache_parts import (
    HISTORY,
    STATES,
    STATES_AND_WINDOW,
    WINDOW,
    CachePart,
    UnsupportedModelError,
    compressed_layers,
    parts_of,
)
from kvtide.spec import ModelMemory

SlotArray = npt.NDArray[Any]
View = Callable[[str, int], Mapping[str, torch.Tensor]]
"""A layer's rows of a pool by field, as `TieredCache.view`."""


class CacheLayers:
    """The pools of one model's cache, and the copies between its tensors and their pages."""

    def __init__(self, cache: Any, model: str, page_tokens: int, checkpoint_tokens: int) -> None:
        """`cache` has been filled by the model with a page."""
        layers: dict[CachePart, list[int]] = {}
        for number, layer in enumerate(cache.layers):
            for part in parts_of(layer, f"{model}: layer {number}"):
                layers.setdefault(part, []).append(number)
        self._pools: dict[str, CachePart] = {}
        for part in layers:
            alike = sum(one.kind == part.kind for one in self._pools.values())
            self._pools[f"{part.kind}{alike or ''}"] = part
        self.memory = ModelMemory(
            model,
            page_tokens,
            tuple(
                part.spec(name, tuple(layers[part]), checkpoint_tokens)
                for name, part in self._pools.items()
            ),
            len(cache.layers),
        )
        self.state_pools = tuple(
            pool.name for pool in self.memory.pools if pool.reuse.stride is not None
        )
        narrow = [one for one in cache.layers if type(one) in STATES_AND_WINDOW]
        self._narrowest: int | None = min((one.sliding_window for one in narrow), default=None)

    def chunk_end(self, start: int, end: int) -> int:
        """How far may be computed at once, so that all pages can be saved then."""
        if self._narrowest is None:
            return end
        page = self.memory.page_tokens
        return min(end, start + (self._narrowest - 1) // page * page)

    @staticmethod
    def record_windows(cache: Any) -> None:
        """Keep what leaves a window until `trim`, so that its pages can be saved."""
        for layer in _recorded_windows(cache):
            layer.activate_past_recording()

    @staticmethod
    def trim(cache: Any) -> None:
        """Drop what has left the windows."""
        for layer in _recorded_windows(cache):
            if layer.is_initialized:
                layer.crop(0)

    def save(
        self, cache: Any, view: View, tables: Mapping[str, SlotArray], start: int, end: int
    ) -> None:
        """Copy the pages of tokens [start, end), where `tables` have a slot for them.

        States are those after the last token: `end` is where the cache stands.
        """
        page = self.memory.page_tokens
        assert not (start % page or end % page) and start < end
        for name, part in self._pools.items():
            first = end // page - 1 if name in self.state_pools else start // page
            slots = torch.from_numpy(tables[name][first : end // page]).long()
            kept = (slots >= 0).nonzero().flatten()
            for layer in self.memory.pool(name).layers if kept.numel() else ():
                pages = range(first + int(kept[0]), end // page)
                read = part.read(cache.layers[layer], pages, page)
                rows = view(name, layer)
                for field, entries in read.items():
                    into, at = rows[field], entries.device
                    into[slots[kept].to(at)] = entries[(kept - kept[0]).to(at)]

    def restore(self, cache: Any, view: View, tables: Mapping[str, SlotArray], tokens: int) -> None:
        """Fill an empty cache with the first `tokens` tokens."""
        page = self.memory.page_tokens
        assert tokens % page == 0
        for name, part in self._pools.items():
            first = (tokens - part.needed_tokens(tokens)) // page
            slots = torch.from_numpy(tables[name][first : tokens // page]).long()
            assert bool((slots >= 0).all()), f"pool {name}: a page of the prefix has no slot"
            for layer in self.memory.pool(name).layers:
                rows = view(name, layer).items()
                entries = {f: kept[slots].flatten(0, 1) for f, kept in rows if f != "pad"}
                part.write(cache.layers[layer], entries, tokens)


def refuse_unsupported(cache: Any, model: str, page_tokens: int) -> None:
    """Raise unless all layers of the model's cache, which is empty, can be kept."""
    for number, layer in enumerate(cache.layers):
        for reason in _reasons(layer, page_tokens):
            raise UnsupportedModelError(f"{model}: layer {number} {reason}")
    if not any(type(layer) in (*HISTORY, *WINDOW, *compressed_layers()) for layer in cache.layers):
        raise UnsupportedModelError(
            f"{model}: its cache has no attention layer, and does not count its tokens; use a "
            "model with attention layers"
        )


def _reasons(layer: Any, page_tokens: int) -> Iterator[str]:
    kind: type = type(layer)
    window: Any = getattr(layer, "sliding_window", None)
    if kind not in {*HISTORY, *WINDOW, *STATES, *compressed_layers()}:
        yield (
            f"keeps its state in a {kind.__name__}, whose tensors kvtide does not know; use a "
            "model whose cache has layers of docs/integrations/transformers.md"
        )
    if window is not None and window < 2:
        yield f"has a window of {window}; use at least 2"
    if kind in STATES_AND_WINDOW and window <= page_tokens:
        yield (
            f"has states beside a window of {window}, which does not hold a page of {page_tokens}; "
            f"use page_tokens of {window - 1} or less"
        )
    if kind in compressed_layers() and page_tokens % layer.compress_rate:
        yield (
            f"compresses {layer.compress_rate} tokens to an entry, of which a page of "
            f"{page_tokens} does not hold whole ones; use a multiple of {layer.compress_rate}"
        )


def _recorded_windows(cache: Any) -> Iterator[Any]:
    """Windows without states beside them, which recording would lengthen, too."""
    kind = cache_utils.DynamicSlidingWindowLayer
    return (layer for layer in cache.layers if type(layer) is kind)
