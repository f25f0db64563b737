"""A real model with windows, Gemma 3 270M: it answers as `transformers` does, restored or not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from kvtide.cache import CacheConfig, Ratio, TieredCache, Tokens
from kvtide.engine import Engine, Request, RequestParams, SamplingParams
from kvtide.models import build
from kvtide.models.chat import Conversation
from kvtide.models.checkpoint import Checkpoint
from kvtide.models.model_errors import TemplateError
from kvtide.models.tokenizer import Tokenizer, load_tokenizer
from kvtide.spec import Tier
from kvtide.spec.families import KVDType
from tests.models.answering import greedy, greedy_of_transformers
from tests.models.tiny import Tensors

pytestmark = pytest.mark.full

NEW_TOKENS = 12
PAGE = 64
WINDOW = 512
LICENSE = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(scope="module")
def weights(gemma3: Checkpoint) -> Mapping[str, Tensor]:
    """Read once; all models here share them."""
    return {name: gemma3.weights.get(name) for name in gemma3.weights.names()}


@pytest.fixture(scope="module")
def tokenizer(gemma3: Checkpoint) -> Tokenizer:
    found = load_tokenizer(gemma3)
    assert found is not None
    return found


def test_gemma3_goes_on_as_transformers_does(gemma3, weights, tokenizer) -> None:
    prompt = tokenizer.encode("The capital of Germany is Berlin. The capital of France is")
    ours = greedy(build(gemma3.config, Tensors(weights), kv_dtype=KVDType.FP32), prompt, NEW_TOKENS)
    assert tokenizer.decode(ours).startswith(" Paris")
    assert ours == greedy_of_transformers(gemma3.config, weights, prompt, NEW_TOKENS)


def test_a_model_that_was_not_taught_to_chat_says_so(tokenizer: Tokenizer) -> None:
    with pytest.raises(TemplateError, match="no chat template; ask for a completion of a text"):
        tokenizer.encode_chat(Conversation([{"role": "user", "content": "Hello"}]))


def test_a_prefix_longer_than_a_window_comes_back_to_the_bit(gemma3, weights, tokenizer) -> None:
    model = build(gemma3.config, Tensors(weights), page_tokens=PAGE, deterministic=True)
    config = CacheConfig(Tokens(1024), host_size=Ratio(2.0), tokens_per_checkpoint=WINDOW)
    engine = Engine(model, TieredCache(model.memory, config))
    prompt = tokenizer.encode(LICENSE.read_text("utf-8"))[: 9 * PAGE + 10]
    assert len(prompt) > WINDOW + PAGE

    def answered() -> Request:
        request = engine.submit(RequestParams(tuple(prompt), 2, SamplingParams(logprobs=3)))
        while not engine.idle:
            engine.step()
        return request

    computed = answered()
    assert engine.cache.drain(10)
    engine.cache.flush(Tier.DEVICE)
    restored = answered()
    assert computed.by_tier == {} and restored.by_tier == {Tier.HOST: 9 * PAGE}
    assert restored.output == computed.output
    engine.cache.close()
