"""The default model from its file to its answer: our forward pass beside `transformers`."""

from __future__ import annotations

from kvtide.models import build
from kvtide.models.chat import Conversation
from kvtide.models.checkpoint import Checkpoint
from kvtide.models.tokenizer import load_tokenizer
from kvtide.spec.families import KVDType
from tests.models.answering import greedy, greedy_of_transformers

NEW_TOKENS = 12
QUESTION = "What is the capital of France? Answer in one sentence."


def test_smollm2_answers_as_transformers_does(smollm2: Checkpoint) -> None:
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer is not None
    prompt = tokenizer.encode_chat(Conversation([{"role": "user", "content": QUESTION}]))
    model = build(smollm2.config, smollm2.weights, kv_dtype=KVDType.FP32)
    ours = greedy(model, prompt, NEW_TOKENS)
    assert tokenizer.decode(ours).startswith("The capital of France is Paris.")
    weights = {name: smollm2.weights.get(name) for name in smollm2.weights.names()}
    assert ours == greedy_of_transformers(smollm2.config, weights, prompt, NEW_TOKENS)
