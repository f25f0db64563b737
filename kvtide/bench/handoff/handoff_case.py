"""What a prefill and a decode process are made with. Values, since one of them travels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvtide.bench.gpu.shapes import Shape
from kvtide.cache import CacheConfig, FetchPatience, TieredCache, Tokens
from kvtide.engine import Engine
from kvtide.models import Model
from kvtide.spec.families import KVDType
from kvtide.spec.residency import ALL_RESIDENT, Residency

MAX_RUNNING = 32
TIMEOUT_S = 600.0
"""Of handoffs: the benchmark keeps rooms for as long as a part of it runs."""


@dataclass(frozen=True, slots=True)
class HandoffModel:
    """A model, and what it is called in tables.

    hot    entries of a hot buffer on the decode side; None: all pages are on its device
    dtype  of the weights, as torch names it
    """

    shape: Shape
    what: str
    kv: KVDType | None = None
    hot: int | None = None
    dtype: str = "bfloat16"

    def build(self, device: torch.device, *, decodes: bool) -> Model:
        hot = self.hot if decodes else None
        resident = ALL_RESIDENT if hot is None else Residency(hot)
        return self.shape.build(device, getattr(torch, self.dtype), self.kv, resident)


@dataclass(frozen=True, slots=True)
class HandoffCase:
    """Both processes: the same model, tiers for prompts of up to so many tokens.

    batch_tokens  the decode side has room for running requests of so many tokens together
    room_tokens   the prefill side has room for prompts of so many, which wait in rooms
    threads       of each process, on a CPU
    """

    model: HandoffModel
    device: str
    tokens: int
    chunk_tokens: int = 8192
    batch_tokens: int = 0
    room_tokens: int = 0
    checkpoint_tokens: int = 1024
    transport: str = "shm"
    threads: int = 1

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    def open(self, *, decodes: bool) -> Engine:
        """One side's engine. All that is received at once may take half of the host."""
        if self.torch_device.type == "cpu":
            torch.set_num_threads(self.threads)
        model = self.model.build(self.torch_device, decodes=decodes)
        page = model.memory.page_tokens
        longest = self.tokens + 4 * page
        running = 2 * longest + (self.batch_tokens if decodes else self.room_tokens)
        config = CacheConfig(
            Tokens(running),
            host_size=Tokens(3 * longest),
            device=self.device,
            tokens_per_checkpoint=self.checkpoint_tokens,
            patience=FetchPatience("wait_complete"),
            hot_rows=MAX_RUNNING,
            tail_rows=MAX_RUNNING if decodes else 0,
            shared_host=decodes and self.transport == "shm",
            fingerprint=b"bench",
        )
        cache = TieredCache(model.memory, config)
        engine = Engine(
            model,
            cache,
            chunk_tokens=self.chunk_tokens,
            max_running=MAX_RUNNING,
            handoff_min_tokens=1,
        )
        if self.torch_device.type == "cuda":
            engine.warm_up()
        return engine
