"""What an indexer chooses as kernels is what `layers.reference.indexer.select` chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvtide.layers.forward import Place
from kvtide.layers.kernels.attention import indexer
from kvtide.layers.kernels.attention.indexer import select_entries
from kvtide.layers.reference.indexer import select
from kvtide.spec import ModelMemory, PoolSpec
from kvtide.spec.families.pool_parts import KVDType, scaled
from tests.layers.kernels.filled import Filled, Sequences, written
from tests.layers.kernels.repeating import same_again

PAGE = 16
STEPS: dict[str, Sequences] = {
    "prompts": [(0, 35), (0, 3)],
    "decoding": [(70, 1), (16, 1), (3, 1)],
    "verifying": [(70, 4), (16, 3), (30, 6), (9, 1)],
    "all at once": [(45, 1), (0, 5), (33, 9)],
}


def a_step(
    step: Sequences, ratio: int, dim: int, device: torch.device, dtype: torch.dtype, kv: KVDType
) -> tuple[Filled, Place, list[Tensor]]:
    """A step, and every sequence's keys as they read back."""
    pool = PoolSpec("index", (0,), scaled("index_key", dim, kv), tokens_per_entry=ratio)
    memory = ModelMemory("test", PAGE if ratio <= PAGE else ratio, (pool,), layers=1)
    filled = Filled(memory, step, device, dtype)
    return filled, Place(pool, 0), written(filled, Place(pool, 0), "index_key")[0]


def mask_of(filled: Filled, chosen: Tensor, keys: list[Tensor]) -> list[Tensor]:
    """As `select` gives it, of numbers that stand in order and before every -1."""
    masks = []
    for rows, ours in zip(filled.run.sequences, keys, strict=True):
        mask = torch.zeros(rows.end - rows.start, len(ours), dtype=torch.bool)
        for row, numbers in zip(mask, chosen[rows.start : rows.end].tolist(), strict=True):
            there = [number for number in numbers if number >= 0]
            assert numbers[: len(there)] == there == sorted(set(there))
            row[there] = True
        masks.append(mask)
    return masks


def plainly(
    filled: Filled, keys: list[Tensor], ratio: int, queries: Tensor, weights: Tensor, count: int
) -> list[Tensor]:
    masks = []
    for rows, ours in zip(filled.run.sequences, keys, strict=True):
        new = slice(rows.start, rows.end)
        visible = (filled.run.positions[new] + 1) // ratio
        masks.append(select(queries[new], weights[new], ours, visible, count, 256).cpu())
    return masks


def asked_again(
    filled: Filled, place: Place, queries: Tensor, weights: Tensor, count: int
) -> Tensor:
    """What is chosen: every time the same, by the same scores."""
    batch, given = filled.run.batch, (filled.run, place, queries, weights)
    max_entries = (batch.bounds.max_past + batch.bounds.longest) // place.pool.tokens_per_entry

    def scored() -> Tensor:
        scores = torch.full((filled.tokens, max_entries), -torch.inf, device=filled.device)
        indexer.score_entries(*given, scores, 0)
        return scores

    same_again(scored)
    return same_again(lambda: select_entries(*given, count))


@pytest.fixture
def _unscored_is_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out of the scores is not chosen, and shows where it should be."""
    scored = indexer.score_entries

    def score(*given: Any) -> None:
        given[4].fill_(-torch.inf)
        scored(*given)

    monkeypatch.setattr(indexer, "score_entries", score)


@pytest.mark.quick
@pytest.mark.usefixtures("_unscored_is_worst")
@pytest.mark.parametrize("kv", [KVDType.FP32, KVDType.FP8], ids=lambda kind: kind.value)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("ratio", [1, 4])
def test_the_kernels_choose_what_torch_chooses(
    ratio: int, step: str, kv: KVDType, device: torch.device
) -> None:
    filled, place, keys = a_step(STEPS[step], ratio, 24, device, torch.float32, kv)
    queries, weights = filled.some(filled.tokens, 3, 24), filled.some(filled.tokens, 5)[:, 1:4]
    count = 12 // ratio
    chosen = same_again(lambda: select_entries(filled.run, place, queries, weights, count))
    assert chosen.shape == (filled.tokens, count) and chosen.dtype == torch.int32
    wanted = plainly(filled, keys, ratio, queries, weights, count)
    for found, mask in zip(mask_of(filled, chosen, keys), wanted, strict=True):
        assert torch.equal(found, mask)


@pytest.mark.quick
@pytest.mark.usefixtures("_unscored_is_worst")
@pytest.mark.parametrize("heads", [2, 40])
@pytest.mark.parametrize("step", ["verifying", "all at once"])
def test_queries_are_taken_a_few_at_a_time(
    step: str, heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many heads a block of few queries has one, and the blocks are the step's rows."""
    monkeypatch.setattr(indexer, "MAX_SCORES", 4 * 46)
    monkeypatch.setattr(indexer, "QUERY_BLOCK", 4)
    filled, place, keys = a_step(STEPS[step], 1, 16, device, torch.float32, KVDType.FP32)
    queries, weights = filled.some(filled.tokens, heads, 16), filled.some(filled.tokens, heads)
    chosen = select_entries(filled.run, place, queries, weights, 9)
    wanted = plainly(filled, keys, 1, queries, weights, 9)
    for found, mask in zip(mask_of(filled, chosen, keys), wanted, strict=True):
        assert torch.equal(found, mask)


@pytest.mark.parametrize("tile", [16, indexer.TILE])
def test_of_equals_the_first_is_taken(
    tile: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of small whole numbers: sums are exact in any order, and many are equal."""
    monkeypatch.setattr(indexer, "TILE", tile)
    monkeypatch.setattr(indexer, "_MIN_TILE", tile)
    monkeypatch.setattr(indexer, "MIN_TILES_OF_TOP_K", 2)
    filled, place, _ = a_step([(90, 1), (40, 9)], 1, 16, device, torch.float32, KVDType.FP32)
    view = filled.buffers.view("index", 0)["index_key"]
    generator = torch.Generator().manual_seed(2)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).float().to(device)

    view.copy_(whole(*view.shape))
    queries, weights = whole(filled.tokens, 2, 16), whole(filled.tokens, 2)
    at = [rows.slots["index"] for rows in filled.run.sequences]
    keys = [
        view[slots].flatten(0, 1)[: rows.total]
        for slots, rows in zip(at, filled.run.sequences, strict=True)
    ]
    chosen = select_entries(filled.run, place, queries, weights, 30)
    wanted = plainly(filled, keys, 1, queries, weights, 30)
    for found, mask in zip(mask_of(filled, chosen, keys), wanted, strict=True):
        assert torch.equal(found, mask)


@pytest.mark.quick(count=[7])
@pytest.mark.usefixtures("_unscored_is_worst")
@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("step", STEPS)
def test_a_choice_is_made_in_several_rounds(
    step: str, count: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer, "TILE", 4)
    monkeypatch.setattr(indexer, "_MIN_TILE", 4)
    monkeypatch.setattr(indexer, "MIN_TILES_OF_TOP_K", 2)
    assert list(indexer._tiles_per_round(71, 4, 1)) == [18, 5, 2, 1]
    filled, place, keys = a_step(STEPS[step], 1, 16, device, torch.float32, KVDType.FP32)
    queries, weights = filled.some(filled.tokens, 2, 16), filled.some(filled.tokens, 2)
    chosen = select_entries(filled.run, place, queries, weights, count)
    wanted = plainly(filled, keys, 1, queries, weights, count)
    for found, mask in zip(mask_of(filled, chosen, keys), wanted, strict=True):
        assert torch.equal(found, mask)


def test_nothing_is_scored_where_all_is_seen(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("scored")

    monkeypatch.setattr(indexer, "score_entries", refused)
    filled, place, keys = a_step(STEPS["all at once"], 4, 16, device, torch.float32, KVDType.FP32)
    queries, weights = filled.some(filled.tokens, 2, 16), filled.some(filled.tokens, 2)
    chosen = select_entries(filled.run, place, queries, weights, 600)
    wanted = plainly(filled, keys, 4, queries, weights, 600)
    for found, mask in zip(mask_of(filled, chosen, keys), wanted, strict=True):
        assert torch.equal(found, mask)


@pytest.mark.parametrize("kv", [KVDType.BF16, KVDType.FP8], ids=lambda kind: kind.value)
@pytest.mark.parametrize(
    "step",
    [[(20000, 1), (700, 1)], [(20000, 4), (700, 7), (5000, 1)], [(9000, 1), (0, 3000), (6000, 70)]],
    ids=str,
)
@pytest.mark.parametrize(("ratio", "count"), [(4, 512), (1, 2048)])
def test_published_indexers_in_half_precision(
    ratio: int, count: int, step: Sequences, kv: KVDType, device: torch.device
) -> None:
    """Sums have another order, so what is chosen differs where scores are all but equal."""
    if device.type != "cuda":
        pytest.skip("an interpreter would take minutes: --device cuda")
    filled, place, keys = a_step(step, ratio, 128, device, torch.bfloat16, kv)
    queries, weights = filled.some(filled.tokens, 64, 128), filled.some(filled.tokens, 64)
    chosen = asked_again(filled, place, queries, weights, count)
    wanted = plainly(filled, keys, ratio, queries, weights, count)
    for found, mask in zip(mask_of(filled, chosen, keys), wanted, strict=True):
        assert torch.equal(found.sum(1), mask.sum(1))
        assert (found != mask).sum() <= 1e-3 * mask.sum()


@pytest.mark.parametrize("kv", [KVDType.BF16, KVDType.FP8], ids=lambda kind: kind.value)
@pytest.mark.parametrize(("ratio", "count"), [(4, 512), (1, 2048)])
def test_many_sequences_have_the_same_choice_every_time(
    ratio: int, count: int, kv: KVDType, device: torch.device
) -> None:
    """So many that a kernel goes over several tiles of keys."""
    if device.type != "cuda":
        pytest.skip("an interpreter would take minutes: --device cuda")
    step = [(4000 + 50 * number, 1) for number in range(96)]
    filled, place, _ = a_step(step, ratio, 128, device, torch.bfloat16, kv)
    queries, weights = filled.some(filled.tokens, 64, 128), filled.some(filled.tokens, 64)
    asked_again(filled, place, queries, weights, count)
