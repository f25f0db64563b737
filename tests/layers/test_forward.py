"""A forward pass's state: written where pages have slots, read only where they have, as kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtide.layers import ForwardPass, Place, Rows, Step
from kvtide.layers.reference.kv_write import kv_write
from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec, Reuse, SpecError
from kvtide.tiers import Arrangement, Buffers, Layout

HISTORY = PoolSpec("kv", (0,), Entry((Field("k", (2,), DType.BF16),)))
WINDOW = PoolSpec("swa", (1,), Entry((Field("k", (2,), DType.FP32),)), reuse=Reuse(reach=5))
STATE = PoolSpec(
    "state",
    (0, 1),
    Entry((Field("sum", (3,), DType.FP32),)),
    tail_entries=1,
    reuse=Reuse(reach=1, stride=4),
)
MEMORY = ModelMemory("toy", 4, (HISTORY, WINDOW, STATE), 2)


@pytest.fixture
def buffers() -> Buffers:
    arrangement = Arrangement(MEMORY, {"kv": 8, "swa": 8, "state": 8}, Layout.PAGE_FIRST)
    return Buffers(arrangement, torch.full((arrangement.bytes,), 0xFF, dtype=torch.uint8))


def forward_pass(buffers: Buffers, *sequences: tuple[int, int, list[int]]) -> ForwardPass:
    """Of sequences with so much past, so many new tokens, and these slots in every anchor."""
    rows, positions = [], []
    for past, new, slots in sequences:
        tables = {anchor.name: torch.tensor(slots) for anchor in MEMORY.anchors}
        rows.append(Rows(len(positions), len(positions) + new, past, tables))
        positions += range(past, past + new)
    places = torch.tensor(positions)
    return ForwardPass(Step(places, places, tuple(rows), 4, buffers.view, lambda layer: None))


def test_entries_come_back_from_scattered_pages_in_order(buffers: Buffers) -> None:
    place = Place.holding("k", MEMORY, 0)
    written = torch.arange(22.0).view(11, 2)
    kv_write(forward_pass(buffers, (0, 11, [5, 2, 7])), place, {"k": written})
    run = forward_pass(buffers, (11, 1, [5, 2, 7]))
    for first in (0, 3, 4, 10):
        assert (
            run.read_entries(place, run.sequences[0], first)["k"].tolist()
            == written[first:].tolist()
        )


def test_each_sequence_of_a_step_is_written_to_its_own_pages(buffers: Buffers) -> None:
    place = Place.holding("k", MEMORY, 1)
    written = torch.arange(14.0).view(7, 2)
    kv_write(forward_pass(buffers, (2, 3, [0, 1]), (6, 4, [2, 3, 4])), place, {"k": written})
    held = buffers.view("swa", 1)["k"]
    where = [(0, 2), (0, 3), (1, 0), (3, 2), (3, 3), (4, 0), (4, 1)]
    assert [held[at].tolist() for at in where] == written.tolist()
    assert int(held.isfinite().all(-1).sum()) == len(where)


def test_tokens_whose_page_has_no_slot_are_not_written(buffers: Buffers) -> None:
    place = Place.holding("k", MEMORY, 0)
    kv_write(forward_pass(buffers, (0, 9, [-1, 6, -1])), place, {"k": torch.ones(9, 2)})
    held = buffers.view("kv", 0)["k"].isfinite().all(-1)
    assert held[6].all()
    assert int(held.sum()) == 4


def test_what_is_kept_is_returned_as_it_will_be_read(buffers: Buffers) -> None:
    place, fine = Place.holding("k", MEMORY, 0), torch.full((4, 2), 1.001)
    kept = kv_write(forward_pass(buffers, (0, 4, [3])), place, {"k": fine})["k"]
    run = forward_pass(buffers, (4, 1, [3, 4]))
    assert torch.equal(kept, run.read_entries(place, run.sequences[0], 0)["k"])
    assert torch.equal(run.rounded(place, "k", fine), kept.float())
    assert not torch.equal(kept.float(), fine)


def test_reading_a_page_that_is_not_resident_is_refused(buffers: Buffers) -> None:
    place = Place.holding("k", MEMORY, 1)
    run = forward_pass(buffers, (9, 1, [-1, 1, 2]))
    run.read_entries(place, run.sequences[0], 4)
    with pytest.raises(AssertionError, match=r"pool swa: tokens 3\.\.9 are needed"):
        run.read_entries(place, run.sequences[0], 3)


def test_a_running_state_is_read_after_the_past_and_written_after_the_last_token(
    buffers: Buffers,
) -> None:
    place = Place.holding("sum", MEMORY, 1)
    run = forward_pass(buffers, (0, 4, [3]), (0, 6, [-1, 5]))
    for number, rows in enumerate(run.sequences):
        assert run.read_state(place, rows) is None
        run.write_state(place, rows, {"sum": torch.full((3,), number + 1.0)})
    run = forward_pass(buffers, (4, 3, [3, 6]), (6, 1, [-1, 5]))
    for number, rows in enumerate(run.sequences):
        before = run.read_state(place, rows)
        assert before is not None and before["sum"].tolist() == [number + 1.0] * 3
        run.write_state(place, rows, {"sum": before["sum"] + 10})
    held = buffers.view("state", 1)["sum"][:, 0, 0]
    assert held[[3, 5, 6]].tolist() == [1.0, 12.0, 11.0]


def test_a_running_state_whose_page_has_no_slot_is_not_written_and_not_read(
    buffers: Buffers,
) -> None:
    place = Place.holding("sum", MEMORY, 0)
    run = forward_pass(buffers, (3, 3, [1, -1]))
    run.write_state(place, run.sequences[0], {"sum": torch.ones(3)})
    assert not buffers.view("state", 0)["sum"].isfinite().any()
    run = forward_pass(buffers, (6, 1, [1, -1]))
    with pytest.raises(AssertionError, match="pool state: no state after token 5"):
        run.read_state(place, run.sequences[0])


def test_a_place_knows_its_window() -> None:
    assert Place.holding("k", MEMORY, 0).window is None
    assert Place.holding("k", MEMORY, 1).window == 6
    with pytest.raises(SpecError, match="layer 1 has no pool with a field latent"):
        Place.holding("latent", MEMORY, 1)


def test_what_layers_share_is_computed_once(buffers: Buffers) -> None:
    run, asked = forward_pass(buffers, (0, 1, [0])), []

    def compute() -> Tensor:
        asked.append(1)
        return torch.ones(1)

    assert run.shared("angles", compute) is run.shared("angles", compute)
    assert asked == [1]
