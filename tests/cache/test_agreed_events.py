"""Events that ranks notice at different times, and act on together."""

from __future__ import annotations

from kvtide.cache.agreed_events import MAX_SHOWN, AgreedEvents


def poll(*ranks: AgreedEvents) -> None:
    """What the caches of all ranks do: the minimum of every verdict."""
    verdicts = [events.verdicts() for events in ranks]
    assert len({len(each) for each in verdicts}) == 1
    agreed = [min(each) for each in zip(*verdicts, strict=True)]
    for events in ranks:
        events.settle(agreed)


def test_ranks_act_when_it_has_happened_on_all() -> None:
    happened: list[set[int]] = [set(), set()]
    done: list[list[int]] = [[], []]
    ranks = [AgreedEvents(), AgreedEvents()]
    for rank, events in enumerate(ranks):
        for number in range(3):
            events.when(
                lambda rank=rank, number=number: number in happened[rank],
                lambda rank=rank, number=number: done[rank].append(number),
            )
    happened[0] = {0, 1, 2}
    poll(*ranks)
    assert done == [[], []]
    happened[1] = {2, 1}
    poll(*ranks)
    assert done == [[1, 2], [1, 2]] and len(ranks[0]) == 1
    happened[1] = {0}
    poll(*ranks)
    assert done == [[1, 2, 0], [1, 2, 0]] and not len(ranks[0])


def test_what_follows_may_await_another_event() -> None:
    events, done = AgreedEvents(), list[str]()
    events.when(lambda: True, lambda: events.when(lambda: True, lambda: done.append("second")))
    poll(events)
    assert done == [] and len(events) == 1
    poll(events)
    assert done == ["second"]


def test_events_that_never_happen_hold_up_no_other() -> None:
    """More of them than an exchange has places: prompts whose decode server never comes."""
    ranks, done = [AgreedEvents(), AgreedEvents()], list[int]()
    for events in ranks:
        for number in range(3 * MAX_SHOWN):
            events.when(lambda: False, lambda number=number: done.append(-number))
        events.when(lambda: True, lambda: done.append(1))
    for _ in range(4):
        poll(*ranks)
    assert done == [1, 1] and len(ranks[0]) == len(ranks[1]) == 3 * MAX_SHOWN
