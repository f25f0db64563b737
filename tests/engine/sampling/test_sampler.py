"""From logits to a token: what the settings rule out, and what a draw depends on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.engine import SamplingParams
from kvtide.engine.device_kernels import DeviceKernels
from kvtide.engine.grammar import token_mask
from kvtide.engine.grammar.token_mask import RowMask
from kvtide.engine.sampling import sampler
from kvtide.engine.sampling.sampler import (
    Limits,
    SampledToken,
    SamplingBatch,
    SamplingInput,
    gumbel_noise,
    sample_all,
    sample_columns,
    sampling_columns,
    score,
)
from kvtide.engine.staging import Staging

WARM = SamplingParams(temperature=1.0)


def row(*logits: float) -> torch.Tensor:
    return torch.tensor(logits, dtype=torch.float32)


def from_chances(*chances: float) -> torch.Tensor:
    return torch.tensor(chances).log()


def choose(
    logits: torch.Tensor, sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> SampledToken:
    """The next token of a request without company."""
    return sample_all(logits[None], [SamplingInput(sampling, prompt, [*prompt, *output])])[0]


def sampled_of(logits: torch.Tensor, sampling: SamplingParams, samples: int = 300) -> set[int]:
    """Every token that occurs in so many samples."""
    inputs = [SamplingInput(replace(sampling, seed=s), [0], [0]) for s in range(samples)]
    return {sampled.token for sampled in sample_all(logits.expand(samples, -1), inputs)}


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def allowed(logits: np.ndarray, sampling: SamplingParams) -> set[int]:
    """The tokens that may come, by the definitions: one rule after the other."""
    left = list(np.argsort(-logits, kind="stable"))
    if sampling.top_k:
        left = left[: sampling.top_k]
    if sampling.min_p:
        chances = softmax(logits[left])
        left = [t for t, c in zip(left, chances, strict=True) if c >= sampling.min_p * chances[0]]
    if sampling.top_p < 1.0:
        before, kept = 0.0, []
        for token, chance in zip(left, softmax(logits[left]), strict=True):
            if not kept or before < sampling.top_p:
                kept.append(token)
            before += chance
        left = kept
    return {int(token) for token in left}


# -- greedy ---------------------------------------------------------------------------------


def test_greedy_takes_the_argmax_whatever_the_seed():
    for seed in range(20):
        assert choose(row(1, 3, 2), SamplingParams(seed=seed), [0], []).token == 1


def test_without_rows_nothing_is_chosen():
    assert sample_all(torch.empty(0, 5), []) == []


def test_company_changes_nothing():
    """Every row gets what it gets alone: greedy, penalised and sampled ones side by side."""
    kinds = [
        SamplingParams(),
        SamplingParams(logprobs=2),
        SamplingParams(temperature=0.8, seed=3, top_p=0.9),
        SamplingParams(repetition_penalty=1.5, logprobs=1),
        SamplingParams(presence_penalty=1.0, frequency_penalty=0.3),
        SamplingParams(temperature=1.3, seed=3, min_p=0.02, top_k=9),
    ]
    logits = torch.randn(12, 40, generator=torch.Generator().manual_seed(1))
    inputs = [SamplingInput(kinds[n % 6], [n, 2], [n, 2, *range(n)]) for n in range(12)]
    alone = [sample_all(logits[n : n + 1], [inputs[n]])[0] for n in range(12)]
    assert sample_all(logits, inputs) == alone
    assert sample_all(logits.flip(0), inputs[::-1]) == alone[::-1]


def test_company_changes_nothing_however_wide_the_rows():
    """Where sums are shared out over threads, or taken by row: to the last bit."""
    logits = torch.randn(5, 70_001, generator=torch.Generator().manual_seed(2)) * 3
    kinds = [
        SamplingParams(logprobs=3),
        SamplingParams(0.9, seed=1),
        SamplingParams(1.5, 0.95, seed=2, logprobs=5),
    ]
    inputs = [SamplingInput(kinds[n % 3], [n], [n, 1]) for n in range(5)]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        alone = [sample_all(logits[n : n + 1], [inputs[n]])[0] for n in range(5)]
        assert sample_all(logits, inputs) == alone
        tokens = [7, 70_000, 0, 3, 9]
        staging = Staging(logits.device)
        scores = [score(logits[n : n + 1], tokens[n : n + 1], 2, staging)[0] for n in range(5)]
        assert score(logits, tokens, 2, staging) == scores
    finally:
        torch.set_num_threads(threads)


def test_which_of_equals_are_reported_depends_on_no_other_row():
    logits = torch.zeros(3, 300)
    inputs = [SamplingInput(SamplingParams(logprobs=n), [0], [0]) for n in (2, 0, 20)]
    alone = [sample_all(logits[:1], [each])[0] for each in inputs]
    assert sample_all(logits, inputs) == alone


# -- sampling -------------------------------------------------------------------------------


def test_a_draw_is_a_function_of_seed_and_step_alone():
    logits = torch.zeros(1000)
    first = [choose(logits, replace(WARM, seed=5), [0], [1] * n).token for n in range(20)]
    torch.manual_seed(99)
    torch.rand(7)
    for n in reversed(range(20)):  # Others draw in between, and the order is another.
        choose(logits, replace(WARM, seed=n), [3], [2])
        assert choose(logits, replace(WARM, seed=5), [0], [1] * n).token == first[n]


def test_a_draw_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    choose(torch.zeros(50), WARM, [0], [])
    assert torch.equal(torch.get_rng_state(), before)


def test_steps_and_seeds_draw_differently():
    logits = torch.zeros(10_000)
    assert len({choose(logits, WARM, [0], [1] * n).token for n in range(50)}) > 40
    assert len(sampled_of(logits, WARM, 50)) > 40


def test_any_integer_is_a_seed():
    for seed in (-1, -(2**63), 2**63, 2**64 - 1):
        choose(torch.zeros(5), replace(WARM, seed=seed), [0], [])


@pytest.mark.quick
@pytest.mark.parametrize("candidates", [1, 2, 1024])
@pytest.mark.parametrize(
    ("sampling", "chances"),
    [
        (WARM, [0.5, 0.3, 0.2]),
        (SamplingParams(temperature=0.5), [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]),
        (SamplingParams(temperature=1.0, top_p=0.7), [0.625, 0.375, 0]),
        (SamplingParams(temperature=1.0, top_k=2, min_p=0.1), [0.625, 0.375, 0]),
        (SamplingParams(temperature=1.0, min_p=0.65, top_p=0.9), [1, 0, 0]),
    ],
    ids=str,
)
def test_samples_follow_the_probabilities(
    sampling: SamplingParams, chances: list[float], candidates: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sampler, "CANDIDATES", candidates)
    inputs = [SamplingInput(replace(sampling, seed=s), [0], [0] * (s % 7 + 1)) for s in range(1500)]
    sampled = sample_all(from_chances(0.2, 0.5, 0.3).expand(1500, -1), inputs)
    counts = np.bincount([one.token for one in sampled], minlength=3)[[1, 2, 0]]
    expected = np.array(chances)
    assert (np.abs(counts / 1500 - expected) <= 4 * np.sqrt(expected * (1 - expected) / 1500)).all()


def test_steps_of_one_seed_draw_by_the_chances_too():
    inputs = [SamplingInput(WARM, [0], [0] * (n + 1)) for n in range(2000)]
    sampled = sample_all(from_chances(0.5, 0.3, 0.2).expand(2000, -1), inputs)
    counts = np.bincount([one.token for one in sampled])
    assert np.allclose(counts / 2000, [0.5, 0.3, 0.2], atol=0.04)


@pytest.mark.parametrize(
    "sampling",
    [
        WARM,
        pytest.param(SamplingParams(temperature=0.6), marks=pytest.mark.full),
        pytest.param(SamplingParams(temperature=2.0, top_k=9), marks=pytest.mark.full),
        pytest.param(SamplingParams(temperature=1.3, top_p=0.85), marks=pytest.mark.full),
        pytest.param(SamplingParams(temperature=1.0, min_p=0.1), marks=pytest.mark.full),
        SamplingParams(temperature=1.5, top_p=0.9, top_k=12, min_p=0.03),
    ],
    ids=str,
)
def test_samples_over_seeds_and_positions_pass_a_chi_square_test(sampling: SamplingParams):
    seeds, positions, width = 50, 60, 16
    logits = torch.randn(width, generator=torch.Generator().manual_seed(7))
    inputs = [
        SamplingInput(replace(sampling, seed=seed), [0], [0] * (1 + position))
        for seed in range(seeds)
        for position in range(positions)
    ]
    sampled = sample_all(logits.expand(len(inputs), -1), inputs)
    scaled = logits.double().numpy() / sampling.temperature
    kept = sorted(allowed(scaled, sampling))
    counts = np.bincount([one.token for one in sampled], minlength=width)
    assert counts.sum() == counts[kept].sum(), "nothing else comes"
    expected = softmax(scaled[kept]) * len(inputs)
    assert expected.min() > 5
    freedom = len(kept) - 1
    excess = ((counts[kept] - expected) ** 2 / expected).sum() - freedom
    assert abs(excess) < 4 * math.sqrt(2 * freedom)


def test_only_rows_with_limits_are_sampled_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sampler, "CANDIDATES", 1)
    kinds = (SamplingParams(), WARM, replace(WARM, top_p=0.9), SamplingParams(top_p=0.9), WARM)
    logits = torch.zeros(len(kinds), 50)
    inputs = [SamplingInput(kind, [0], [0]) for kind in kinds]
    batch = SamplingBatch(logits, inputs, Staging(logits.device))
    batch.keep_logits()
    logits.fill_(-torch.inf)
    sampled = batch.read()
    assert batch.resampled == [2]
    assert sampled == sample_all(torch.zeros(len(kinds), 50), inputs)


@pytest.mark.parametrize("candidates", [1, 2, 5, 30, 31])
def test_how_many_are_put_in_order_changes_nothing(
    candidates: int, monkeypatch: pytest.MonkeyPatch
):
    """Limits and samples that fall among the candidates, on the last of them and beyond."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(240, 32, generator=generator) * torch.rand(240, 1, generator=generator) * 6
    kinds = itertools.product(
        (0.0, 0.5, 1.0, 3.0), (0.1, 0.6, 0.95, 0.999, 1.0), (0, 1, 5, 31), (0.0, 0.02, 0.4)
    )
    inputs = [
        SamplingInput(SamplingParams(*kind, seed=n), [0], [0]) for n, kind in enumerate(kinds)
    ]
    wanted = sample_all(logits, inputs)
    monkeypatch.setattr(sampler, "CANDIDATES", candidates)
    assert sample_all(logits, inputs) == wanted


def test_temperature_sharpens_and_flattens():
    logits = row(0, 2, 4)
    assert sampled_of(logits, SamplingParams(temperature=0.05)) == {2}
    assert sampled_of(logits, SamplingParams(temperature=50.0)) == {0, 1, 2}


# -- noise ----------------------------------------------------------------------------------


def hashed(word: int) -> int:
    """splitmix64, as published."""
    word = (word + 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def test_noise_is_a_hash_of_seed_number_and_token():
    for seed, number in ((0, 0), (-1, 3), (2**63, 100_000), (12345, 7)):
        inputs = [SamplingInput(replace(WARM, seed=seed), [0], [0] * (1 + number))]
        word = hashed((hashed(seed % 2**64) + number) % 2**64) >> 11
        assert sampling_columns(inputs, 9)[4].tolist() == [word]
        tokens = [0, 1, 2, 151_935, 2**31]
        uniform = [((hashed(((word << 11) + t) % 2**64) >> 12) + 0.5) / 2**52 for t in tokens]
        found = gumbel_noise(torch.tensor(word, dtype=torch.float64), torch.tensor(tokens))
        assert found.tolist() == pytest.approx([-math.log(-math.log(u)) for u in uniform])


@pytest.mark.parametrize(("bits", "noise"), [(0, -math.log(53 * math.log(2))), (-1, 36.7368)])
def test_noise_is_finite(bits: int, noise: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sampler, "_splitmix64", lambda words: torch.full_like(words, bits))
    found = gumbel_noise(torch.tensor([1.0]).double(), torch.tensor([2]))
    assert found.tolist() == pytest.approx([noise], abs=1e-4)


def test_noise_is_gumbels():
    noise = gumbel_noise(torch.tensor([[3.0], [4.0]]).double(), torch.arange(100_000)).numpy()
    assert noise.mean(1) == pytest.approx(np.euler_gamma, abs=0.015)
    assert noise.var(1) == pytest.approx(math.pi**2 / 6, abs=0.04)
    assert abs(np.corrcoef(*noise)[0, 1]) < 0.01
    assert abs(np.corrcoef(noise[0, 1:], noise[0, :-1])[0, 1]) < 0.01


@pytest.mark.parametrize("change", [0.1, 0.4, 1.0])
def test_close_distributions_agree_nearly_as_often_as_any_method_can(change: float):
    generator = torch.Generator().manual_seed(8)
    target = torch.randn(50, generator=generator)
    draft = target + change * torch.randn(50, generator=generator)
    inputs = [SamplingInput(replace(WARM, seed=seed), [0], [0]) for seed in range(1500)]
    ours, theirs = (sample_all(one.expand(1500, -1), inputs) for one in (target, draft))
    agreed = sum(a.token == b.token for a, b in zip(ours, theirs, strict=True)) / 1500
    p, q = (softmax(one.double().numpy()) for one in (target, draft))
    distance = np.abs(p - q).sum() / 2
    error = 3 * math.sqrt(agreed * (1 - agreed) / 1500)
    assert (1 - distance) / (1 + distance) - error < agreed < 1 - distance + error
    assert agreed > 5 * (p * q).sum(), "independent samples agree so often"


@pytest.mark.parametrize("candidates", [4, 1024])
def test_a_draft_of_fewer_tokens_has_the_noise_of_the_targets(
    candidates: int, monkeypatch: pytest.MonkeyPatch
):
    """A column is sampled like the token that it is of, in whatever order columns are."""
    monkeypatch.setattr(sampler, "CANDIDATES", candidates)
    generator = torch.Generator().manual_seed(9)
    ids = torch.randperm(90, generator=generator)[:20]
    logits = torch.randn(60, 20, generator=generator) * 2
    wide = torch.full((60, 90), -torch.inf).index_copy_(1, ids, logits)
    kinds = (WARM, SamplingParams(), replace(WARM, top_k=3), SamplingParams(0.7, 0.5))
    inputs = [SamplingInput(replace(kinds[n % 4], seed=n), [0], [0]) for n in range(60)]
    columns = torch.from_numpy(sampling_columns(inputs, 20))
    found = ids[sample_columns(logits, columns, ids, None)].tolist()
    wanted = [one.token for one in sample_all(wide, inputs)]
    assert len({*wanted}) > 10
    # Top-p leaves more than four tokens over in some rows: none is ruled out there.
    same = [n for n in range(60) if n % 4 < 3 or candidates > 4]
    assert [found[n] for n in same] == [wanted[n] for n in same]


# -- what is ruled out ----------------------------------------------------------------------


@given(
    order=st.permutations(range(6)),
    top_k=st.integers(0, 8),
    top_p=st.sampled_from([0.01, 0.3, 0.55, 0.8, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.35, 0.7, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_exactly_what_the_limits_leave_comes(order, top_k, top_p, min_p):
    chances = np.array([0.26, 0.21, 0.17, 0.14, 0.12, 0.10])[list(order)]
    sampling = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    assert sampled_of(from_chances(*chances), sampling, 150) == allowed(np.log(chances), sampling)


def test_limits_apply_after_the_temperature():
    logits = from_chances(0.6, 0.3, 0.1)
    assert sampled_of(logits, SamplingParams(temperature=1.0, top_p=0.55)) == {0}
    assert sampled_of(logits, SamplingParams(temperature=10.0, top_p=0.55)) == {0, 1}


@pytest.mark.parametrize("top_p", [0.0, 1e-12])
def test_top_p_always_keeps_the_argmax(top_p):
    for logits in (row(0, 0, 9), row(-50, -60, -49.5), torch.arange(500).float() / 1e4):
        argmax = int(logits.argmax())
        assert sampled_of(logits, SamplingParams(temperature=1.0, top_p=top_p), 20) == {argmax}


def test_a_top_k_of_more_than_the_vocabulary_rules_nothing_out():
    assert sampled_of(torch.zeros(4), replace(WARM, top_k=100)) == {0, 1, 2, 3}


def test_of_equals_the_top_k_keeps_all_and_the_top_p_the_first():
    logits = row(0, 2, 1, 2, 2, 1)
    assert sampled_of(logits, replace(WARM, top_k=1)) == {1, 3, 4}
    assert sampled_of(logits, replace(WARM, top_k=4)) == {1, 2, 3, 4, 5}
    assert sampled_of(logits, replace(WARM, top_p=0.5)) == {1, 3}
    assert sampled_of(logits, replace(WARM, top_p=0.0)) == {1}


@pytest.mark.parametrize("candidates", [1, 2, 3])
def test_equals_beyond_the_candidates_are_kept_too(
    candidates: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sampler, "CANDIDATES", candidates)
    assert sampled_of(row(0, 2, 1, 2, 2, 1), replace(WARM, top_k=1)) == {1, 3, 4}


def test_what_is_impossible_never_comes():
    logits = row(-math.inf, 0, -math.inf, 0)
    assert sampled_of(logits, replace(WARM, temperature=90.0)) == {1, 3}
    assert choose(logits, SamplingParams(logprobs=2), [0], []).logprob == pytest.approx(
        -math.log(2)
    )


# -- penalties ------------------------------------------------------------------------------


def test_presence_counts_once_and_only_what_was_generated():
    sampling = SamplingParams(presence_penalty=1.5)
    assert choose(row(0, 1, 2), sampling, [2, 2], []).token == 2
    assert choose(row(0, 1, 2), sampling, [0], [2]).token == 1
    assert choose(row(0, -2, 1), sampling, [0], [2, 2, 2, 2]).token == 0
    assert choose(row(0, -2, 1.6), sampling, [0], [2, 2, 2, 2]).token == 2


def test_frequency_counts_every_time_and_only_what_was_generated():
    sampling = SamplingParams(frequency_penalty=0.5)
    assert choose(row(0, 1, 2), sampling, [2] * 9, []).token == 2
    assert choose(row(0, 1, 2), sampling, [0], [2]).token == 2
    assert choose(row(0, 1, 2), sampling, [0], [2, 0, 2, 2]).token == 1


def test_negative_penalties_ask_for_more_of_the_same():
    assert choose(row(0, 1), SamplingParams(presence_penalty=-2), [0], [0]).token == 0
    assert choose(row(0, 1), SamplingParams(frequency_penalty=-0.6), [0], [0, 0]).token == 0


def test_repetition_weakens_prompt_and_output_alike():
    sampling = SamplingParams(repetition_penalty=2.0)
    assert choose(row(3, 4, 1), sampling, [1], []).token == 0
    assert choose(row(3, 4, 1), sampling, [2], [1]).token == 0
    assert choose(row(3, 4, 1), sampling, [1, 1], [1, 1]).token == 0
    assert choose(row(1.9, 4, 1), sampling, [1, 1], [1, 1]).token == 1, "it counts only once"


def test_repetition_makes_negative_logits_more_negative():
    sampling = SamplingParams(repetition_penalty=2.0)
    assert choose(row(-1, -1.5), sampling, [0], []).token == 1
    assert choose(row(-1, -2.5), sampling, [0], []).token == 0


def test_penalties_add_up_repetition_first():
    sampling = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
    # 8 / 2 - 1 - 2 * 0.5 = 2, whichever way one comes to it.
    assert choose(row(8, 1.9), sampling, [1], [0, 0]).token == 0
    assert choose(row(8, 2.1, 2.1), sampling, [0], [0, 0]).token == 1


# -- logprobs -------------------------------------------------------------------------------


def test_logprobs_are_the_models_whatever_the_settings():
    logits = from_chances(0.5, 0.3, 0.2)
    penalised = SamplingParams(
        temperature=3.0, top_k=1, presence_penalty=9.0, repetition_penalty=9.0, logprobs=3
    )
    sampled = choose(logits, penalised, [0], [0])
    assert sampled.token != 0, "the penalties worked"
    assert sampled.logprob == pytest.approx(math.log([0.5, 0.3, 0.2][sampled.token]))
    assert [token for token, _ in sampled.top] == [0, 1, 2]
    assert [value for _, value in sampled.top] == pytest.approx(
        [math.log(c) for c in (0.5, 0.3, 0.2)]
    )


def test_as_many_logprobs_as_were_asked_for():
    logits = from_chances(0.1, 0.6, 0.3)
    assert choose(logits, SamplingParams(), [0], []).top == ()
    assert [t for t, _ in choose(logits, SamplingParams(logprobs=1), [0], []).top] == [1]
    assert [t for t, _ in choose(logits, SamplingParams(logprobs=2), [0], []).top] == [1, 2]


def test_more_logprobs_than_the_vocabulary_are_all_of_it():
    assert len(choose(row(1, 2, 3), SamplingParams(logprobs=20), [0], []).top) == 3


def test_the_logits_are_left_as_they_were():
    logits = row(1, 2, 3)
    sampling = SamplingParams(1.0, 0.5, 2, 0.5, 0, 1.0, 1.0, 2.0, 2)
    choose(logits, sampling, [0, 1], [1, 2])
    assert logits.tolist() == [1, 2, 3]


# -- biases and masks -------------------------------------------------------------------------

KINDS = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=6),
    SamplingParams(temperature=1.2, min_p=0.05, logprobs=2),
    SamplingParams(presence_penalty=1.0, logprobs=1),
)


def masks_of(allowed: list[set[int]], vocabulary: int) -> list[RowMask]:
    """Masks of rows that may sample these tokens."""
    words = np.zeros((len(allowed), vocabulary // 32 + 1), np.uint32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            words[row, token // 32] |= np.uint32(1 << token % 32)
    packed = torch.from_numpy(words.view(np.int32))
    return [RowMask(lambda: packed, row) for row in range(len(allowed))]


@pytest.mark.parametrize("candidates", [1024, 20, 4])
def test_a_mask_is_the_same_as_logits_of_minus_infinity(
    candidates: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sampler, "CANDIDATES", candidates)
    generator, rng = torch.Generator().manual_seed(8), np.random.default_rng(8)
    logits = torch.randn(72, 100, generator=generator) * 4
    ruled_out, masked = logits.clone(), [n for n in range(72) if n % 4]
    allowed = [
        {int(t) for t in rng.choice(100, rng.choice((1, 2, 9, 40)), replace=False)} for _ in masked
    ]
    masks = dict(zip(masked, masks_of(allowed, 100), strict=True))
    for n, tokens in zip(masked, allowed, strict=True):
        ruled_out[n, [t for t in range(100) if t not in tokens]] = -torch.inf
    inputs = [
        SamplingInput(replace(KINDS[n % 6], seed=n), [n], [n, 5], (), masks.get(n))
        for n in range(72)
    ]
    found = sample_all(logits, inputs)
    wanted = sample_all(ruled_out, [each._replace(mask=None) for each in inputs])
    assert [one.token for one in found] == [one.token for one in wanted]
    free = sample_all(logits, [each._replace(mask=None) for each in inputs])
    assert [one.top for one in found] == [one.top for one in free], "the model's own"
    shares = logits.double().log_softmax(-1)
    for one, own in zip(found, shares, strict=True):
        assert one.logprob == pytest.approx(own[one.token].item(), abs=1e-5)


def test_rows_with_few_allowed_tokens_are_sampled_once():
    """The candidates beyond these are ruled out: none of them could be kept."""
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(8))
    kinds = (replace(WARM, top_k=50), replace(WARM, min_p=0.1), replace(WARM, top_p=0.9), WARM)
    masks = masks_of([{5, 2999, 64}] * 4, 3000)
    inputs = [
        SamplingInput(kind, [0], [0], (), mask) for kind, mask in zip(kinds, masks, strict=True)
    ]
    batch = SamplingBatch(logits, inputs, Staging(logits.device))
    assert {one.token for one in batch.read()} <= {5, 2999, 64} and batch.resampled == []


def test_a_bias_is_added_to_logits_and_the_logprobs_stay_the_models():
    logits = row(1, 2, 3, 4)
    greedy = SamplingParams(logprobs=1, logit_bias=((1, 100.0),))
    found = choose(logits, greedy, [0], [])
    plain = choose(logits, SamplingParams(logprobs=1), [0], [])
    assert found.token == 1 and found.top == plain.top
    assert found.logprob == pytest.approx(logits.log_softmax(-1)[1].item())
    assert choose(logits, SamplingParams(logit_bias=((3, -100.0),)), [0], []).token == 2
    assert sampled_of(logits, replace(WARM, logit_bias=((3, -100.0), (0, -100.0)))) == {1, 2}
    assert sampled_of(logits, replace(WARM, logit_bias=((0, 100.0),))) == {0}


def test_a_bias_does_not_lift_what_a_mask_rules_out():
    sampling = SamplingParams(logit_bias=((3, 100.0), (1, -100.0)))
    inputs = [SamplingInput(sampling, [0], [0], (), *masks_of([{1}], 4))]
    assert sample_all(row(1, 2, 3, 4)[None], inputs)[0].token == 1


@pytest.mark.parametrize("bias", [-100.5, 101, math.nan, math.inf])
def test_a_bias_out_of_range_is_a_problem(bias: float):
    assert "logit_bias of token 7" in (SamplingParams(logit_bias=((7, bias),)).problem() or "")


# -- on a device ----------------------------------------------------------------------------


@pytest.mark.parametrize("candidates", [1, 5, 30])
def test_the_kernel_samples_the_same(candidates: int, device: torch.device):
    from kvtide.layers.kernels.sampling import sample_candidates

    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(90, 40, generator=generator) * torch.rand(90, 1, generator=generator) * 6
    kinds = itertools.product((0.3, 1.0, 3.0), (0.1, 0.8, 1.0), (0, 3, 7, 35), (0.0, 0.05))
    inputs = [
        SamplingInput(SamplingParams(*kind, seed=n), [0], [0]) for n, kind in enumerate(kinds)
    ]
    logits, columns = logits[: len(inputs)], torch.from_numpy(sampling_columns(inputs, 40))
    logits[::3, 4:] = -torch.inf  # Ruled out by a grammar.
    facts = sampler._greedy(logits, columns[0], None)
    values, tokens = logits.topk(candidates)
    limits = Limits(*columns[..., None])
    wanted = sampler._sample_candidates(values.double(), tokens, facts, limits, 40)
    found = sample_candidates(*(each.to(device) for each in (values, tokens, facts, columns)))
    assert torch.equal(found.cpu(), wanted)
    assert candidates == 1 or (wanted.min() == -1 and wanted.max() > 1)


def test_kernels_sample_drafts_as_torch_does(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """Greedy rows, rows with limits and rows without, over some tokens of the target."""
    from kvtide.layers.kernels import host_copy, sampling

    monkeypatch.setattr(sampler, "CANDIDATES", 6)
    kernels = DeviceKernels(
        *(host_copy.host_copy, sampling.greedy, sampling.sample_rows),
        *(sampling.sample_candidates, sampling.mask_logits),
    )
    generator = torch.Generator().manual_seed(10)
    ids = torch.randperm(500, generator=generator)[:70]
    logits = torch.randn(32, 70, generator=generator) * 3
    kinds = (WARM, SamplingParams(), replace(WARM, top_k=3), SamplingParams(0.7, 0.8))
    inputs = [SamplingInput(replace(kinds[n % 4], seed=n), [0], [0]) for n in range(32)]
    columns = torch.from_numpy(sampling_columns(inputs, 70))
    wanted = sample_columns(logits, columns, ids, None)
    found = sample_columns(*(each.to(device) for each in (logits, columns, ids)), kernels)
    assert found.tolist() == wanted.tolist()
    assert wanted[1::4].tolist() == logits[1::4].argmax(-1).tolist()


def test_a_device_chooses_what_the_cpu_chooses(device: torch.device):
    if device.type != "cuda":
        pytest.skip("this compares with the CPU: --device cuda")
    kinds = [
        SamplingParams(logprobs=5),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.1),
        SamplingParams(temperature=1.2, min_p=0.05, logprobs=2),
        SamplingParams(presence_penalty=1.0, frequency_penalty=0.2),
        SamplingParams(temperature=4.0, top_p=0.95),
    ]
    logits = torch.randn(63, 151_936, generator=torch.Generator().manual_seed(4)) * 3
    inputs = [SamplingInput(replace(kinds[n % 7], seed=n), [n, 5], [n, 5, 8, 8]) for n in range(63)]
    found, wanted = sample_all(logits.to(device), inputs), sample_all(logits, inputs)
    # A draw may fall on a border, which another order of sums moves a little.
    assert sum(a.token == b.token for a, b in zip(found, wanted, strict=True)) >= 62
    for ours, theirs in zip(found, wanted, strict=True):
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        if ours.token == theirs.token:
            assert ours.logprob == pytest.approx(theirs.logprob, abs=2e-5)
    tokens = [n * 17 for n in range(63)]
    here = score(logits, tokens, 1, Staging(logits.device))
    there = score(logits.to(device), tokens, 1, Staging(device))
    for ours, theirs in zip(there, here, strict=True):
        assert ours.token == theirs.token
        assert ours.logprob == pytest.approx(theirs.logprob, abs=2e-5)


@pytest.mark.parametrize("width", [5, 32, 4097])
def test_the_kernel_masks_as_torch_does(width: int, device: torch.device):
    from kvtide.layers.kernels.sampling import mask_logits

    generator = torch.Generator().manual_seed(9)
    bits = (2**32 * torch.rand(3, width // 32 + 1, dtype=torch.float64, generator=generator)).long()
    words = torch.from_numpy(bits.numpy().astype(np.uint32).view(np.int32))
    wanted, rows = torch.randn(7, width, generator=generator), torch.tensor([5, 0, 2])
    found = wanted.to(device, copy=True)
    token_mask.mask_logits(wanted, words, rows)
    mask_logits(found, words.to(device), rows.to(device))
    assert torch.equal(found.cpu(), wanted) and wanted.isinf().any() and not wanted.isinf().all()
    assert not wanted[[1, 3, 4, 6]].isinf().any()
