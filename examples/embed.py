"""Embed the cache in your own engine: a toy model whose keys and values live in kvtide.

    python examples/embed.py

Four conversations take turns on a device with room for two of them. Earlier turns are loaded from
host memory instead of being computed again, and the answers stay identical to the last bit: every
turn is compared with one computed without a cache. Read the numbered comments in order.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from kvtide.cache import CacheConfig, EveryPages, Lease, Ratio, Tier, TieredCache, Tokens
from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec, Reuse

LAYERS, HEADS, HEAD_DIM, VOCABULARY = 4, 4, 16, 512
HIDDEN = HEADS * HEAD_DIM
PAGE, CHUNK, ANSWER = 16, 48, 12  # Tokens per page, per chunk of a prompt, per answer.
WINDOW = 32  # Every second layer attends to the last 32 tokens only.

# 1. Declare what the model keeps between tokens. Layers that remember everything and layers that
#    remember a window are two pools: to go on at a page's end, the first need all pages before it,
#    the others only as many as the window reaches back (the window counts the new token, too).
KV = Entry((Field("k", (HEADS, HEAD_DIM), DType.FP32), Field("v", (HEADS, HEAD_DIM), DType.FP32)))
FULL = PoolSpec("full", layers=(0, 2), entry=KV)
WINDOWED = PoolSpec("windowed", layers=(1, 3), entry=KV, reuse=Reuse(reach=WINDOW - 1))
MEMORY = ModelMemory("toy", PAGE, pools=(FULL, WINDOWED), layers=LAYERS)
POOL_OF = {layer: pool.name for pool in MEMORY.pools for layer in pool.layers}


class History(NamedTuple):
    """A prompt's KV: the buffers of each layer, and the slot of each page in them."""

    buffers: Mapping[int, Mapping[str, torch.Tensor]]
    slots: dict[str, torch.Tensor]
    wait: Callable[[int], None]

    def put(self, layer: int, at: int, k: torch.Tensor, v: torch.Tensor) -> None:
        buffer, slot = self.buffers[layer], self.slots[POOL_OF[layer]][at // PAGE]
        buffer["k"][slot, at % PAGE], buffer["v"][slot, at % PAGE] = k, v

    def get(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        buffer, at = self.buffers[layer], torch.arange(start, end)
        slots = self.slots[POOL_OF[layer]][at // PAGE]
        return buffer["k"][slots, at % PAGE], buffer["v"][slots, at % PAGE]


class Toy:
    """A transformer with random weights. It computes token by token, so that a token's result is
    the same to the last bit in any chunk."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCABULARY, HIDDEN, generator=rng)
        self.position = torch.randn(1024, HIDDEN, generator=rng)
        self.weights = torch.randn(LAYERS, 6, HIDDEN, HIDDEN, generator=rng) / HIDDEN**0.5

    def forward(self, tokens: list[int], start: int, history: History) -> torch.Tensor:
        """Compute the tokens from position `start` on; returns the logits after the last one."""
        states = list(self.embedding[tokens] + self.position[start : start + len(tokens)])
        for layer in range(LAYERS):
            history.wait(layer)
            states = [self._layer(layer, x, start + n, history) for n, x in enumerate(states)]
        return self.embedding @ normal(states[-1])

    def _layer(self, layer: int, x: torch.Tensor, at: int, history: History) -> torch.Tensor:
        to_q, to_k, to_v, to_out, up, down = self.weights[layer].unbind()
        q, k, v = ((w @ normal(x)).view(HEADS, HEAD_DIM) for w in (to_q, to_k, to_v))
        history.put(layer, at, k, v)
        start = max(0, at + 1 - WINDOW) if layer in WINDOWED.layers else 0
        keys, values = history.get(layer, start, at + 1)
        scores = torch.einsum("hd,nhd->hn", q, keys) / HEAD_DIM**0.5
        x = x + to_out @ torch.einsum("hn,nhd->hd", scores.softmax(1), values).flatten()
        x = x + down @ torch.relu(up @ normal(x))
        return x


def normal(x: torch.Tensor) -> torch.Tensor:
    return x * x.square().mean().rsqrt()


class Engine:
    """Serves one prompt at a time."""

    def __init__(self, toy: Toy) -> None:
        # 2. Make the cache, here with a host tier four times the device tier. By default windows
        #    are kept only where a later prompt may resume. This model also reads its running window
        #    from the cache, so each page of it gets a slot, and the pool as many as the other has.
        config = CacheConfig(Tokens(320), host_size=Ratio(4), tokens_per_checkpoint=WINDOW)
        self.cache = TieredCache(MEMORY, config, placement=EveryPages(1))
        self._buffers = {layer: self.cache.view(pool, layer) for layer, pool in POOL_OF.items()}
        self._toy = toy

    def serve(self, tokens: list[int]) -> tuple[list[int], torch.Tensor, Lease]:
        """The answer, the logits after it, and the lease, which counts the tokens of each tier."""
        # 3. How much of the prompt is resident? A match changes nothing and holds nothing.
        match = self.cache.match(self.cache.prompt(tokens))
        # 4. Lease it, with slots for the prompt and a promise of pages for the answer; all or
        #    nothing. `None` means no room now: serve others meanwhile and try again.
        while (lease := self.cache.reserve(match, growth_pages=-(-ANSWER // PAGE))) is None:
            self.cache.poll()
        try:
            # 5. Start the copies from the host. They run beside the model, first layers first.
            self.cache.load(lease)
            # 6. Compute what was not found, in chunks: see `_step`.
            for at in range(lease.cached_tokens, len(tokens), CHUNK):
                logits = self._step(lease, tokens[at : at + CHUNK], at)
            # 7. Generate. The lease gets each token, and takes its slot out of the promise.
            answer: list[int] = []
            for at in range(len(tokens), len(tokens) + ANSWER):
                answer.append(int(logits.argmax()))
                lease.append(answer[-1:])
                grown = self.cache.grow(lease, at + 1)
                assert grown, "these pages were promised"
                logits = self._step(lease, answer[-1:], at)
        finally:
            # 11. On every exit path, give back what the lease holds. Committed pages stay.
            self.cache.release(lease)
        return answer, logits, lease

    def _step(self, lease: Lease, tokens: list[int], at: int) -> torch.Tensor:
        # 8. Page tables change as a lease grows. They include pages that are still arriving: at
        #    each layer the model waits for that layer's pages, or `wait` raises if they failed.
        tables = {a.name: self.cache.page_table(lease, a.name) for a in MEMORY.anchors}
        slots = {anchor: torch.from_numpy(table).long() for anchor, table in tables.items()}
        history = History(self._buffers, slots, lambda layer: self.cache.wait(lease, layer))
        logits = self._toy.forward(tokens, at, history)
        # 9. From now on other prompts match the full pages, and the host gets a copy.
        self.cache.commit(lease, at + len(tokens))
        # 10. Once per step: finished copies land, and due copies start.
        self.cache.poll()
        return logits


def recompute(toy: Toy, tokens: list[int]) -> tuple[list[int], torch.Tensor]:
    """The same without a cache: page n lies in slot n, and there is nothing to wait for."""
    room = (-(-(len(tokens) + ANSWER) // PAGE), PAGE, HEADS, HEAD_DIM)
    buffers = {n: {"k": torch.zeros(room), "v": torch.zeros(room)} for n in POOL_OF}
    slots = dict.fromkeys(POOL_OF.values(), torch.arange(room[0]))
    history, answer = History(buffers, slots, lambda layer: None), list[int]()
    logits = toy.forward(tokens, 0, history)
    for at in range(len(tokens), len(tokens) + ANSWER):
        answer.append(int(logits.argmax()))
        logits = toy.forward(answer[-1:], at, history)
    return answer, logits


def main() -> int:
    torch.manual_seed(1)
    torch.set_num_threads(1)  # More would only get in each other's way: the matrices are tiny.
    toy, same = Toy(), True
    engine = Engine(toy)
    conversations = [torch.randint(VOCABULARY, (40,)).tolist()] * 4  # One system prompt for all.
    print("conversation  prompt  from device  from host  computed      ms")
    for number in [0, 1, 2, 3] * 3:
        prompt = conversations[number] + torch.randint(VOCABULARY, (30,)).tolist()
        began = time.perf_counter()
        answer, logits, lease = engine.serve(prompt)
        ms = 1000 * (time.perf_counter() - began)
        device, host = (lease.by_tier.get(tier, 0) for tier in (Tier.DEVICE, Tier.HOST))
        computed = len(prompt) - lease.cached_tokens
        print(f"{number:12}{len(prompt):8}{device:13}{host:11}{computed:10}{ms:8.1f}")
        expected, expected_logits = recompute(toy, prompt)
        same &= answer == expected and torch.equal(logits, expected_logits)
        conversations[number] = prompt + answer
    assert engine.cache.validate() == []
    engine.cache.close()
    print("identical" if same else "DIFFERENT")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
