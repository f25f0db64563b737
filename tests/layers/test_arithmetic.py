"""Arithmetic: the two orders of sums agree, and the deterministic one finds out what it may do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvtide.layers.backend.arithmetic import (
    TILE_ROWS,
    Batched,
    Deterministic,
    gemm_rows_stand_alone,
    rows_stand_alone,
)
from kvtide.layers.backend.kernel_args import AttentionParams, ExpertGroup, Routing
from kvtide.layers.elementwise import gelu_tanh, rms_norm, softplus, swish
from kvtide.layers.reference.attention import attend
from kvtide.layers.reference.moe_experts import mix
from kvtide.layers.reference.ssd_scan import ScanInput, scan_chunks, scan_tokens
from kvtide.layers.tensor_ranks import ALONE


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_no_later_gemm_has_torch_take_another_library() -> None:
    Deterministic()
    before = torch._C._get_mkldnn_enabled()
    for dtype in (torch.bfloat16, torch.float16):
        for rows, inner, columns in ((1, 64, 64), (16, 64, 48), (90, 512, 256)):
            functional.linear(random(rows, inner).to(dtype), random(columns, inner).to(dtype))
    assert torch._C._get_mkldnn_enabled() == before


# -- GEMMs by tiles ----------------------------------------------------------------------------


def shows_the_company(x: Tensor, weight: Tensor) -> Tensor:
    """A GEMM whose rows depend on each other, as no machine's should."""
    return functional.linear(x, weight) + (x.sum() * 1e-3 if len(x) > 1 else 0)


def shows_the_place(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x, weight) + torch.arange(len(x))[:, None] * 1e-3


@pytest.mark.parametrize("gemm", [shows_the_company, shows_the_place])
def test_a_gemm_whose_rows_depend_on_each_other_is_found_out(gemm) -> None:
    assert not gemm_rows_stand_alone(gemm, random(24, 40), TILE_ROWS)
    assert gemm_rows_stand_alone(gemm, random(24, 40), 1)


@pytest.mark.parametrize("gemm", [functional.linear, shows_the_company, shows_the_place])
def test_rows_are_the_same_bits_in_any_company(gemm) -> None:
    """Where the machine's GEMM cannot do it, tiles have one row."""
    arithmetic = Deterministic(gemm)
    x, weight, bias = random(50, 40), random(24, 40), random(24)
    whole = arithmetic.linear(x, weight, bias)
    assert torch.allclose(whole, functional.linear(x, weight, bias), atol=1e-4)
    for start, end in ((0, 1), (3, 20), (49, 50), (16, 48)):
        assert torch.equal(arithmetic.linear(x[start:end], weight, bias), whole[start:end])
    assert arithmetic.tile_rows(weight) == (TILE_ROWS if gemm is functional.linear else 1)


def test_a_linear_layer_of_no_rows_has_no_rows() -> None:
    assert Deterministic().linear(random(0, 40), random(24, 40)).shape == (0, 24)


# -- functions of rows ---------------------------------------------------------------------------


def test_a_function_that_counts_rows_is_found_out() -> None:
    assert rows_stand_alone(swish)
    assert not rows_stand_alone(lambda rows: rows * len(rows))


def test_where_functions_of_rows_do_not_stand_alone_rows_are_taken_one_by_one() -> None:
    arithmetic = Deterministic()
    arithmetic._rows_together = False
    assert torch.equal(arithmetic.rowwise(lambda x: x * len(x), random(5, 3)), random(5, 3))


@pytest.mark.parametrize(
    ("mine", "torchs"),
    [
        (swish, functional.silu),
        (gelu_tanh, lambda x: functional.gelu(x, approximate="tanh")),
        (softplus, functional.softplus),
        (
            lambda x: rms_norm(x, torch.full((48,), 1.5), 1e-6),
            lambda x: functional.rms_norm(x, (48,), torch.full((48,), 1.5, dtype=x.dtype), 1e-6),
        ),
    ],
    ids=["swish", "gelu", "softplus", "norm"],
)
def test_elementary_functions_are_torchs(mine, torchs) -> None:
    for scale in (0.01, 1.0, 30.0, 200.0):
        x = random(32, 48) * scale
        torch.testing.assert_close(mine(x), torchs(x), rtol=2e-6, atol=1e-6)
        narrow = x.bfloat16()
        torch.testing.assert_close(mine(narrow), torchs(narrow), rtol=2e-2, atol=1e-2)


# -- attention -----------------------------------------------------------------------------------


def naive_attention(queries: Tensor, keys: Tensor, values: Tensor, how: AttentionParams) -> Tensor:
    """As the formula is written, query by query and head by head."""
    out, past = torch.empty_like(queries), len(keys) - len(queries)
    each = queries.shape[1] // keys.shape[1]
    for t in range(len(queries)):
        first = 0 if how.window is None else max(0, past + t + 1 - how.window)
        for h in range(queries.shape[1]):
            seen = slice(first, past + t + 1)
            logits = keys[seen, h // each] @ queries[t, h] * how.scale
            sink = how.sinks[h].exp() if how.sinks is not None else 0
            weights = logits.exp() / (logits.exp().sum() + sink)
            out[t, h] = weights @ values[seen, h // each]
    return out


@pytest.mark.parametrize("block", [1, 4, 256])
@pytest.mark.parametrize("window", [None, 2, 9, 500])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_is_the_formula(block: int, window: int | None, sinks: bool) -> None:
    queries, keys, values = random(13, 6, 8), random(31, 2, 8, seed=1), random(31, 2, 8, seed=2)
    how = AttentionParams(0.4, window, random(6) if sinks else None)
    got = attend(queries, keys, values, how, block)
    torch.testing.assert_close(got, naive_attention(queries, keys, values, how))


def test_a_window_counts_the_query_itself() -> None:
    assert [AttentionParams(1.0, 6).first_seen(position) for position in (0, 5, 6, 9)] == [
        0,
        0,
        1,
        4,
    ]
    assert AttentionParams(1.0).first_seen(99) == 0


# -- recurrence ----------------------------------------------------------------------------------


def scan_input(tokens: int) -> ScanInput:
    decay = -torch.tensor([8.0, 0.01, 1.0, 0.3])
    dt = random(tokens, 4, seed=2).exp()
    b, c = (random(tokens, 2, 6, seed=seed) for seed in (3, 4))
    return ScanInput(random(tokens, 4, 5), dt, decay, b, c)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])
def test_the_two_scans_agree(tokens: int) -> None:
    before = random(4, 5, 6, seed=9)
    outputs, state = scan_tokens(scan_input(tokens), before)
    together, end = scan_chunks(scan_input(tokens), before)
    torch.testing.assert_close(together, outputs, rtol=1e-5, atol=1e-5 * float(outputs.std()))
    torch.testing.assert_close(end, state, rtol=1e-5, atol=1e-5 * float(state.std()))


@pytest.mark.parametrize("arithmetic", [Batched(), Deterministic()], ids=["batched", "determined"])
def test_a_scan_goes_on_from_its_state(arithmetic: Batched | Deterministic) -> None:
    tokens, state = scan_input(100), torch.zeros(4, 5, 6)
    scan = arithmetic.order(scan_chunks, scan_tokens)
    whole, end = scan(tokens, state)
    parts = []
    for start, stop in ((0, 1), (1, 70), (70, 100)):
        part, state = scan(tokens.span(start, stop), state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts), whole)
    torch.testing.assert_close(state, end)


# -- experts -------------------------------------------------------------------------------------


def test_a_tokens_experts_are_added_in_one_order_in_any_company() -> None:
    x, weights = random(20, 8), random(5, 8, 8)
    chosen = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:3]
                          for i in range(20)])  # fmt: skip
    shares = random(20, 3).softmax(-1)
    arithmetic = Deterministic()

    def run(rows: slice) -> Tensor:
        routing = Routing(chosen[rows], shares[rows])
        group = ExpertGroup(range(len(weights)), ALONE)
        return mix(group, x[rows], routing, lambda e, some: arithmetic.linear(some, weights[e]))

    whole = run(slice(0, 20))
    formula = torch.stack(
        [sum(shares[t, r] * (weights[chosen[t, r]] @ x[t]) for r in range(3)) for t in range(20)]
    )
    torch.testing.assert_close(whole, formula)
    assert all(torch.equal(run(slice(t, t + 1)), whole[t : t + 1]) for t in range(20))
