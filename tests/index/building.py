"""Indexes with something in them, in few words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtide.index import DEFAULT_NAMESPACE, Branches, Event, Index, IndexLease, Namespace
from kvtide.spec import ModelMemory, Tier

Pages = int | Mapping[str, int]


def build(
    memory: ModelMemory, device: Pages = 40, host: Pages = 40, storage: Pages = 40, **options: Any
) -> Index:
    """An index; a tier's slots are given per anchor, or once for all of them.

    Checkpoints stand at ends and branches unless the test says otherwise, whatever the default.
    """
    options.setdefault("placement", Branches())
    options.setdefault("hot_rows", 8)
    given = {Tier.DEVICE: device, Tier.HOST: host, Tier.STORAGE: storage}
    return Index(
        memory,
        {
            tier: {
                p.name: pages if isinstance(pages, int) else pages[p.name] for p in memory.anchors
            }
            for tier, pages in given.items()
        },
        **options,
    )


def lease_for(
    index: Index,
    tokens: Sequence[int],
    namespace: Namespace = DEFAULT_NAMESPACE,
    slowest: Tier = Tier.STORAGE,
    priority: int = 0,
) -> IndexLease:
    """Match and pin."""
    return index.pin(index.match(index.prompt(tokens, namespace), slowest), priority)


def compute(
    index: Index,
    tokens: Sequence[int],
    namespace: Namespace = DEFAULT_NAMESPACE,
    priority: int = 0,
    checkpoints: Sequence[int] | None = None,
) -> IndexLease:
    """A lease whose prompt is computed and committed as far as it goes."""
    lease = lease_for(index, tokens, namespace, Tier.DEVICE, priority)
    if checkpoints is None:
        assert index.reserve(lease, len(tokens))
    else:
        assert index.reserve_with(lease, len(tokens), checkpoints)
    index.commit(lease, len(tokens))
    return lease


def readable(index: Index) -> list[Event]:
    """All that is readable now, as events of being stored."""
    reading, events = index.read(), list[Event]()
    while not reading.complete:
        events += [Event(*fields) for fields in reading.advance(8)]
    return events


def keep(index: Index, tokens: Sequence[int], **options: Any) -> None:
    """Have the prompt's pages in the device tier, not held."""
    index.release(compute(index, tokens, **options))


def back_up(index: Index, tokens: Sequence[int]) -> None:
    """Give the prompt's pages a landed copy in the host tier."""
    lease = lease_for(index, [*tokens, 0])
    arrival = index.copy(lease, Tier.DEVICE, Tier.HOST)
    assert arrival is not None
    index.land(arrival)
    index.release(lease)


def clear_homes(index: Index) -> None:
    """Drop what is not held of every tier where prompts are computed: the host's of hot pools."""
    for home in sorted({pool.home for pool in index.memory.anchors}):
        index.clear(home)


def found(index: Index, tokens: Sequence[int], slowest: Tier = Tier.STORAGE) -> int:
    """How many pages of the prompt, and one token more, can be resumed."""
    return index.match(index.prompt([*tokens, 0]), slowest).boundary
