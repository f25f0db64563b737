"""Prefixes of `model.generate` of transformers, kept over device, host and a store.

    from kvtide.integrations.transformers import PrefixCache

    with PrefixCache(model, "file:///var/cache/kvtide?cap=20GB") as prefixes:
        output = prefixes.generate(input_ids, max_new_tokens=100)
        print(prefixes.last.cached_tokens)

`generate` takes what `model.generate` takes for one sequence and returns what it returns. It
restores the longest known prefix into a `DynamicCache`, computes the rest up to the last whole
page, keeps these pages, and lets `model.generate` continue from there. A boundary is resumable by
the rule of kvtide's index: histories whole, windows as far as they reach, states where one was
kept. What the model generates is kept too, unless the model has recurrent states: these exist at
the cache's end only, which is no page's.

Pages are known by tokens and by a fingerprint of weights, config, dtype and attention
implementation. Another model, page size or precision shares none of them.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from kvtide.integrations.engine_versions import require_version

TESTED = ("5.22.2",)
require_version("transformers", ["transformers"], TESTED)

import torch  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from kvtide.cache import (  # noqa: E402
    CacheConfig,
    FetchPatience,
    Lease,
    Namespace,
    Ratio,
    Stats,
    Tier,
    TieredCache,
    Tokens,
    TransferError,
)
from kvtide.integrations.cache_layers import CacheLayers, refuse_unsupported  # noqa: E402
from kvtide.integrations.cache_parts import UnsupportedModelError  # noqa: E402
from kvtide.integrations.engine_metrics import TOKENS  # noqa: E402
from kvtide.models.checkpoint import NOT_THE_MODEL  # noqa: E402
from kvtide.models.weight_digest import Stored, digest_weight  # noqa: E402
from kvtide.spec.sizing import TOKENS_PER_CHECKPOINT  # noqa: E402
from kvtide.storage import open_store  # noqa: E402
from kvtide.storage.codec.opening import is_lossy  # noqa: E402
from kvtide.tiers import TierSize  # noqa: E402

PREFILL_TOKENS = 2048
"""A prompt is computed in chunks of so many tokens."""
MAX_ERROR, MAX_ROUNDINGS = 1e-3, 6
"""Of logits on restored pages, relative to those without: this error, or so many roundings of the
model's dtype where these are coarser. A wrong state or position is above."""

_ALONE = ("num_beams", "num_return_sequences")
_OURS = (
    *("past_key_values", "cache_params", "cache_implementation", "assistant_model"),
    *("prompt_lookup_num_tokens", "custom_generate", "use_cache"),
)
_DEFAULT_NAMESPACE = Namespace()

log = logging.getLogger("kvtide")
_PAGES = Tokens(16_384)
_TWICE = Ratio(2.0)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What of the last prompt was found: tokens in all, found, and by tier."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    by_tier: Mapping[Tier, int] = field(default_factory=dict)


class PrefixCache:
    """One model's prefixes. Calls take turns; `close` writes what is still to be stored.

    storage      a store's URL (docs/STORAGE.md); None keeps prefixes within the process
    page_tokens  the unit of reuse
    device_size  pages beside the model; the least recently useful go when it is full
    host_size    pages in host memory, through which all go to and from the store
    fetch_s      how long a call waits for the store, at most
    store_s      how long a call waits at its end until its pages are stored
    fingerprint  stands for the weights; None computes it from them
    """

    def __init__(
        self,
        model: Any,
        storage: str | None = None,
        *,
        page_tokens: int = 64,
        device_size: TierSize = _PAGES,
        host_size: TierSize = _TWICE,
        fetch_s: float = 10.0,
        store_s: float = 5.0,
        fingerprint: bytes | None = None,
    ) -> None:
        _check_model(model)
        self.last = PrefixHit()
        self._model = model
        self._weights = _weights_now(model)
        self._takes = inspect.signature(model.forward).parameters.keys()
        self._store_s = store_s
        self._lock = threading.Lock()
        name = str(model.config.model_type)
        refuse_unsupported(self._empty(), name, page_tokens)
        with torch.no_grad():
            probe = self._forward(self._empty(), self._trial(page_tokens))[0]
            self._layers = CacheLayers(probe, name, page_tokens, TOKENS_PER_CHECKPOINT)
            self._prove()
        config = CacheConfig(
            device_size,
            host_size,
            device=str(model.device),
            tokens_per_checkpoint=min(TOKENS_PER_CHECKPOINT, 8 * page_tokens),
            patience=FetchPatience("wait_complete", complete_s=fetch_s, min_tokens=page_tokens),
            fingerprint=fingerprint or model_fingerprint(model),
            lossy_pages=storage is not None and is_lossy(storage),
        )
        self.cache = TieredCache(self._layers.memory, config)
        if storage is not None:
            try:
                self.cache.storage.attach(open_store(storage, self.cache.storage.space))
            except Exception:
                self.cache.close()
                raise

    # -- generating -------------------------------------------------------------------------

    @torch.no_grad()
    def generate(
        self,
        input_ids: torch.Tensor,
        *,
        namespace: Namespace = _DEFAULT_NAMESPACE,
        **options: Any,
    ) -> Any:
        """`model.generate(input_ids, **options)`, on the longest prefix that is kept.

        Prompts of different namespaces share nothing.
        """
        self._check_call(input_ids, options)
        with self._lock:
            tokens = input_ids[0].tolist()
            prompt = self.cache.prompt(tokens, namespace)
            self._fetch(prompt)
            page = self._layers.memory.page_tokens
            boundary = (len(tokens) - 1) // page * page
            lease = self.cache.reserve(self.cache.match(prompt), boundary) if boundary else None
            if lease is None:  # Shorter than a page, or longer than the device tier.
                self._count(len(tokens), {})
                return self._model.generate(input_ids, **options)
            try:
                return self._generate(lease, input_ids, boundary, options)
            except TransferError as error:
                log.warning("a prefix is computed again, since it could not be loaded: %s", error)
                self._count(len(tokens), {})
                return self._model.generate(input_ids, **options)
            finally:
                self.cache.release(lease)
                self.cache.drain(self._store_s)

    def _generate(
        self, lease: Lease, input_ids: torch.Tensor, boundary: int, options: dict[str, Any]
    ) -> Any:
        past = self._empty()
        self._layers.record_windows(past)
        at = lease.cached_tokens
        if at:
            self.cache.load(lease)
            for layer in range(self._layers.memory.layers):
                self.cache.wait(lease, layer)
            self._layers.restore(past, self.cache.view, self._tables(lease), at)
        self._count(input_ids.shape[1], lease.by_tier)
        while at < boundary:
            end = self._chunk_end(lease, at, boundary)
            self._forward(past, input_ids[:, at:end])
            self._keep(lease, past, at, end)
            self._layers.trim(past)
            at = end
        self.cache.retain(lease)
        output = self._model.generate(input_ids, past_key_values=past, **options)
        if not self._layers.state_pools:
            sequence = output if isinstance(output, torch.Tensor) else output.sequences
            self._keep_generated(lease, past, sequence[0, input_ids.shape[1] :].tolist(), boundary)
        return output

    def _fetch(self, prompt: Any) -> None:
        fetch = self.cache.storage.fetch(prompt)
        while fetch is not None and not fetch.over:
            self.cache.poll()
            time.sleep(0.0002)

    def _chunk_end(self, lease: Lease, at: int, boundary: int) -> int:
        """Where the next chunk ends: at the latest where a state is to be kept."""
        page = self._layers.memory.page_tokens
        end = min(boundary, at + max(page, PREFILL_TOKENS // page * page))
        end = self._layers.chunk_end(at, end)
        for pool in self._layers.state_pools:
            table = self.cache.page_table(lease, pool)
            wanted = (n for n in range(at // page, end // page) if table[n] >= 0)
            end = min(end, (next(wanted, end // page - 1) + 1) * page)
        return end

    def _keep(self, lease: Lease, past: DynamicCache, start: int, end: int) -> None:
        self._layers.save(past, self.cache.view, self._tables(lease), start, end)
        self.cache.commit(lease, end)
        self.cache.poll()

    def _keep_generated(
        self, lease: Lease, past: DynamicCache, generated: list[int], start: int
    ) -> None:
        """The whole pages behind the prompt's, if the device has room for them."""
        page = self._layers.memory.page_tokens
        end = past.get_seq_length() // page * page
        lease.append(generated)
        if end > start and self.cache.grow(lease, end):
            self._keep(lease, past, start, end)

    def _tables(self, lease: Lease) -> dict[str, Any]:
        pools = self._layers.memory.pools
        return {pool.name: self.cache.page_table(lease, pool.name) for pool in pools}

    def _count(self, tokens: int, by_tier: Mapping[Tier, int]) -> None:
        found = sum(by_tier.values())
        self.last = PrefixHit(tokens, found, dict(by_tier))
        for tier, count in by_tier.items():
            TOKENS.labels("transformers", tier.name.lower()).inc(count)
        TOKENS.labels("transformers", "computed").inc(tokens - found)

    # -- the model --------------------------------------------------------------------------

    def _empty(self) -> DynamicCache:
        return DynamicCache(config=self._model.config)

    def _forward(
        self, past: DynamicCache, input_ids: torch.Tensor
    ) -> tuple[DynamicCache, torch.Tensor]:
        """The cache after these tokens, and the logits after the last one."""
        start = past.get_seq_length()
        positions = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)
        more = {"logits_to_keep": 1, "position_ids": positions[None]}  # Some count from 0 else.
        output = self._model(
            input_ids=input_ids,
            past_key_values=past,
            use_cache=True,
            **{name: value for name, value in more.items() if name in self._takes},
        )
        if output.past_key_values is not past:
            raise UnsupportedModelError(
                f"{self._model.config.model_type}: it does not fill the DynamicCache it is given; "
                "use a model that does"
            )
        return past, output.logits[:, -1].float()

    def _trial(self, tokens: int) -> torch.Tensor:
        words = self._model.get_input_embeddings().num_embeddings
        ids: torch.Tensor = torch.arange(1, tokens + 1, device=self._model.device) * 7 % words
        return ids[None]

    def _prove(self) -> None:
        """Refuse a model that computes something else on restored pages."""
        memory = self._layers.memory
        page = memory.page_tokens
        ids = self._trial(2 * page + 2)
        _, expected = self._forward(self._empty(), ids)
        pages = TieredCache(memory, CacheConfig(Tokens(4 * page), None, str(self._model.device)))
        try:
            lease = pages.reserve(pages.match(pages.scratch(ids[0].tolist())), 2 * page)
            assert lease is not None, "four pages hold two"
            tables = {pool.name: pages.page_table(lease, pool.name) for pool in memory.pools}
            computed, restored = self._empty(), self._empty()
            self._layers.record_windows(computed)
            at = 0
            while at < 2 * page:
                end = self._layers.chunk_end(at, 2 * page)
                self._forward(computed, ids[:, at:end])
                self._layers.save(computed, pages.view, tables, at, end)
                self._layers.trim(computed)
                at = end
            self._layers.restore(restored, pages.view, tables, 2 * page)
            _, found = self._forward(restored, ids[:, 2 * page :])
            pages.release(lease)
        finally:
            pages.close()
        error = float((found - expected).norm() / expected.norm())
        if not error <= max(MAX_ERROR, MAX_ROUNDINGS * torch.finfo(self._model.dtype).eps):
            raise UnsupportedModelError(
                f"{memory.model}: logits on a restored prefix differ by {error:.0%} from those "
                "without; the model keeps state outside its cache, or cannot continue from one"
            )

    def _check_call(self, input_ids: torch.Tensor, options: Mapping[str, Any]) -> None:
        if input_ids.ndim != 2 or input_ids.shape[0] != 1:
            shape = tuple(input_ids.shape)
            raise ValueError(f"input_ids of shape {shape}; give one sequence, as (1, tokens)")
        mask = options.get("attention_mask")
        if mask is not None and not bool(mask.all()):
            raise ValueError("the attention mask hides tokens; give one sequence without padding")
        for name, value in options.items():
            if name in _OURS or (isinstance(value, torch.Tensor) and name != "attention_mask"):
                raise ValueError(
                    f"generate({name}=…) is not supported: pages are known by tokens alone, and "
                    "the cache is kvtide's; leave it out, or call model.generate"
                )
        for name in _ALONE:
            if (self._setting(name, options) or 1) != 1:
                raise ValueError(f"generate with {name} above 1 is not supported; use 1")
        pad, ends = (self._setting(f"{name}_token_id", options) for name in ("pad", "eos"))
        hides = pad is not None and pad not in (ends if isinstance(ends, list) else [ends])
        if mask is None and hides and bool((input_ids == pad).any()):
            raise ValueError(
                f"model.generate hides the pad token {pad}, which the prompt has; give an "
                "attention_mask of ones if it is text, or one sequence without padding"
            )
        if _weights_now(self._model) != self._weights:
            raise RuntimeError(
                "the model's weights have changed since its PrefixCache was made; make another one"
            )

    def _setting(self, name: str, options: Mapping[str, Any]) -> Any:
        """Of a call, its config, or the model's: as `model.generate` takes them."""
        configs = (options.get("generation_config"), self._model.generation_config)
        found = (options.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in found if value is not None), None)

    # -- the rest ---------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Hits by tier, misses, transfers, pages, and how the store is used."""
        return self.cache.stats()

    def close(self, timeout_s: float = 10.0) -> None:
        with self._lock:
            self.cache.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


def model_fingerprint(model: Any) -> bytes:
    """32 bytes that stand for weights, config, dtype and attention implementation."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in NOT_THE_MODEL}
    method = [str(model.dtype), str(getattr(model.config, "_attn_implementation", ""))]
    described = json.dumps([config, method], sort_keys=True, default=str)
    digest = hashlib.sha256(described.encode())
    for name, weight in sorted(model.state_dict().items()):
        form = f"{weight.dtype} {tuple(weight.shape)}"
        data = weight.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()
        row_bytes = max(1, weight.shape[-1] if weight.ndim else 1) * weight.element_size()
        digest.update(digest_weight(name, Stored(form, data, row_bytes)))
    return digest.digest()


def _weights_now(model: Any) -> int:
    """Changes when a weight is replaced, or written to in place."""
    return hash(
        tuple(
            (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
            for weight in model.parameters()
        )
    )


def _check_model(model: Any) -> None:
    kind = type(model).__name__
    if model.training:
        raise UnsupportedModelError(f"{kind} is in training mode; call model.eval() first")
    if len({weight.device for weight in model.parameters()}) > 1:
        raise UnsupportedModelError(f"{kind} lies on several devices; load it onto one")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedModelError(f"{kind} has an adapter, which may be switched; merge it first")
    if model.config.is_encoder_decoder or not model._supports_default_dynamic_cache():
        raise UnsupportedModelError(
            f"{kind} does not use a DynamicCache; use a decoder with attention layers"
        )
