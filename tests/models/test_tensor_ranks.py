"""Ranks that compute a model together, in threads: their logits, and what each of them keeps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier

import pytest
import torch
from torch import Tensor

from kvtide.engine.declared_state.reachable_tensors import tensors
from kvtide.layers.tensor_ranks import TensorRanks
from kvtide.models import build
from kvtide.spec import SpecError
from tests.engine.restoring import ALL_NAMES
from tests.models.playing import Player
from tests.models.test_stages import Asked
from tests.models.tiny import checkpoint, ours, prompt
from tests.proofs import Proves

TOKENS = 70


class Meeting:
    """Where so many ranks bring what is to be added up, or put side by side."""

    def __init__(self, count: int) -> None:
        self._barrier = Barrier(count, timeout=60)
        self._brought: list[Tensor | None] = [None] * count

    def parts(self, rank: int, part: Tensor) -> list[Tensor]:
        self._brought[rank] = part.clone()
        self._barrier.wait()
        parts = [brought for brought in self._brought if brought is not None]
        self._barrier.wait()
        return parts

    def leave(self) -> None:
        self._barrier.abort()


@dataclass(frozen=True, slots=True)
class Threads(TensorRanks):
    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def all_reduce(self, part: Tensor) -> Tensor:
        return torch.stack(self.meeting.parts(self.rank, part)).sum(0)

    def all_gather(self, columns: Tensor) -> Tensor:
        return torch.cat(self.meeting.parts(self.rank, columns), dim=-1)


def together(count: int) -> list[Threads]:
    meeting = Meeting(count)
    return [Threads(rank, count, meeting=meeting) for rank in range(count)]


@dataclass
class Ran:
    """What a rank computed, and its recurrent states by layer."""

    logits: Tensor
    states: dict[int, dict[str, Tensor]]


def run(name: str, ranks: TensorRanks) -> Ran:
    """Two chunks of a prompt, so that the second one reads what the first one kept."""
    try:
        player = Player(ours(name, ranks=ranks))
        sequence = player.begin(prompt(TOKENS))
        logits = player.step((sequence, 41)) + player.step((sequence, TOKENS - 41))
        pools = {pool.name: pool.layers for pool in player.memory.pools}
        layers = pools.get("state", ())
        states = {
            layer: {key: value[-1] for key, value in player.held(sequence, "state", layer).items()}
            for layer in layers
        }
        return Ran(torch.cat(logits), states)
    except BaseException:
        if isinstance(ranks, Threads):
            ranks.meeting.leave()
        raise


MORE = [
    ("qwen3_moe", 4),
    ("falcon_h1-groups-norm", 2),
    ("falcon_h1-groups-norm", 4),  # More ranks than groups: a norm over two ranks.
    ("granitemoehybrid-dense-rope-groups", 4),
    ("bamba-groups-whole-rotation", 2),
    ("nemotron_h-experts", 2),
    ("nemotron_h-latent-experts", 4),
    ("qwen3_next", 4),  # More ranks than key heads.
    ("qwen3_next-some-dense-whole-rotation", 2),
    ("lfm2-biases-long-kernel", 4),
    ("deepseek_v4-no-hash-other-shapes", 4),
]


@pytest.mark.quick(name=ALL_NAMES, count=[2])
@pytest.mark.parametrize(("name", "count"), [*((name, 2) for name in ALL_NAMES), *MORE])
def test_ranks_give_one_ranks_logits_and_keep_their_share_of_the_state(
    name: str, count: int, proves: Proves
) -> None:
    proves(name, "tp")
    alone = run(name, TensorRanks())
    with ThreadPoolExecutor(count) as pool:
        ran = list(pool.map(lambda ranks: run(name, ranks), together(count)))
    for rank, each in enumerate(ran):
        torch.testing.assert_close(each.logits, alone.logits, rtol=0, atol=1e-5)
        for layer, fields in alone.states.items():
            for key, whole in fields.items():
                part = each.states[layer][key]
                first = _first_row(rank, count, len(whole), len(part))
                wanted = whole[first : first + len(part)]
                torch.testing.assert_close(part, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_a_rank_keeps_no_more_of_a_weight_than_its_share(name: str) -> None:
    """A view of a whole weight would keep all of it."""
    model = ours(name, ranks=TensorRanks(0, 2))
    kept = {one.path: one.tensor for one in tensors(model, "model").values()}
    assert kept
    views = [path for path, one in kept.items() if one.untyped_storage().nbytes() > one.nbytes]
    assert views == []


@pytest.mark.parametrize(("name", "count"), [*((name, 2) for name in ALL_NAMES), *MORE])
def test_a_rank_reads_and_keeps_the_rows_of_its_own_tokens(name: str, count: int) -> None:
    """Of an embedding and a head; where tokens do not divide, the last rank has padding."""
    saved, whole = checkpoint(name), ours(name)
    assert whole.vocabulary % 2, "the last rank has fewer"
    each = -(-whole.vocabulary // count)
    tables = {"embedding": whole.embedding.weight, "head": whole.head.weight}
    for rank in range(count):
        asked = Asked(saved.weights)
        model = build(saved.config, asked, page_tokens=16, ranks=TensorRanks(rank, count))
        mine = range(rank * each, min(whole.vocabulary, (rank + 1) * each))
        for table, weight in tables.items():
            kept = getattr(model, table).weight
            assert len(kept) == each and not kept[len(mine) :].any()
            assert torch.equal(kept[: len(mine)], weight[mine.start : mine.stop])
        tied = model.embedding.weight.data_ptr() == model.head.weight.data_ptr()
        assert tied == (whole.embedding.weight.data_ptr() == whole.head.weight.data_ptr())
        assert list(asked.rows.values()) == [mine] * (1 if tied else 2)
        assert not asked.rows.keys() & asked.names


def _first_row(rank: int, count: int, whole: int, part: int) -> int:
    """Ranks that share a unit have the same rows."""
    return rank * (whole // part) // count * part


@pytest.mark.parametrize(
    ("name", "count", "says"),
    [
        ("falcon_h1", 16, "do not divide over 16 tensor ranks"),
        ("qwen3_next", 3, "do not divide over 3 tensor ranks"),
        ("lfm2", 5, "do not divide over 5 tensor ranks"),
        ("qwen3_next", 8, "do not divide over 8 tensor ranks; use at most 4 ranks"),
    ],
)
def test_ranks_that_cannot_share_a_model_are_refused(name: str, count: int, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        ours(name, ranks=TensorRanks(0, count))
