"""The gated delta rule: both orders of its sums are the definition, and states carry on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtide.layers.reference.gated_delta import DeltaInput, delta_chunks, delta_tokens

HEADS, KEYS, VALUES = 3, 8, 5

both_orders = pytest.mark.parametrize("recur", [delta_tokens, delta_chunks])
both_decays = pytest.mark.parametrize("channels", [1, KEYS], ids=["even", "by-channel"])


def some(count: int, channels: int, *, steepest: float = 0.2, seed: int = 3) -> DeltaInput:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(count, HEADS, *shape, generator=generator)

    query, key = (randn(KEYS) for _ in range(2))
    decay = torch.rand(count, HEADS, channels, generator=generator) * -steepest
    key = key / key.norm(dim=-1, keepdim=True)
    return DeltaInput(query, key, randn(VALUES), decay, randn().sigmoid())


def start(seed: int = 9) -> Tensor:
    return torch.randn(HEADS, KEYS, VALUES, generator=torch.Generator().manual_seed(seed))


def by_definition(tokens: DeltaInput, state: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, head by head, with the matrices written out."""
    outputs = torch.zeros(len(tokens.query), HEADS, VALUES, dtype=torch.float64)
    after = state.double().clone()
    for i in range(len(tokens.query)):
        for head in range(HEADS):
            key, beta = tokens.key[i, head].double(), tokens.beta[i, head].double()
            forget = torch.diag(tokens.log_decay[i, head].double().exp().expand(KEYS))
            erase = torch.eye(KEYS) - beta * torch.outer(key, key)
            written = beta * torch.outer(key, tokens.value[i, head].double())
            after[head] = erase @ forget @ after[head] + written
            outputs[i, head] = tokens.query[i, head].double() @ after[head]
    return outputs, after


@both_orders
@both_decays
@pytest.mark.parametrize("count", [1, 16, 64, 150])
def test_outputs_and_state_are_those_of_the_definition(recur, channels: int, count: int) -> None:
    tokens = some(count, channels)
    for got, wanted in zip(recur(tokens, start()), by_definition(tokens, start()), strict=True):
        assert got.dtype is torch.float32
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-5)


@both_orders
@both_decays
def test_a_state_that_is_carried_on_gives_what_the_whole_would(recur, channels: int) -> None:
    tokens, outputs, state = some(150, channels), [], start()
    for begin, end in ((0, 1), (1, 70), (70, 87), (87, 150)):
        output, state = recur(tokens.span(begin, end), state)
        outputs.append(output)
    whole, last = recur(tokens, start())
    torch.testing.assert_close(torch.cat(outputs), whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-5)


@both_decays
def test_token_by_token_a_cut_does_not_show_in_a_single_bit(channels: int) -> None:
    tokens = some(40, channels)
    first, state = delta_tokens(tokens.span(0, 13), start())
    second, state = delta_tokens(tokens.span(13, 40), state)
    whole, last = delta_tokens(tokens, start())
    assert torch.equal(torch.cat([first, second]), whole)
    assert torch.equal(state, last)


@both_orders
@both_decays
def test_heads_that_forget_almost_all_at_once_stay_finite(recur, channels: int) -> None:
    tokens = some(100, channels, steepest=300.0)
    for got, wanted in zip(recur(tokens, start()), by_definition(tokens, start()), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-5)
