"""`PrefixCache` over every family: logits on restored prefixes are those without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicIndexedLayer

from kvtide.cache import Tokens
from kvtide.integrations.cache_parts import UnsupportedModelError, parts_of
from kvtide.integrations.transformers import PrefixCache
from tests.integrations.tiny_models import tiny_model
from tests.models.tiny import CONFIGS, LONG, oracle, prompt

PAGE = 16
NO_ATTENTION = {"nemotron_h-experts"}
QUICK = {"llama", "gemma3", "qwen3_next", "bamba", "deepseek_v4", "glm_moe_dsa-shared"}
GENERATE = {
    "max_new_tokens": 4,
    "do_sample": False,
    "output_logits": True,
    "return_dict_in_generate": True,
}


def model_of(name: str) -> Any:
    return oracle(name) if name in {**CONFIGS, **LONG} else tiny_model(name)


def prefixes(model: Any, page_tokens: int = PAGE) -> PrefixCache:
    return PrefixCache(model, page_tokens=page_tokens, device_size=Tokens(40 * page_tokens))


def assert_equal(cache: PrefixCache, model: Any, tokens: list[int]) -> None:
    ids = torch.tensor([tokens]) % (model.config.vocab_size - 1) + 1  # 0 is padding.
    expected, found = model.generate(ids, **GENERATE), cache.generate(ids, **GENERATE)
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(
        torch.stack(found.logits), torch.stack(expected.logits), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.full)
        for name in (*CONFIGS, "zaya")
        if name not in NO_ATTENTION
    ],
)
def test_logits_on_a_restored_prefix_equal_those_without(name: str) -> None:
    model = model_of(name)
    with prefixes(model) as cache:
        for tokens, found in ((prompt(100), 0), (prompt(100) + prompt(20, 2), 96)):
            assert_equal(cache, model, tokens)
            assert cache.last.cached_tokens == found
        assert cache.cache.validate() == []


@pytest.mark.full
def test_deepseek_v4_is_restored_by_whole_blocks_of_128() -> None:
    model = model_of("deepseek_v4-blocks-of-128")
    with prefixes(model, 128) as cache:
        for found in (0, 256):
            assert_equal(cache, model, prompt(300))
            assert cache.last.cached_tokens == found


def test_pages_without_whole_blocks_are_refused() -> None:
    model = model_of("deepseek_v4")
    with pytest.raises(UnsupportedModelError, match="page of 24 does not hold whole ones"):
        prefixes(model, 24)


def test_windows_beside_states_that_do_not_hold_a_page_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="use page_tokens of 39 or less"):
        prefixes(tiny_model("zaya"), 40)


@pytest.mark.parametrize("name", [*NO_ATTENTION, "mamba2"])
def test_models_without_attention_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no attention layer|DynamicCache"):
        prefixes(model_of(name))


def test_positions_beside_index_keys_are_refused() -> None:
    layer = DynamicIndexedLayer()
    layer.update(torch.zeros(1, 2, PAGE, 8), torch.zeros(1, 2, PAGE, 8))
    layer.update_indexer(torch.zeros(1, PAGE, 4))
    layer.indexer_position_ids = torch.zeros(3, 1, PAGE)
    with pytest.raises(UnsupportedModelError, match="keeps positions of several dimensions"):
        list(parts_of(layer, "layer 0"))
