"""Which pages go first."""

from __future__ import annotations

import random

import pytest

from kvtide.index.evict import eviction_queue as evicting
from kvtide.index.evict.eviction_queue import in_reach
from kvtide.index.evict.policies import policy_named
from kvtide.index.evict.reuse_rates import ReuseRates
from kvtide.index.tree.node import Node
from kvtide.spec import Tier
from tests.grids import everything
from tests.index.building import back_up, build, compute, found, keep, lease_for
from tests.index.memories import FULL, PAGE, RECURRENT, THREE, WINDOW, WINDOW_ONLY

A, B, C = [1] * PAGE, [2] * PAGE, [3] * PAGE


def _use(index, tokens) -> None:
    index.release(lease_for(index, [*tokens, 0]))


def _order(index, tier: Tier = Tier.DEVICE) -> str:
    """The prompts in the order in which they go."""
    gone = ""
    while len(gone) < 3:
        index.evict(tier, "kv", 1)
        kept = {name for name, text in zip("abc", (A, B, C), strict=True) if found(index, text)}
        gone += "".join(sorted({*"abc"} - kept - {*gone}))
    return gone


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lhd", "bac"),
        ("lru", "bac"),
        ("mru", "cab"),
        ("fifo", "abc"),
        ("filo", "cba"),
        ("lfu", "bca"),
        ("slru", "bac"),
        ("priority", "acb"),
    ],
)
def test_each_policy_has_its_order(policy: str, order: str) -> None:
    """Made a, b, c; used a, a, c; b has the highest priority."""
    index = build(FULL, eviction=policy)
    for text, priority in ((A, 0), (B, 2), (C, 1)):
        keep(index, text, priority=priority)
    for text in (A, A, C):
        _use(index, text)
    assert _order(index) == order


@pytest.mark.parametrize(("policy", "order"), [("lru", "bca"), ("mru", "acb")])
def test_host_copies_of_pages_read_on_the_device_count_as_used(policy: str, order: str) -> None:
    index = build(FULL, eviction=policy)
    for text in (A, B, C):
        keep(index, text)
        back_up(index, text)
    _use(index, A)
    index.clear(Tier.DEVICE)
    assert _order(index, Tier.HOST) == order


def test_sharing_pages_raises_their_priority() -> None:
    index = build(FULL, eviction="priority")
    urgent = lease_for(index, [*A, 0], priority=5)
    index.reserve(urgent, PAGE)
    keep(index, A)
    index.commit(urgent, PAGE)
    index.release(urgent)
    keep(index, B, priority=1)
    index.evict(Tier.DEVICE, "kv", 1)
    assert found(index, A) == 1 and found(index, B) == 0


def test_reading_pages_raises_their_priority() -> None:
    index = build(FULL, eviction="priority")
    keep(index, A)
    keep(index, B, priority=1)
    index.release(lease_for(index, [*A, 0], priority=2))
    index.release(lease_for(index, [*A, 0], priority=0))
    index.evict(Tier.DEVICE, "kv", 1)
    assert found(index, A) == 1 and found(index, B) == 0


def test_a_pinned_node_is_never_a_victim() -> None:
    index = build(FULL)
    keep(index, A)
    lease = compute(index, B)
    assert index.clear(Tier.DEVICE) == 1
    assert found(index, B) == 1
    index.release(lease)
    assert index.clear(Tier.DEVICE) == 1


def test_a_window_left_behind_by_a_growing_leaf_goes_first() -> None:
    """A leaf that grows puts the pages above it out of reach; older ones in reach must stay."""
    index = build(WINDOW)
    keep(index, C * 2)
    keep(index, A * 2 + B, checkpoints=[2, 3])
    keep(index, A * 2 + C)
    _use(index, C * 2)
    _use(index, A * 2 + B)
    assert index.evict(Tier.DEVICE, "kv", 1) == 1
    assert found(index, A * 2 + C) == 2, "the sibling went"
    lease = lease_for(index, A * 2 + B + [0])
    assert lease.boundary == 3
    for page in range(4, 8):
        index.reserve(lease, page * PAGE)
        lease.prompt.extend([9] * (page * PAGE - lease.prompt.tokens))
        index.commit(lease, page * PAGE)
    index.release(lease)
    (above,) = (n for n in index.tree.walk() if n.depth == 0 and n.tokens[0] == A[0])
    assert not in_reach(above, 2)
    index.evict(Tier.DEVICE, "swa", 1)
    assert found(index, C * 2) == 2, "a window in reach went before one out of it"


# -- windows and states ---------------------------------------------------------------------


def test_pages_out_of_every_reach_go_first_and_alone() -> None:
    """Two pages of window, kept at 2 and at 8; no prompt parts at 2, so those go first."""
    index = build(WINDOW)
    keep(index, C * 2)
    keep(index, A * 8, checkpoints=[2, 8])
    assert index.resident_pages(Tier.DEVICE, "swa") == 6
    assert index.evict(Tier.DEVICE, "swa", 1) == 2
    assert found(index, A * 8) == 8 and found(index, A * 2) == 0
    assert found(index, C * 2) == 2, "older, but a resume there is still possible"
    assert index.resident_pages(Tier.DEVICE, "kv") == 10, "the history is not touched"
    assert index.validate() == []


def test_a_window_where_prompts_part_is_in_reach() -> None:
    index = build(WINDOW)
    keep(index, B * 2)
    keep(index, A * 2 + B * 6, checkpoints=[2, 8])
    keep(index, A * 2 + C * 6)
    index.evict(Tier.DEVICE, "swa", 1)
    assert found(index, A * 2) == 2 and found(index, B * 2) == 0


def test_a_parting_that_is_gone_keeps_nothing_in_reach() -> None:
    index = build(WINDOW)
    keep(index, B * 2)
    keep(index, A * 2 + C * 6, checkpoints=[2, 8])
    keep(index, A * 2 + B * 6)
    _use(index, B * 2)
    _use(index, A * 2 + B * 6)
    assert index.evict(Tier.DEVICE, "kv", 6) == 6
    assert found(index, A * 2 + C * 6) == 2 and found(index, A * 2 + B * 6) == 8
    index.evict(Tier.DEVICE, "swa", 1)
    assert found(index, A * 2) == 0 and found(index, B * 2) == 2


def test_all_of_the_window_before_a_parting_that_is_gone_goes_first() -> None:
    """Also the part of it that lies in a node of its own, further up."""
    index = build(WINDOW)
    keep(index, B * 2)
    keep(index, A + B + C * 6, checkpoints=[1, 2, 8])
    keep(index, A + B + A * 6)
    _use(index, B * 2)
    _use(index, A)
    assert {n.depth for n in index.tree.walk() if n.pages == 1} == {0, 1}
    _use(index, A + B + A * 6)
    assert index.evict(Tier.DEVICE, "kv", 6) == 6
    assert index.evict(Tier.DEVICE, "swa", 2) == 2
    assert found(index, B * 2) == 2 and found(index, A + B) == 0
    assert index.resident_pages(Tier.DEVICE, "swa") == 4


@pytest.mark.parametrize(
    ("lengths", "reach", "expected"),
    [
        ([1], 1, [True]),
        ([1, 1], 1, [False, True]),
        ([1, 1], 2, [True, True]),
        ([1, 1, 1], 2, [False, True, True]),
        ([3, 1, 1], 3, [True, True, True]),
        ([1, 5], 5, [False, True]),
        ([1, 5], 6, [True, True]),
    ],
)
def test_reach_counts_pages_between_a_node_and_the_end(lengths, reach, expected) -> None:
    nodes, parent, depth = [], None, 0
    for pages in lengths:
        node = Node(parent, b"", pages, depth, 1)
        if parent is not None:
            parent.children[b""] = node
        nodes.append(node)
        parent, depth = node, depth + pages
    assert [in_reach(node, reach) for node in nodes] == expected


def test_states_go_one_checkpoint_at_a_time() -> None:
    index = build(RECURRENT)
    keep(index, A * 6, checkpoints=[2, 4, 6])
    for left in (2, 1, 0):
        assert index.evict(Tier.DEVICE, "state", 1) == 1
        assert index.resident_pages(Tier.DEVICE, "state") == left
    assert index.resident_pages(Tier.DEVICE, "kv") == 6 and index.validate() == []


def test_a_host_window_left_behind_by_a_growing_leaf_goes_first() -> None:
    """Nothing pins the host copy while its device copy is read, so growth alone must tell."""
    index = build(WINDOW)
    keep(index, C * 2)
    back_up(index, C * 2)
    lease = lease_for(index, A * 2 + B * 6)
    index.reserve_with(lease, 8 * PAGE, [2])
    index.commit(lease, 2 * PAGE)
    arrival = index.copy(lease, Tier.DEVICE, Tier.HOST)
    assert arrival is not None
    index.land(arrival)
    for page in range(3, 9):
        index.commit(lease, page * PAGE)
    assert index.tree.nodes == 3, "the leaf grew in place"
    assert index.evict(Tier.HOST, "swa", 1) == 2
    index.clear(Tier.DEVICE)
    assert found(index, C * 2, Tier.HOST) == 2
    assert index.validate() == []


def test_joining_leaves_pinned_nodes_as_they_are() -> None:
    index = build(WINDOW_ONLY)
    text = [page for page in range(8) for _ in range(PAGE)]
    lease = lease_for(index, text)
    index.reserve_with(lease, len(text), range(1, 9))
    index.commit(lease, len(text))
    index.release(lease_for(index, text[: 4 * PAGE + 1]))
    assert index.tree.nodes == 2
    arrival = index.copy(lease, Tier.DEVICE, Tier.HOST)
    assert arrival is not None
    index.land(arrival)
    assert index.clear(Tier.HOST) == 8
    assert index.validate() == [] and index.tree.nodes == 2
    index.release(lease)
    assert index.validate() == []


def test_nodes_that_differ_no_more_become_one() -> None:
    """A checkpoint in the middle of a run cut it; when it is gone, nothing does."""
    index = build(RECURRENT)
    keep(index, A * 8, checkpoints=[3, 8])
    assert index.tree.nodes == 4
    assert index.evict(Tier.DEVICE, "state", 1) == 1
    assert index.tree.nodes == 2 and found(index, A * 8) == 8 and index.validate() == []


def test_a_node_between_two_alike_joins_both() -> None:
    """A checkpoint's page goes, and what was before and after it is one run again, in order."""
    index = build(RECURRENT)
    text = [page for page in range(8) for _ in range(PAGE)]
    keep(index, text, checkpoints=[3, 8])
    table = index.page_table(lease := lease_for(index, [*text, 0]), "kv")
    index.release(lease)
    assert index.evict(Tier.DEVICE, "state", 1) == 1
    joined, last = index.tree.walk()
    assert (joined.pages, last.pages) == (7, 1)
    assert joined.tokens + last.tokens == index.prompt(text).body
    lease = lease_for(index, [*text, 0])
    assert index.page_table(lease, "kv").tolist() == table.tolist() and index.validate() == []


def test_what_is_left_of_a_victim_is_as_old_as_it_was() -> None:
    index = build(FULL)
    keep(index, A * 4)
    back_up(index, A * 4)
    keep(index, B * 4)
    for _ in range(4):
        assert index.evict(Tier.DEVICE, "kv", 1) == 1
    assert found(index, A * 4, Tier.DEVICE) == 0 and found(index, B * 4, Tier.DEVICE) == 4


# -- how much, and at what cost -------------------------------------------------------------


def test_runs_lose_their_tail_in_batches() -> None:
    index = build(FULL, device=1024)
    assert index.tree.cells[0].batch_pages == 4
    text = list(range(100 * PAGE))
    keep(index, text)
    assert index.evict(Tier.DEVICE, "kv", 1) == 4 and found(index, text) == 96
    assert index.evict(Tier.DEVICE, "kv", 5) == 8 and found(index, text) == 88
    assert index.evict(Tier.DEVICE, "kv", 1000) == 88 and index.tree.nodes == 0


def test_small_pools_give_up_single_pages() -> None:
    index = build(FULL)
    keep(index, A * 10)
    assert index.evict(Tier.DEVICE, "kv", 3) == 3 and found(index, A * 10) == 7


def test_a_shared_prefix_goes_after_all_that_hangs_on_it() -> None:
    index = build(FULL)
    keep(index, A * 2 + B * 2)
    keep(index, A * 2 + C * 2)
    assert index.evict(Tier.DEVICE, "kv", 4) == 4
    assert found(index, A * 2) == 2 and index.tree.nodes == 1


def _in_turns(index, text, turns: int) -> None:
    """A conversation that keeps a checkpoint at every turn: as many nodes on one path."""
    for turn in range(1, turns + 1):
        keep(index, text[: turn * len(text) // turns])


def test_what_was_used_together_leaves_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes of a conversation's turns are no victims one by one: none is queued on the way."""
    index = build(RECURRENT, device=64)
    text = [page for page in range(24) for _ in range(PAGE)]
    _in_turns(index, text, 6)
    _use(index, text)
    gone: list[int] = []
    index.subscribe(lambda event: gone.append(event.first + len(event.slots)))
    queue = index.tree.cells[0].queue
    entries = len(queue)
    assert index.tree.nodes == 12 and index.evict(Tier.DEVICE, "kv", 24) == 24
    assert len(queue) < entries and index.tree.nodes == 0 and index.validate() == []
    assert index.free_pages(Tier.DEVICE, "kv") == 64 and len(gone) == 12 + 6


def test_a_run_ends_where_another_prompt_needs_it() -> None:
    index = build(FULL)
    keep(index, A * 2 + B * 2)
    keep(index, A * 2 + B * 2 + C)
    keep(index, A * 3)
    _use(index, A * 2 + B * 2 + C)
    _use(index, A * 3)
    assert index.evict(Tier.DEVICE, "kv", 3) == 3
    assert found(index, A * 2 + B * 2) == 2 and found(index, A * 3) == 3
    assert index.evict(Tier.DEVICE, "kv", 3) == 3 and index.tree.nodes == 0


def test_a_run_ends_at_what_a_lease_holds() -> None:
    index = build(FULL)
    keep(index, A * 2)
    lease = lease_for(index, [*A * 2, 0])
    keep(index, A * 2 + B * 2)
    assert index.clear(Tier.DEVICE) == 2 and found(index, A * 2) == 2
    index.release(lease)
    assert index.clear(Tier.DEVICE) == 2 and index.validate() == []


def _work_per_victim(memory, prompts: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Heap operations and nodes looked at, per victim, in a cache of so many prompts."""
    work = 0

    def counted(function):
        def call(*arguments):
            nonlocal work
            work += 1
            return function(*arguments)

        return call

    index = build(memory, device=3 * prompts)
    for number in range(prompts):
        keep(index, [number] * PAGE + [number + 1] * PAGE)
    for number in range(0, prompts, 2):
        _use(index, [number] * PAGE + [number + 1] * PAGE)
    with monkeypatch.context() as patch:
        for name in ("heappush", "heappop", "heapreplace", "heapify"):
            patch.setattr(evicting.heapq, name, counted(getattr(evicting.heapq, name)))
        for name in ("evictable", "offer", "offer_again"):
            method = counted(getattr(evicting.EvictionQueue, name))
            patch.setattr(evicting.EvictionQueue, name, method)
        anchor = memory.anchors[-1].name
        for _ in range(20):
            index.evict(Tier.DEVICE, anchor, 2)
    return work / 20


@pytest.mark.parametrize("memory", [FULL, WINDOW, RECURRENT, THREE], ids=lambda m: m.model)
def test_the_cost_of_a_victim_does_not_grow_with_the_cache(
    memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = _work_per_victim(memory, 40, monkeypatch)
    large = _work_per_victim(memory, 4000 if everything() else 1000, monkeypatch)
    assert large <= 1.5 * small + 1


def _evictable(last: int) -> Node:
    node = Node(None, b"", 1, 0, 1)
    node.resident, node.last = 1, last
    return node


def test_void_entries_are_swept_a_few_per_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes leave without being victims, as those of requests that go on do: the queue forgets
    them, and no single push pays for it."""
    queue = evicting.EvictionQueue(0, None, policy_named("lru", ReuseRates()))
    moved = 0
    push = evicting.heapq.heappush

    def counted(heap, entry) -> None:
        nonlocal moved
        moved += 1
        push(heap, entry)

    monkeypatch.setattr(evicting.heapq, "heappush", counted)
    generator = random.Random(0)
    kept: list[Node] = []
    for number in range(20_000):
        node = _evictable(number)
        before = moved
        queue.offer(node)
        assert moved - before <= 1 + evicting.SWEPT_PER_PUSH
        if number % 10:
            node.pins[0] = 1
        else:
            kept.append(node)
        if not number % 50:
            generator.choice(kept).last = number
        assert len(queue) <= 2 * max(evicting.SWEEP_FROM, 2 * len(kept)) + 1
    assert moved < 3 * 20_000
    assert queue.nodes() >= {id(node) for node in kept}
    victims = iter(queue.pop, None)
    assert [id(v) for v in victims] == [id(n) for n in sorted(kept, key=lambda node: node.last)]


def test_a_node_entered_again_is_a_victim_once() -> None:
    """A key that fell is entered a second time, and the first entry is void."""
    queue = evicting.EvictionQueue(0, None, policy_named("mru", ReuseRates()))
    first, second = _evictable(1), _evictable(2)
    for node in (first, second):
        queue.offer(node)
    first.last = 3
    queue.offer_again(first)
    assert len(queue) == 3
    assert [queue.pop(), queue.pop(), queue.pop()] == [first, second, None] and not len(queue)


def test_windows_go_with_the_last_copy_of_their_history() -> None:
    index = build(WINDOW, host=0, storage=0)
    keep(index, A * 2 + B)
    assert index.resident_pages(Tier.DEVICE, "swa") == 2
    index.evict(Tier.DEVICE, "kv", 3)
    assert index.resident_pages(Tier.DEVICE, "swa") == 0
    assert index.tree.nodes == 0 and index.validate() == []


def test_windows_stay_while_a_tier_below_has_the_history() -> None:
    index = build(WINDOW)
    keep(index, A * 2 + B)
    back_up(index, A * 2 + B)
    index.evict(Tier.DEVICE, "kv", 3)
    assert index.resident_pages(Tier.DEVICE, "swa") == 2
    assert found(index, A * 2 + B + [0], Tier.HOST) == 3 and index.validate() == []
