"""The default model from its file to its answer: our forward pass beside `transformers`."""

from __future__ import annotations

import torch
import transformers

from kvtide.models import Model, build
from kvtide.models.chat import Conversation
from kvtide.models.checkpoint import Checkpoint
from kvtide.models.tokenizer import load_tokenizer
from kvtide.spec.families import KVDType
from tests.models.playing import Player

NEW_TOKENS = 30
QUESTION = "What is the capital of France? Answer in one sentence."


def _greedy(model: Model, prompt: list[int]) -> list[int]:
    """One token at a time over paged state, the prompt in chunks of 16."""
    player = Player(model)
    sequence = player.begin(prompt)
    while sequence.left:
        (logits,) = player.step((sequence, min(16, sequence.left)))
    for _ in range(NEW_TOKENS - 1):
        sequence.tokens.append(int(logits[-1].argmax()))
        (logits,) = player.step((sequence, 1))
    return [*sequence.tokens[len(prompt) :], int(logits[-1].argmax())]


def _oracle(checkpoint: Checkpoint, prompt: list[int]) -> list[int]:
    """The same weights in `transformers`, with nothing of ours but the reader."""
    weights = checkpoint.weights
    state = {name: weights.get(name) for name in weights.names()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**checkpoint.config))
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # It is not in the state.
    tokens, past, found = torch.tensor([prompt]), None, []
    with torch.no_grad():
        while len(found) < NEW_TOKENS:
            out = model.eval()(tokens, past_key_values=past, use_cache=True)
            past, tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)
            found.append(int(tokens))
    return found


def test_smollm2_answers_as_transformers_does(smollm2: Checkpoint) -> None:
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer is not None
    prompt = tokenizer.encode_chat(Conversation([{"role": "user", "content": QUESTION}]))
    ours = _greedy(build(smollm2.config, smollm2.weights, kv_dtype=KVDType.FP32), prompt)
    assert tokenizer.decode(ours).startswith("The capital of France is Paris.")
    assert ours == _oracle(smollm2, prompt)
