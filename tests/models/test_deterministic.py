"""Deterministic arithmetic: a token's logits are the same bits, whatever its step looked like."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from torch import Tensor

from kvtide.spec.families import KVDType
from kvtide.tiers import Layout
from tests.grids import covered
from tests.models.playing import Player
from tests.models.tiny import ours, prompt

TOKENS = 100
PRECISIONS = {
    "fp32": (torch.float32, KVDType.FP32, TOKENS),
    "fp32-kept-in-bf16": (torch.float32, KVDType.BF16, TOKENS),
    "bf16": (torch.bfloat16, KVDType.BF16, 60),  # Few CPUs have GEMMs in it.
}
FAMILIES = [
    "llama-tied-wide-heads",
    "mistral-windows",
    "qwen2-some-windows",
    "qwen3",
    "gemma3",
    "gpt_oss",
    "falcon_h1-groups-norm",
    "deepseek_v4",
    "qwen3_moe",
    "gemma2",
    "granitemoehybrid",
    "nemotron_h-latent-experts",
    "qwen3_next",
    "lfm2",
    "kimi_linear",
    "deepseek_v2",
    "deepseek_v3-yarn-halves",
    "deepseek_v32",
    "glm_moe_dsa-shared",
]
QUICK = [
    "mistral-windows",
    "gpt_oss",
    "falcon_h1-groups-norm",
    "deepseek_v4",
    "qwen3_next",
    "kimi_linear",
    "glm_moe_dsa-shared",
]
"""One family of each form of memory, with each kind of recurrent state."""
CASES = [
    *covered(product(QUICK, PRECISIONS)),
    *(
        pytest.param(*cell, marks=pytest.mark.full)
        for cell in product(FAMILIES, PRECISIONS)
        if cell[0] not in QUICK
    ),
]

every_family = pytest.mark.parametrize("name", FAMILIES)


class Case:
    """A model, and what it says of a prompt that has a step to itself."""

    def __init__(self, name: str, precision: str) -> None:
        dtype, kv, self.tokens = PRECISIONS[precision]
        self.model = ours(name, deterministic=True, dtype=dtype, kv_dtype=kv)
        self.prompts = [prompt(self.tokens, seed) for seed in range(1, 4)]
        self.alone = [Player(self.model).prefill(one, self.tokens) for one in self.prompts]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(cell.values, marks=cell.marks, id="-".join(cell.values)) for cell in CASES
    ],
)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


@pytest.mark.quick
@pytest.mark.parametrize("chunks", [(7,), (33, 1, 1, 16, 2)], ids=["7s", "mixed"])
def test_a_prompt_gives_the_same_bits_however_it_is_cut(
    case: Case, chunks: tuple[int, ...]
) -> None:
    player = Player(case.model, layout=Layout.PAGE_FIRST)
    assert torch.equal(player.prefill(case.prompts[0], *chunks), case.alone[0])


def test_decoding_gives_the_same_bits_as_prefill(case: Case) -> None:
    ones = [1] * 30
    logits = Player(case.model).prefill(case.prompts[0], case.tokens - len(ones), *ones)
    assert torch.equal(logits, case.alone[0])


def test_a_token_gives_the_same_bits_in_any_company(case: Case) -> None:
    seed = 11
    print(f"seed {seed}")
    for got, wanted in zip(_in_random_company(case, seed), case.alone, strict=True):
        assert torch.equal(got, wanted)


def _in_random_company(case: Case, seed: int) -> list[Tensor]:
    """Sequences that begin when they will and take chunks of any size, in any order."""
    chance, player = random.Random(seed), Player(case.model)
    sequences = [player.begin(one) for one in case.prompts]
    logits: list[list[Tensor]] = [[] for _ in sequences]
    while going := [i for i, sequence in enumerate(sequences) if sequence.left]:
        together = chance.sample(going, chance.randint(1, len(going)))
        counts = [min(chance.choice([1, 1, 5, 17, 40]), sequences[i].left) for i in together]
        batch = [(sequences[i], count) for i, count in zip(together, counts, strict=True)]
        for i, out in zip(together, player.step(*batch), strict=True):
            logits[i].append(out)
    return [torch.cat(parts) for parts in logits]


@pytest.mark.quick(name=FAMILIES[::6])
@every_family
def test_continuations_of_one_prefix_do_not_touch_it_or_each_other(name: str) -> None:
    """Two that share its pages in one step, then a third that begins when they are done."""
    player = Player(ours(name, deterministic=True))
    trunk = player.begin(prompt(48))
    player.step((trunk, 48))
    tails = [prompt(30, seed) for seed in (2, 3, 4)]
    branches = [player.fork(trunk, tail) for tail in tails]
    got = player.step((branches[0], 30), (branches[1], 30)) + player.step((branches[2], 30))
    for tail, logits in zip(tails, got, strict=True):
        alone = player.prefill(prompt(48) + tail, 78)
        assert torch.equal(logits, alone[48:])


@pytest.mark.quick(name=FAMILIES[1::6])
@every_family
def test_the_size_of_pages_does_not_show(name: str) -> None:
    # DeepSeek-V4's pages hold whole blocks, of 16 tokens here.
    small = ours(name, deterministic=True, page_tokens=16 if name == "deepseek_v4" else 8)
    large = ours(name, deterministic=True, page_tokens=64)
    first, second = (Player(m).prefill(prompt(TOKENS), 29) for m in (small, large))
    assert torch.equal(first, second)


def test_keys_and_values_in_eight_bits_give_the_same_bits_however_a_prompt_is_cut() -> None:
    model = ours("mistral-windows", deterministic=True, kv_dtype=KVDType.FP8)
    whole, cut = (Player(model).prefill(prompt(TOKENS), size) for size in (TOKENS, 13))
    assert torch.equal(whole, cut)
    assert not torch.equal(whole, Player(ours("mistral-windows")).prefill(prompt(TOKENS), TOKENS))
