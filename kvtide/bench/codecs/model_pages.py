"""Pages of a real text, and what a model says after it has restored them.

One life of an engine computes a prompt and stores it; a second one restores it from there. The
logits after every further token of the text are compared with those of a life that has computed
all pages: the difference is the codec's alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvtide
from kvtide.cache import CacheConfig, FetchPatience, TieredCache, Tokens
from kvtide.cache.hardware import formats
from kvtide.engine import Engine, Request, RequestParams
from kvtide.engine.restore_oracle import RestoreOracle
from kvtide.models import build
from kvtide.models.checkpoint import Checkpoint
from kvtide.models.model import Decoder
from kvtide.models.model_errors import CheckpointError
from kvtide.models.tokenizer import load_tokenizer
from kvtide.spec import Tier
from kvtide.spec.families import KVDType
from kvtide.storage import ObjectFormat, StoreError, open_store
from kvtide.storage.memory_store import MemoryStore

SCORED = 32
"""Tokens after the restored prefix whose distributions are compared."""
CHUNK_TOKENS = 512
WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class RestoredLogits:
    """The distributions after restored pages beside those after computed ones, in nats.

    kl         from the computed to the restored one, by position: mean and largest
    same       the fraction of positions with the same argmax
    restored   tokens that came from the store
    """

    kl_mean: float
    kl_max: float
    same: float
    restored: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class ModelText:
    """A model, and the first tokens of a text: a prefix of whole pages, and what follows."""

    def __init__(
        self, checkpoint: Checkpoint, text: str, prefix_tokens: int, kv_dtype: KVDType
    ) -> None:
        tokenizer = load_tokenizer(checkpoint)
        if tokenizer is None:
            raise CheckpointError(f"{checkpoint.path}: there is no tokenizer; pass another model")
        self.model: Decoder = build(
            checkpoint.config, checkpoint.weights, kv_dtype=kv_dtype, dtype=torch.float32
        )
        page = self.model.memory.page_tokens
        self.prefix_tokens = prefix_tokens // page * page
        self.tokens = tuple(tokenizer.encode(text)[: self.prefix_tokens + SCORED])
        if not self.prefix_tokens or len(self.tokens) < self.prefix_tokens + SCORED:
            raise CheckpointError(
                f"the text has {len(self.tokens):,} tokens, and {prefix_tokens + SCORED:,} are "
                f"needed, {page} or more for a page; use a longer text, or other --tokens"
            )

    def stored(self) -> list[tuple[ObjectFormat, bytes]]:
        """The objects of the prefix, as a store without a codec has them."""
        url = f"memory:bench-{secrets.token_hex(8)}"
        with closing(self._life(url, lossy=False)) as life:
            life.serve(self.tokens[: self.prefix_tokens + 1])
            life.settle()
            memory, config = life.cache.memory, life.cache.config
            known = list(formats(memory, config).values())
            store = open_store(url, life.cache.storage.space)
            assert isinstance(store, MemoryStore)
            objects = store.contents()
            store.clear()
        return [(next(f for f in known if f.labels(memoryview(one))), one) for one in objects]

    def computed(self) -> Tensor:
        """The logits after every scored token, with pages as they were computed."""
        with closing(self._life("memory:", lossy=False)) as life:
            return self._logits(life)[0]

    def restored(self, codec: str, computed: Tensor) -> RestoredLogits:
        """Restore the prefix from a store with this codec."""
        url = f"memory:bench-{secrets.token_hex(8)}?codec={codec}"
        with closing(self._life(url, lossy=True)) as life:
            life.serve(self.tokens[: self.prefix_tokens + 1])
            life.settle()
        with closing(self._life(url, lossy=True)) as life:
            found, tokens = self._logits(life)
        if not tokens:
            raise StoreError(f"{codec}: none of {self.prefix_tokens} tokens were restored")
        ours, theirs = torch.log_softmax(computed, -1), torch.log_softmax(found, -1)
        kl = (ours.exp() * (ours - theirs)).sum(-1)
        same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
        return RestoredLogits(float(kl.mean()), float(kl.max()), float(same), tokens)

    def _logits(self, life: _Life) -> tuple[Tensor, int]:
        """The logits after every scored token, and how many tokens came from the store."""
        first, *others = (self.tokens[: self.prefix_tokens + n] for n in range(1, SCORED + 1))
        (request,) = life.serve(first)
        life.serve(*others)
        life.settle()
        logits = torch.stack([life.logits[len(tokens)] for tokens in (first, *others)])
        return logits, request.by_tier.get(Tier.STORAGE, 0)

    def _life(self, url: str, *, lossy: bool) -> _Life:
        # Requests that run together each take pages for what is behind the prefix.
        tokens = self.prefix_tokens + 2 * SCORED * self.model.memory.page_tokens
        return _Life(self.model, url, tokens, lossy=lossy)


class _Life:
    """An engine over a store."""

    def __init__(self, model: Decoder, url: str, tokens: int, *, lossy: bool) -> None:
        patience = FetchPatience("wait_complete", min_tokens=1)
        config = CacheConfig(
            Tokens(tokens),
            tokens_per_checkpoint=CHUNK_TOKENS,
            patience=patience,
            lossy_pages=lossy,
        )
        self.cache = TieredCache(model.memory, config)
        self.cache.storage.attach(open_store(url, self.cache.storage.space))
        self._kept = _KeptLogits(self.cache)
        self._engine = Engine(model, self.cache, chunk_tokens=CHUNK_TOKENS, oracle=self._kept)

    @property
    def logits(self) -> dict[int, Tensor]:
        """By the tokens before them."""
        return self._kept.rows

    def serve(self, *prompts: tuple[int, ...]) -> list[Request]:
        """Together."""
        requests = [self._engine.submit(RequestParams(tokens, 1)) for tokens in prompts]
        while not self._engine.idle:
            self._engine.step()
        return requests

    def settle(self) -> None:
        """All pages are stored."""
        if not self.cache.drain(WAIT_S):
            raise StoreError(f"pages are not stored after {WAIT_S:g} s")

    def close(self) -> None:
        self.cache.close()


class _KeptLogits(RestoreOracle):
    """Keeps the logits after every request, and checks none."""

    def __init__(self, cache: TieredCache) -> None:
        super().__init__(cache, 0.0, None)
        self.rows: dict[int, Tensor] = {}

    def look(
        self,
        requests: Sequence[Request],
        logits: Tensor,
        submit: Callable[[RequestParams], Request],
    ) -> frozenset[Request]:
        for request, row in zip(requests, logits, strict=True):
            self.rows[len(request.params.tokens)] = row.float().clone()
        return frozenset()


def source_text() -> str:
    """This package's own source: code, as agents read it."""
    root = Path(kvtide.__file__).parent
    return "\n\n".join(path.read_text("utf-8") for path in sorted(root.rglob("*.py")))
