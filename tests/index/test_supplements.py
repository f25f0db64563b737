"""Optional sidecars are brought to pages that are kept without them, each once."""

from __future__ import annotations

from kvtide.index import Index, Prompt
from kvtide.spec import PageMove, Tier
from tests.index.building import build, lease_for
from tests.index.memories import DRAFTED, DRAFTED_TWICE, FULL, PAGE

TEXT = list(range(100, 118))
PAGES = 4


def kept(memory=DRAFTED, without: tuple[str, ...] = ("draft",), **sizes: int) -> Index:
    """An index with the text on the device and on the host, without these sidecars."""
    index = build(memory, **sizes)
    lease = lease_for(index, TEXT)
    index.reserve(lease, len(TEXT))
    index.commit(lease, len(TEXT), without=without)
    index.land(index.copy(lease, Tier.DEVICE, Tier.HOST))
    index.release(lease)
    return index


def prompt(index: Index, tokens: list[int] = TEXT) -> Prompt:
    return index.prompt([*tokens, 0])


def given(index: Index, pages: int = PAGES) -> None:
    """A store gives the host the first sidecars that the text lacks."""
    wanted = index.sidecars.lacking(prompt(index))[:pages]
    arriving = index.sidecars.take(prompt(index), wanted)
    index.sidecars.land(arriving, [page.sidecars for page in wanted])


def carried(index: Index, sidecar: str = "draft") -> list[bool]:
    lease = lease_for(index, [*TEXT, 0], slowest=Tier.DEVICE)
    found = index.carries(lease, sidecar).tolist()
    index.release(lease)
    return found


def targets(moves: tuple[PageMove, ...]) -> list[int]:
    assert all((m.source, m.target, m.sidecar) == (Tier.HOST, Tier.DEVICE, "draft") for m in moves)
    return [slot for move in moves for slot in move.target_slots.tolist()]


def test_what_the_host_has_is_copied_to_the_slots_of_the_device() -> None:
    index = kept()
    assert index.supplement(prompt(index), 64) is None, "there is none"
    given(index)
    lease = lease_for(index, [*TEXT, 0], slowest=Tier.DEVICE)
    slots = index.page_table(lease, "kv").tolist()
    arrival = index.supplement(prompt(index), 64)
    assert arrival is not None and targets(arrival.moves) == slots[:PAGES] and not arrival.parts
    assert not index.carries(lease, "draft").any() and index.validate() == []
    before = index.sidecars_version
    index.land(arrival)
    assert index.carries(lease, "draft").all() and index.sidecars_version > before
    assert index.page_table(lease, "kv").tolist() == slots
    assert index.supplement(prompt(index), 64) is None, "once is enough"
    index.release(lease)
    assert index.validate() == []


def test_a_copy_brings_so_many_pages_at_the_most() -> None:
    index = kept()
    given(index)
    for count in (1, 3):
        arrival = index.supplement(prompt(index), count)
        assert arrival is not None and len(targets(arrival.moves)) == count
        index.land(arrival)
    assert carried(index) == [True] * PAGES and index.validate() == []


def test_while_it_is_on_its_way_no_other_brings_it() -> None:
    index = kept()
    wanted = index.sidecars.lacking(prompt(index))
    assert [page.page for page in wanted] == list(range(PAGES))
    arriving = index.sidecars.take(prompt(index), wanted[:2])
    assert [page.page for page in index.sidecars.lacking(prompt(index))] == [2, 3]
    assert index.sidecars.awaited(prompt(index)) and index.validate() == []
    index.sidecars.land(arriving, [page.sidecars for page in wanted[:2]])
    arrival = index.supplement(prompt(index), 64)
    assert arrival is not None and index.sidecars.awaited(prompt(index))
    assert index.supplement(prompt(index), 64) is None
    index.land(arrival)
    assert not index.sidecars.awaited(prompt(index))
    assert carried(index) == [True, True, False, False]


def test_pages_stay_while_their_sidecars_come() -> None:
    index = kept()
    arriving = index.sidecars.take(prompt(index), index.sidecars.lacking(prompt(index)))
    assert index.evict(Tier.HOST, "kv", 9) == 0, "pinned while they are read"
    index.sidecars.land(arriving, [page.sidecars for page in arriving.pages])
    arrival = index.supplement(prompt(index), 64)
    assert arrival is not None
    assert index.evict(Tier.DEVICE, "kv", 9) == index.evict(Tier.HOST, "kv", 9) == 0
    index.land(arrival)
    assert index.evict(Tier.HOST, "kv", 9) == PAGES and index.validate() == []


def test_a_copy_that_fails_is_tried_again() -> None:
    index = kept()
    given(index)
    arrival = index.supplement(prompt(index), 64)
    assert arrival is not None
    index.fail(arrival)
    assert carried(index) == [False] * PAGES and index.validate() == []
    again = index.supplement(prompt(index), 64)
    assert again is not None and len(targets(again.moves)) == PAGES


def test_of_what_was_read_only_what_came_counts() -> None:
    index = kept()
    arriving = index.sidecars.take(prompt(index), index.sidecars.lacking(prompt(index)))
    index.sidecars.land(arriving, [("draft",), (), ("draft",), ()])
    assert [page.page for page in index.sidecars.lacking(prompt(index))] == [1, 3]
    arrival = index.supplement(prompt(index), 64)
    assert arrival is not None
    index.land(arrival)
    assert carried(index) == [True, False, True, False] and index.validate() == []


def test_what_the_device_computes_meanwhile_is_backed_up_if_it_does_not_come() -> None:
    index = build(DRAFTED)
    one, two = lease_for(index, TEXT), lease_for(index, TEXT)
    for lease in (one, two):
        index.reserve(lease, len(TEXT))
    index.commit(one, len(TEXT), without=("draft",))
    index.land(index.copy(one, Tier.DEVICE, Tier.HOST))
    arriving = index.sidecars.take(prompt(index), index.sidecars.lacking(prompt(index)))
    index.commit(two, len(TEXT))
    assert index.carries(two, "draft").all()
    assert not index.copy(two, Tier.DEVICE, Tier.HOST).moves, "they are on their way to the host"
    index.sidecars.land(arriving, [()] * PAGES)
    assert index.validate() == []
    moves = index.copy(two, Tier.DEVICE, Tier.HOST).moves
    assert {move.sidecar for move in moves} == {"draft"}
    assert sum(len(move.target_slots) for move in moves) == PAGES


def test_what_no_store_has_is_not_asked_for_again() -> None:
    index = kept()
    wanted = index.sidecars.lacking(prompt(index))
    index.sidecars.sought(prompt(index), wanted[:1])
    assert index.sidecars.lacking(prompt(index)) == wanted[:2], "a node of which the store has some"
    index.sidecars.sought(prompt(index), [])
    assert index.sidecars.lacking(prompt(index)) == []
    longer = [*TEXT, *range(200, 216)]
    lease = lease_for(index, longer)
    index.reserve(lease, len(longer))
    index.commit(lease, len(longer), without=("draft",))
    index.release(lease)
    assert [page.page for page in index.sidecars.lacking(prompt(index, longer))] == [4, 5, 6, 7]


def test_a_prompt_that_shares_part_of_a_node_names_that_part() -> None:
    index = kept()
    first = TEXT[: PAGE + 1]
    assert [page.page for page in index.sidecars.lacking(prompt(index, first))] == [0]
    index.sidecars.sought(prompt(index, first), [])
    assert len(index.sidecars.lacking(prompt(index))) == PAGES, (
        "the rest of the node was not asked for"
    )


def test_sidecars_of_one_page_are_brought_each_for_itself() -> None:
    index = kept(DRAFTED_TWICE, ("draft_kv",))
    wanted = index.sidecars.lacking(prompt(index))
    assert {(page.anchor, page.sidecars) for page in wanted} == {("kv", ("draft_kv",))}
    given(index)
    arrival = index.supplement(prompt(index), 64)
    assert arrival is not None and {m.sidecar for m in arrival.moves} == {"draft_kv"}
    index.land(arrival)
    assert all(carried(index, "draft_kv")) and index.validate() == []


def test_a_page_that_only_the_device_has_has_no_slot_to_read_to() -> None:
    index = kept()
    index.clear(Tier.HOST)
    assert [page.slot for page in index.sidecars.lacking(prompt(index))] == [None] * PAGES


def test_a_quarantined_page_gets_none() -> None:
    index = kept()
    arriving = index.sidecars.take(prompt(index), index.sidecars.lacking(prompt(index)))
    index.quarantine(prompt(index))
    assert index.sidecars.lacking(prompt(index)) == [] and index.validate() == []
    index.sidecars.land(arriving, [()] * PAGES)
    assert index.tree.nodes == 0 and index.validate() == []


def test_memories_without_optional_sidecars_lack_none() -> None:
    index = kept(FULL, ())
    assert (
        index.sidecars.lacking(prompt(index)) == [] and index.supplement(prompt(index), 64) is None
    )
    assert not index.sidecars.awaited(prompt(index))
