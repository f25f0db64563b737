"""`PrefixCache` over real caches of transformers: the same tokens, with less computed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvtide.cache import Namespace, Tier, Tokens, TransferError
from kvtide.integrations.cache_parts import UnsupportedModelError
from kvtide.integrations.transformers import PrefixCache
from tests.integrations.tiny_models import tiny_model, tokens

PAGE, ANSWER = 16, 24


def prefixes(model, storage: str | None = None) -> PrefixCache:
    return PrefixCache(model, storage, page_tokens=PAGE, device_size=Tokens(640), fetch_s=60.0)


def plain(model, ids: torch.Tensor) -> list[int]:
    return model.generate(ids, max_new_tokens=ANSWER, do_sample=False)[0].tolist()


def reused(cache: PrefixCache, ids: torch.Tensor) -> list[int]:
    return cache.generate(ids, max_new_tokens=ANSWER, do_sample=False)[0].tolist()


def prompt(*parts: tuple[int, int]) -> torch.Tensor:
    """Parts of a prompt, each by its number of tokens and its seed."""
    return torch.tensor([[token for part in parts for token in tokens(*part)]])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_next_turn_finds_what_the_model_generated(family: str) -> None:
    model = tiny_model(family)
    with prefixes(model) as cache:
        turn = torch.tensor([reused(cache, prompt((60, 1))) + tokens(10, 2)])
        assert reused(cache, turn) == plain(model, turn)
        assert cache.last.cached_tokens == 80  # 60 of the prompt, 23 of the answer's 24.


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_another_instance_finds_prefixes_in_the_store(family: str, tmp_path: Path) -> None:
    model, ids, url = tiny_model(family), prompt((100, 1)), f"file://{tmp_path}?cap=64MB&floor=0"
    with prefixes(model, url) as cache:
        expected = reused(cache, ids)
    with prefixes(tiny_model(family), url) as cache:
        assert reused(cache, ids) == expected == plain(model, ids)
        assert cache.last.by_tier == {Tier.STORAGE: 96}


def test_pages_of_other_weights_are_not_found(tmp_path: Path) -> None:
    ids, url = prompt((100, 1)), f"file://{tmp_path}?cap=64MB&floor=0"
    other = tiny_model("llama", seed=1)
    with prefixes(tiny_model("llama"), url) as cache:
        reused(cache, ids)
    with prefixes(other, url) as cache:
        assert reused(cache, ids) == plain(other, ids)
        assert cache.last.cached_tokens == 0


def test_weights_that_change_are_refused() -> None:
    model = tiny_model("llama")
    with prefixes(model) as cache:
        reused(cache, prompt((40, 1)))
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        with pytest.raises(RuntimeError, match="weights have changed"):
            reused(cache, prompt((40, 1)))


def test_namespaces_share_nothing() -> None:
    with prefixes(tiny_model("llama")) as cache:
        ids = prompt((40, 1))
        for name, found in (("a", 0), ("b", 0), ("a", 32)):
            cache.generate(ids, namespace=Namespace(name), max_new_tokens=2, do_sample=False)
            assert cache.last.cached_tokens == found


def test_prompts_beyond_the_device_tier_are_computed() -> None:
    model, ids = tiny_model("llama"), prompt((100, 1))
    with PrefixCache(model, page_tokens=PAGE, device_size=Tokens(64)) as cache:
        for _ in range(2):
            assert reused(cache, ids) == plain(model, ids)
            assert cache.last.cached_tokens == 0


def test_a_prefix_that_cannot_be_loaded_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model("llama"), prompt((100, 1))

    def fails(lease: object, layer: int) -> None:
        raise TransferError("the copy failed")

    with prefixes(model) as cache:
        reused(cache, ids)
        with monkeypatch.context() as patch:
            patch.setattr(cache.cache, "wait", fails)
            assert reused(cache, ids) == plain(model, ids)
            assert cache.last.cached_tokens == 0
        assert reused(cache, ids) == plain(model, ids)
        assert cache.last.cached_tokens == 96


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_beams": 2}, "num_beams above 1"),
        ({"past_key_values": object()}, r"past_key_values=…\) is not supported"),
        ({"inputs_embeds": torch.zeros(1, 4, 32)}, r"inputs_embeds=…\) is not supported"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]])}, "hides tokens"),
    ],
)
def test_calls_that_pages_cannot_serve_are_refused(options: dict, sentence: str) -> None:
    with prefixes(tiny_model("llama")) as cache:
        with pytest.raises(ValueError, match=sentence):
            cache.generate(prompt((4, 1)), **options)
        with pytest.raises(ValueError, match=r"one sequence, as \(1, tokens\)"):
            cache.generate(prompt((4, 1)).repeat(2, 1))


def test_a_prompt_with_pad_tokens_needs_a_mask_that_shows_them() -> None:
    model, ids = tiny_model("llama"), prompt((60, 1))
    ids[0, 20] = model.config.pad_token_id
    shown = {"attention_mask": torch.ones_like(ids), "max_new_tokens": ANSWER, "do_sample": False}
    with prefixes(model) as cache:
        with pytest.raises(ValueError, match="hides the pad token 0"):
            reused(cache, ids)
        for found in (0, 48):
            expected = model.generate(ids, **shown)
            assert cache.generate(ids, **shown).tolist() == expected.tolist()
            assert cache.last.cached_tokens == found
        ends = {"eos_token_id": model.config.pad_token_id, "max_new_tokens": 2, "do_sample": False}
        assert cache.generate(ids, **ends).tolist() == model.generate(ids, **ends).tolist()


@pytest.mark.parametrize("much", [1.0, 0.01])
def test_a_model_that_keeps_state_elsewhere_is_refused(much: float) -> None:
    model = tiny_model("llama")
    seen: list[torch.Tensor] = []

    def remember(module, arguments, output):
        seen.append(output)
        return output.lerp(output.roll(len(seen), -1), much)

    model.model.embed_tokens.register_forward_hook(remember)
    with pytest.raises(UnsupportedModelError, match="logits on a restored prefix differ"):
        prefixes(model)


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_prefixes_survive_kill_minus_nine(family: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}?cap=64MB&floor=0"
    command = [sys.executable, "-m", "tests.integrations.generate_once", family, url]
    first = subprocess.run([*command, "--kill"], capture_output=True, text=True)
    assert first.returncode == -signal.SIGKILL, first.stderr
    second = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert second.returncode == 0, second.stderr
    found, generated = second.stdout.splitlines()
    assert first.stdout.splitlines() == ["0", generated]
    assert found == "96"
