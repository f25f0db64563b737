"""DeepSeek-V4 beyond what every family is tried with: real blocks, packed entries."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from kvtide.layers import ForwardPass, Step
from kvtide.layers.packing import packing
from kvtide.models import build
from kvtide.models.deepseek_v4 import DeepSeekV4
from kvtide.models.draft import CapturedStates
from kvtide.spec import Entry, SpecError
from kvtide.spec.families import KVDType
from kvtide.spec.families.pool_parts import packed, scaled
from tests.models.playing import Player
from tests.models.test_logits import assert_close
from tests.models.tiny import Tensors, checkpoint, expected, oracle, ours, prompt

REAL, TINY = "deepseek_v4-blocks-of-128", "deepseek_v4"
TOKENS = 600


# -- blocks of 4 and 128 -----------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("page_tokens", [128, 256, 384])
@pytest.mark.parametrize("chunks", [(TOKENS,), (300, 1, 1, 83), (129,)], ids=str)
def test_published_ratios_give_the_oracles_logits(
    page_tokens: int, chunks: tuple[int, ...]
) -> None:
    model = ours(REAL, page_tokens=page_tokens)
    assert_close(Player(model).prefill(prompt(TOKENS), *chunks), expected(REAL, TOKENS))


def test_published_ratios_give_the_same_bits_however_a_prompt_is_cut() -> None:
    model = ours(REAL, page_tokens=128, deterministic=True)
    whole = Player(model).prefill(prompt(400), 400)
    for chunks in ((131,), (1, 255, 3)):
        assert torch.equal(Player(model).prefill(prompt(400), *chunks), whole)


def test_a_prompt_goes_on_from_every_page_that_was_kept() -> None:
    """Pages in the midst of a step carry what a resume needs, as those at its end do."""
    model = ours(TINY, deterministic=True)
    tail = prompt(25, seed=5)
    player = Player(model, slots=200)
    for boundary in (16, 48, 64):
        trunk = player.begin(prompt(boundary + 4))
        player.step((trunk, boundary))
        branch = player.fork(trunk, tail)
        alone = Player(model).prefill(prompt(boundary) + tail, 1000)
        assert torch.equal(player.step((branch, 25))[0], alone[boundary:])


@pytest.mark.parametrize("page_tokens", [64, 192, 200])
def test_pages_that_cut_blocks_are_refused(page_tokens: int) -> None:
    with pytest.raises(
        SpecError, match="does not hold whole entries of 128; use a multiple of 128"
    ):
        ours(REAL, page_tokens=page_tokens)


def labs_config() -> dict[str, object]:
    """The config of the model with published ratios, as the lab spells it."""
    config = dict(checkpoint(REAL).config)
    rope = config.pop("rope_parameters")
    ratios = {"sliding_attention": 0, "compressed_sparse_attention": 4,
              "heavily_compressed_attention": 128}  # fmt: skip
    types = config.pop("layer_types")
    for name in ("compress_rates", "mlp_layer_types", "partial_rotary_factor"):
        config.pop(name)
    yarn = {k: v for k, v in rope["compress"].items() if k not in ("attention_factor", "rope_type")}
    return config | {
        "compress_ratios": [*(ratios[kind] for kind in types), 0],
        "num_hash_layers": 1,
        "rope_scaling": yarn,
    }


def test_the_labs_config_means_the_same() -> None:
    weights = checkpoint(REAL).weights
    model = build(labs_config(), weights, page_tokens=128, kv_dtype=KVDType.FP32)
    assert_close(Player(model).prefill(prompt(300), 300), expected(REAL, 300))


def test_how_much_of_a_head_rotates_may_be_given_as_a_fraction() -> None:
    saved = checkpoint(TINY)
    config = {k: v for k, v in saved.config.items() if k != "qk_rope_head_dim"}
    model = build(config, saved.weights, page_tokens=16, kv_dtype=KVDType.FP32)
    assert_close(Player(model).prefill(prompt(40), 40), expected(TINY, 150)[:40])


def test_scores_of_another_kind_are_refused() -> None:
    saved = checkpoint(TINY)
    with pytest.raises(SpecError, match="`scoring_func` is 'sigmoid'; only sqrtsoftplus is known"):
        build({**saved.config, "scoring_func": "sigmoid"}, saved.weights, page_tokens=16)


class OneCompressor:
    """Nothing of a model but the one compressor of its last layer, over given inputs."""

    def __init__(self, dtype: torch.dtype, inputs: Tensor) -> None:
        saved = checkpoint(TINY)
        names = saved.weights.names()
        weights = Tensors({name: saved.weights.get(name).bfloat16() for name in names})
        model = build(saved.config, weights, page_tokens=16, kv_dtype=KVDType.FP32, dtype=dtype)
        assert isinstance(model, DeepSeekV4)
        self.memory, self.inputs = model.memory, inputs.to(dtype)
        self.vocabulary, self.max_positions = model.vocabulary, model.max_positions
        self.uses_kernels = model.uses_kernels
        (*_, last) = model.layers.values()
        self.attention = last.attention

    def forward(
        self, step: Step, before: Tensor | None = None, captured: CapturedStates | None = None
    ) -> Tensor:
        for layer in self.memory.own_layers:
            step.wait(layer)
        inputs = self.inputs[step.positions]
        self.attention.compressor(*self.attention._values_gates(inputs), ForwardPass(step))
        return inputs

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def test_blocks_are_compressed_in_fp32_whatever_the_model_computes_in() -> None:
    inputs = torch.randn(7, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    means = []
    for dtype in (torch.float32, torch.bfloat16):
        player = Player(OneCompressor(dtype, inputs))
        sequence = player.begin(prompt(7))
        player.step((sequence, 7))
        means.append(player.held(sequence, "c16_open", 2))
    assert means[0].keys() == {"peak", "total", "mixed"}
    for name, wanted in means[0].items():
        torch.testing.assert_close(means[1][name], wanted, rtol=1e-6, atol=1e-6)


# -- packed entries ----------------------------------------------------------------------------


def _rounding(entry: Entry, name: str) -> Callable[[Tensor], Tensor]:
    """What keeping an entry packed does to it."""
    return lambda value: packing(entry).rounded(name, value)


def _with_rounding(monkeypatch: pytest.MonkeyPatch, tokens: int) -> Tensor:
    """The oracle's logits, where every key and entry is rounded as the packing rounds it."""
    model = oracle(TINY)
    config = model.config
    entry = packed(config.head_dim, config.qk_rope_head_dim, KVDType.FP8)
    index = scaled("index_key", config.index_head_dim, KVDType.FP8)
    keys, index_keys = _rounding(entry, "kv"), _rounding(index, "index_key")
    attend, score = modeling.eager_attention_forward, modeling.DeepseekV4IndexerScorer.forward

    def attend_rounded(module, query, key, value, *args, **more):
        return attend(module, query, keys(key), keys(value), *args, **more)

    monkeypatch.setattr(modeling, "eager_attention_forward", attend_rounded)
    monkeypatch.setattr(
        modeling.DeepseekV4IndexerScorer,
        "forward",
        lambda self, query, entries, hidden: score(self, query, index_keys(entries), hidden),
    )
    with torch.no_grad():
        return model(torch.tensor([prompt(tokens)]), use_cache=False).logits[0]


@pytest.mark.parametrize("deterministic", [False, True], ids=["batched", "determined"])
def test_packed_entries_do_what_the_same_rounding_does_in_the_oracle(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value on the verge may round the other way in one of the two, and show a little."""
    model = ours(TINY, kv_dtype=KVDType.FP8, deterministic=deterministic)
    unrounded = expected(TINY, 150)
    wanted = _with_rounding(monkeypatch, 150)
    rounding = float((wanted - unrounded).abs().mean())
    for chunks in ((150,), (33, 1, 1, 7)):
        logits = Player(model).prefill(prompt(150), *chunks)
        off = float((logits - wanted).abs().mean())
        print(f"off by {off:.2g} on average, where rounding moves logits by {rounding:.2g}")
        assert off <= rounding / 50


def test_packed_entries_give_the_same_bits_however_a_prompt_is_cut() -> None:
    model = ours(TINY, kv_dtype=KVDType.FP8, deterministic=True)
    whole, cut = (Player(model).prefill(prompt(150), size) for size in (150, 13))
    assert torch.equal(whole, cut)
