"""Blocks of an engine's cache: planned, saved, looked up and loaded, without an engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from kvtide.integrations.block_moves import BlockMemory, BlockMoves
from kvtide.integrations.block_plan import BlockPlan, Chunk, Move
from kvtide.integrations.page_objects import PageObjects, PagePool, space_of
from kvtide.storage import StoreError

TOKENS, BLOCKS = 4, 16
MAX_S = 60.0


@dataclass
class Request:
    request_id: str
    num_tokens: int
    seed: int = 0
    hashes: int | None = None
    """Of so many blocks; None: of all whole ones."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        count = self.num_tokens // TOKENS if self.hashes is None else self.hashes
        return [bytes([self.seed, number]) * 16 for number in range(count)]


def caches(layout: str = "blocks", blocks: int = BLOCKS, seed: int = 0) -> dict[str, torch.Tensor]:
    """Two layers and one that shares with the first: blocks × heads × tokens × numbers."""
    rng = torch.Generator().manual_seed(seed)
    found = {}
    for name in ("0", "1"):
        match layout:
            case "blocks":
                found[name] = torch.rand(blocks, 2, TOKENS, 6, generator=rng)
            case "heads":
                found[name] = torch.rand(2, blocks, TOKENS, 6, generator=rng).transpose(0, 1)
            case "tokens":
                found[name] = torch.rand(blocks, TOKENS, 2, 6, generator=rng).transpose(1, 2)
            case "one storage":
                whole = torch.rand(blocks, 3, 2, TOKENS, 6, generator=rng)
                found[name] = whole[:, 1]
    return {**found, "shared": found["0"]}


@dataclass
class Engine:
    """A scheduler and a worker over one store, with requests in rows of blocks."""

    url: str
    seed: int = 0
    layout: str = "blocks"
    ranks: int = 1
    blocks: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.objects = PageObjects("test", self.url, space_of("test", "model", {}))
        self.tensors = caches(self.layout, seed=self.seed)
        memory = BlockMemory(self.tensors, BLOCKS)
        pools = [self.pool(memory, rank) for rank in range(self.ranks)]
        self.plan = BlockPlan(self.objects, TOKENS)
        self.plan.pools = pools
        self.moves = BlockMoves(self.objects, memory, pools[0])

    def pool(self, memory: BlockMemory, rank: int) -> PagePool:
        described = {"layers": memory.layers, "rank": rank}
        return self.objects.pool("block", memory.page_bytes, described)

    def found(self, request: Request, computed: int = 0) -> int:
        return waited(lambda: self.plan.found(request, computed))

    def allocate(self, request: Request, tokens: int = 0) -> None:
        used = sum(map(len, self.blocks.values()))
        count = -(-request.num_tokens // TOKENS)
        self.blocks[request.request_id] = list(range(used, used + count))
        self.plan.allocated(request, self.blocks[request.request_id], tokens)

    def step(self, *chunks: Chunk) -> tuple[list[Move], list[Move]]:
        loads, saves = self.plan.step(chunks, self.blocks.__getitem__)
        self.moves.load(loads)
        self.moves.save(saves)
        return loads, saves

    def prefill(self, request: Request) -> None:
        self.allocate(request)
        self.step(Chunk(request.request_id, 0, request.num_tokens))

    def finish(self, request: Request, computed: int | None = None) -> bool:
        known = request.request_id
        tokens = request.num_tokens if computed is None else computed
        return self.plan.finished(request, tokens, self.blocks[known])

    def ended(self, *finished: str) -> tuple[set[str], set[str]]:
        """As soon as there is something."""
        names = set(finished)

        def once() -> tuple[set[str], set[str]] | None:
            saved, loaded = self.moves.ended(names)
            names.clear()
            return (saved, loaded) if saved or loaded else None

        return waited(once)

    def close(self) -> None:
        self.moves.close()
        self.plan.close()
        self.objects.close()


def waited(ask: Callable[[], object]) -> object:
    deadline = time.monotonic() + MAX_S
    while (answer := ask()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return answer


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made = []

    def make(**options: object) -> Engine:
        made.append(Engine(f"memory:{tmp_path}", **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("layout", ["blocks", "heads", "tokens", "one storage"])
def test_blocks_come_back_in_another_engine(engine: Callable[..., Engine], layout: str) -> None:
    first, second = engine(layout=layout), engine(layout=layout, seed=1)
    request = Request("a", 18)
    assert first.found(request) == 0
    first.prefill(request)
    assert first.finish(request)
    assert first.ended("a") == ({"a"}, set())

    later = Request("b", 22)
    assert second.found(later) == 16
    second.allocate(Request("before", 8))
    second.allocate(later, 16)
    kept = {name: tensor.clone() for name, tensor in second.tensors.items()}
    second.step()
    assert second.ended() == (set(), {"b"})
    assert not second.moves.failed_blocks
    for name, tensor in second.tensors.items():
        assert torch.equal(tensor[2:6], first.tensors[name][:4])
        assert torch.equal(tensor[:2], kept[name][:2])
        assert torch.equal(tensor[6:], kept[name][6:])


def test_the_last_token_is_never_found(engine: Callable[..., Engine]) -> None:
    one = engine()
    one.prefill(Request("a", 16))
    one.moves.drain()
    assert one.found(Request("b", 16)) == 12
    assert one.found(Request("c", 17)) == 16
    assert one.found(Request("d", 17), 8) == 8
    assert one.found(Request("e", 17), 16) == 0
    assert one.found(Request("f", 17, seed=1)) == 0


def test_a_look_up_does_not_keep_the_scheduler_waiting(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, answers = engine(), threading.Event()
    one.prefill(Request("a", 16))
    one.moves.drain()
    exists = one.objects.store.exists

    def slow(keys: Sequence[bytes]) -> list[bool]:
        assert answers.wait(MAX_S)
        return exists(keys)

    monkeypatch.setattr(one.objects.store, "exists", slow)
    assert one.plan.found(Request("b", 16), 0) is None
    one.plan.finished(Request("b", 16), 0, [])
    assert one.plan.found(Request("c", 16), 4) is None
    answers.set()
    assert one.found(Request("c", 16), 4) == 8
    assert one.found(Request("c", 16), 0) == 12, "vLLM's cache may have lost a block meanwhile"


def test_a_block_is_found_if_all_ranks_have_their_parts(engine: Callable[..., Engine]) -> None:
    one = engine(ranks=2)
    one.prefill(Request("a", 16))
    one.moves.drain()
    assert one.found(Request("b", 16)) == 0
    other = BlockMoves(one.objects, BlockMemory(one.tensors, BLOCKS), one.plan.pools[1])
    other.save([Move("a", tuple(Request("a", 8).block_hashes), (0, 1))])
    other.close()
    assert one.found(Request("c", 16)) == 8


def test_blocks_are_saved_at_the_step_that_fills_them(engine: Callable[..., Engine]) -> None:
    one, request = engine(), Request("a", 10)
    one.allocate(request)
    assert one.step(Chunk("a", 0, 6)) == ([], [Move("a", tuple(request.block_hashes[:1]), (0,))])
    assert one.step(Chunk("a", 6, 4))[1] == [Move("a", tuple(request.block_hashes[1:]), (1,))]
    request.num_tokens, request.hashes = 12, 2
    one.blocks["a"].append(7)
    assert one.step(Chunk("a", 10, 2))[1] == [], "the engine learns the last token later"
    request.hashes = None
    assert one.step(Chunk("a", 12, 1))[1] == [Move("a", tuple(request.block_hashes[2:]), (2,))]


def test_the_last_blocks_are_saved_at_the_end(engine: Callable[..., Engine]) -> None:
    one, request = engine(), Request("a", 12, hashes=2)
    one.prefill(request)
    request.hashes, request.num_tokens = None, 13
    assert one.finish(request, 12)
    assert one.step()[1] == [Move("a", tuple(request.block_hashes[2:3]), (2,))]
    assert one.ended("a") == ({"a"}, set())
    assert one.found(Request("b", 13)) == 12


def test_a_request_without_saves_frees_its_blocks(engine: Callable[..., Engine]) -> None:
    one, request = engine(), Request("a", 3)
    one.prefill(request)
    assert not one.finish(request)
    assert one.moves.ended({"a"}) == (set(), set())


def test_blocks_that_are_there_are_not_written_again(engine: Callable[..., Engine]) -> None:
    one = engine()
    one.prefill(Request("a", 12))
    one.moves.drain()
    one.prefill(Request("b", 16))
    one.moves.drain()
    assert one.objects.counts["written"] == 4


def test_a_damaged_block_is_named_and_its_request_computes(engine: Callable[..., Engine]) -> None:
    first, second = engine(), engine(seed=1)
    first.prefill(Request("a", 16))
    first.moves.drain()
    stored, key = second.objects.store._objects, second.plan.pools[0].key(bytes([0, 2]) * 16)
    kept = stored[key]
    stored[key] = kept[:20] + bytes([kept[20] ^ 1]) + kept[21:]
    request = Request("b", 17)
    tokens = second.found(request)
    assert tokens == 16
    second.allocate(request, tokens)
    before = second.tensors["0"][2].clone()
    second.step()
    assert second.ended() == (set(), {"b"})
    assert second.moves.failed_blocks == {2}
    assert torch.equal(second.tensors["0"][2], before)
    second.plan.loaded({"b"}, second.moves.failed_blocks)
    assert second.plan.found(request, 0) == 0, "it would be found, and fail, for ever"
    second.step(Chunk("b", 8, 9))
    second.moves.drain()
    assert second.objects.counts["written"] == 1, "the damaged one is replaced"
    assert second.found(Request("c", 17)) == 16


def test_a_preempted_request_saves_again_from_where_it_resumes(
    engine: Callable[..., Engine],
) -> None:
    one, request = engine(), Request("a", 16)
    one.prefill(request)
    one.plan.allocated(request, one.blocks["a"], 0)
    assert one.step(Chunk("a", 4, 12))[1] == [Move("a", tuple(request.block_hashes[1:]), (1, 2, 3))]


def test_a_store_that_fails_costs_misses(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, request = engine(), Request("a", 16)

    def fails(*arguments: object) -> None:
        raise StoreError("the server is gone; start it")

    for call in ("exists", "read", "write"):
        monkeypatch.setattr(one.objects.store, call, fails)
    assert one.found(request) == 0
    one.prefill(request)
    assert one.finish(request)
    assert one.ended("a") == ({"a"}, set())
    assert one.objects.counts["failed"] == 4


def test_what_a_block_is_like_does_not_depend_on_how_many_there_are() -> None:
    def layers(layout: str, blocks: int) -> object:
        return BlockMemory(caches(layout, blocks), blocks).layers

    for layout in ("blocks", "heads", "tokens"):
        assert layers(layout, 5) == layers(layout, 9)
    assert layers("blocks", 5) != layers("tokens", 5)
    assert BlockMemory(caches(), BLOCKS).page_bytes == 2 * 2 * TOKENS * 6 * 4
