"""Makes tests/data/lookup_target: a tiny Llama that answers the prompts of `lookup_task`.

    python -m tests.data.make_lookup_target FOLDER [STEPS]

A look-up takes two layers that work together, which a tiny model finds after many thousand steps.
So the weights begin near one: the first layer attends to the previous token, the second to tokens
whose previous token is the present one. Training makes a model of it: before, it answers nothing.
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from tests.data.lookup_task import VOCABULARY, Walk, walk

STEPS, BATCH, MAX_RATE, WARM_UP = 1000, 16, 2e-3, 50
THETA, ALWAYS, SHARP = 1e6, 0.3, 7.3
"""Of positions; a number that every token's embedding has, how strongly it is attended with."""
CONFIG = transformers.LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=2048,
    rope_parameters={"rope_type": "default", "rope_theta": THETA},
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    initializer_range=0.05,
)


SLOW = torch.cat([torch.arange(8, 16), torch.arange(24, 32)])
"""Of a head's pairs, the slow half tells tokens apart at any distance."""


def token_parts() -> tuple[Tensor, ...]:
    """Three parts of a token's vector that have nothing in common: (64, 16) each."""
    chance = torch.Generator().manual_seed(0)
    parts = torch.linalg.qr(torch.randn(63, 48, generator=chance)).Q
    return torch.cat([torch.zeros(1, 48), parts]).split(16, dim=1)


@torch.no_grad()
def begin_near_a_lookup(model: transformers.LlamaForCausalLM) -> None:
    """Weights of the first head of the first two layers."""
    embedding = model.model.embed_tokens.weight
    embedding[:, 0] = ALWAYS
    before, found = (model.model.layers[number].self_attn for number in range(2))
    for projection in (before.q_proj, before.k_proj, found.q_proj, found.k_proj):
        projection.weight[:32] = 0
    # Queries and keys are the same vector for every token; that of a query is rotated one position
    # back, so that scores are highest there.
    frequencies = THETA ** -(torch.arange(16) / 16)
    strength = SHARP / 4.8
    before.k_proj.weight[:16, 0] = strength
    before.q_proj.weight[:16, 0] = strength * frequencies.cos()
    before.q_proj.weight[16:32, 0] = -strength * frequencies.sin()
    token, previous, value = token_parts()
    before.v_proj.weight[:16] = token.T
    before.o_proj.weight[:, :16] = 0.15 * previous
    found.q_proj.weight[SLOW] = 2.5 * token.T
    found.k_proj.weight[SLOW] = 2.5 * previous.T
    found.v_proj.weight[:16] = value.T
    found.o_proj.weight[:, :16] = value
    model.lm_head.weight.copy_(embedding)
    model.lm_head.weight[:, 0] = 0


def batch(rng: random.Random, progress: float) -> list[Walk]:
    """Longer tables later, some of them several times."""
    pairs = rng.randint(8, 12 + int(52 * min(1.0, 2 * progress)))
    repeated = 1
    if progress > 0.8 and rng.random() < 0.15:
        pairs, repeated = rng.randint(32, 64), rng.choice([2, 3, 5])
    count = BATCH if repeated == 1 else max(2, BATCH // (2 * repeated))
    return [walk(rng, pairs, repeated) for _ in range(count)]


def loss_of(model: transformers.LlamaForCausalLM, walks: list[Walk]) -> tuple[Tensor, float]:
    ids = torch.tensor([[*one.prompt, *one.answer] for one in walks])
    first = len(walks[0].prompt)
    hidden = model.model(ids).last_hidden_state[:, first - 1 : -1]
    logits, wanted = model.lm_head(hidden), ids[:, first:]
    right = float((logits.argmax(-1) == wanted).float().mean())
    return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()), right


def make(folder: Path, steps: int = STEPS) -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    model = transformers.LlamaForCausalLM(CONFIG)
    begin_near_a_lookup(model)
    optimizer = torch.optim.AdamW(model.parameters(), MAX_RATE, (0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        progress = step / steps
        warm, cosine = min(1.0, (step + 1) / WARM_UP), 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = MAX_RATE * warm * (0.02 + 0.98 * cosine)
        loss, right = loss_of(model, batch(rng, progress))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 24:
            print(f"step {step + 1}: loss {loss.item():.3f}, {right:.3f} right", flush=True)
    model.generation_config = None
    model.to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]), *map(int, sys.argv[2:]))
