"""How many requests run at once, where no setting says it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from kvtide.cache import Bytes, CacheConfig, Tokens
from kvtide.cache.rank_agreement import Alone
from kvtide.engine.graphs.step_graphs import decode_batches
from kvtide.server.settings import Settings
from kvtide.server.setup.batch_setup import choose_batch
from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec, Reuse
from kvtide.spec.residency import served_hot

PAGE = 64
ENTRY = Entry((Field("kv", (64,), DType.BF16),))
HISTORY = ModelMemory("m", PAGE, (PoolSpec("kv", (0,), ENTRY),), layers=1)
STATES = ModelMemory(
    "m",
    PAGE,
    (
        PoolSpec("kv", (0,), ENTRY),
        PoolSpec("state", (1,), ENTRY, tail_entries=1, reuse=Reuse(1, stride=PAGE)),
    ),
    layers=2,
)
SELECTED = ModelMemory(
    "m",
    PAGE,
    (
        PoolSpec("latents", (0,), ENTRY, selected=16),
        PoolSpec("keys", (0,), ENTRY, follows="latents"),
    ),
    layers=1,
)
HOT = served_hot(SELECTED, 4096)
TOKEN_BYTES = 128


class Sized(NamedTuple):
    """What is asked of a model."""

    memory: ModelMemory
    vocabulary: int = 1000
    max_positions: int = 1 << 20


class Other(Alone):
    """Another rank has less."""

    def all_min(self, values: Any) -> list[int]:
        return [min(value, 70) for value in values]


def chosen(model: Sized, size: Tokens | Bytes, agreement: Any = None, **settings: Any) -> int:
    made: Any = model
    config = CacheConfig(size, tokens_per_checkpoint=1024)
    found = choose_batch(Settings(**settings), made, config, agreement or Alone())
    assert f"up to {found.requests} requests run at once" in found.sentence
    return found.requests


@pytest.mark.parametrize(
    ("tokens", "requests"),
    [(64, 64), (16_384, 64), (100 * 256, 100), (255 * 256 + 192, 255), (1 << 20, 256)],
)
def test_as_many_run_as_the_device_tier_holds_within_bounds(tokens: int, requests: int) -> None:
    assert chosen(Sized(HISTORY), Tokens(tokens)) == requests
    sized = Bytes(-(-tokens // PAGE) * PAGE * TOKEN_BYTES)
    assert chosen(Sized(HISTORY), sized) == requests


def test_states_have_slots_for_fewer_requests() -> None:
    """A checkpoint per 1,024 tokens, and three states per running request."""
    assert chosen(Sized(STATES), Tokens(300 * 1024)) == 100
    assert chosen(Sized(HISTORY), Tokens(300 * 1024)) == 256


def test_what_is_asked_for_is_not_changed() -> None:
    assert chosen(Sized(HISTORY), Tokens(64), max_running=500) == 500
    assert chosen(Sized(HISTORY), Tokens(1 << 20), max_running=1) == 1


def test_no_more_run_than_a_step_has_tokens() -> None:
    assert chosen(Sized(HISTORY), Tokens(1 << 20), chunk_tokens=48) == 48


def test_all_ranks_choose_what_the_smallest_holds() -> None:
    assert chosen(Sized(HISTORY), Tokens(1 << 20), agreement=Other()) == 70


def test_a_gpus_logits_take_a_small_part_of_what_its_tier_does() -> None:
    """100 rows of a vocabulary of 100,000 in fp32 are 40 MB, a sixty-fourth of 2.56 GB."""
    model, size = Sized(HISTORY, 100_000), Bytes(100 * 64 * 400_000)
    assert chosen(model, size, device="cuda") == 100
    assert chosen(model, size) == 256, "on a CPU they are in the host's memory"
    assert chosen(model, Bytes(10 * 64 * 400_000), device="cuda") == 64


def test_hot_buffers_are_allocated_for_64_requests_or_for_those_that_fit() -> None:
    """A request of 32,768 tokens has its keys in pages, and 4,096 entries in its hot buffer."""
    each = (32_768 + 4096) * TOKEN_BYTES
    assert chosen(Sized(HOT), Bytes(1000 * each)) == 64
    assert 5 <= chosen(Sized(HOT), Bytes(11 * each)) <= 10, "a layer is gathered beside them"
    assert chosen(Sized(HOT), Bytes(1)) == 1
    assert chosen(Sized(HOT), Tokens(64)) == 64


def test_hot_buffers_of_a_short_model_are_for_requests_as_long_as_it_has() -> None:
    """Of 4,096 tokens: their keys are as large as the hot buffer. A layer is gathered beside."""
    each = (4096 + 4096) * TOKEN_BYTES
    assert chosen(Sized(HOT), Bytes(11 * each)) < 5
    assert 5 <= chosen(Sized(HOT, max_positions=4096), Bytes(11 * each)) <= 10


def test_the_largest_default_batch_has_half_as_many_graphs_again() -> None:
    """Each is captured for every maximum length when the server starts."""
    sizes = {count: [*decode_batches(count)] for count in (64, 256)}
    assert (len(sizes[64]), len(sizes[256])) == (11, 17)
    assert sizes[256][-1] == 256 and sizes[256] == sorted({*sizes[256]})
