"""How many pages of every anchor a tier of so many bytes holds, and which requests run in it.

Pools that keep the whole history need a page for every page of tokens. Windows and states are
needed only where a request may resume, so a tier keeps room for one checkpoint per
`tokens_per_checkpoint` tokens of history, each as many pages long as the pool reaches back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvtide.spec.memory import ModelMemory
from kvtide.spec.pool import PoolSpec, SpecError
from kvtide.spec.residency import hot_bytes

TOKENS_PER_CHECKPOINT = 4096


def pages_for(
    memory: ModelMemory, total_bytes: int, tokens_per_checkpoint: int = TOKENS_PER_CHECKPOINT
) -> dict[str, int]:
    """The most pages per anchor that fit, in the proportion above."""
    _check(memory, tokens_per_checkpoint)
    min_bytes = bytes_for(memory, 1, tokens_per_checkpoint)
    if total_bytes < min_bytes:
        raise SpecError(
            f"{memory.model}: {total_bytes:,} bytes do not hold a page and what one request needs "
            f"to run; use at least {min_bytes:,}"
        )
    fits, beyond = 1, _beyond(memory, total_bytes, tokens_per_checkpoint)
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        if bytes_for(memory, middle, tokens_per_checkpoint) <= total_bytes:
            fits = middle
        else:
            beyond = middle
    return pages_per_anchor(memory, fits, tokens_per_checkpoint)


def pages_per_anchor(
    memory: ModelMemory, pages: int, tokens_per_checkpoint: int = TOKENS_PER_CHECKPOINT
) -> dict[str, int]:
    """Pages of every anchor that go with `pages` pages of tokens; the same on every rank."""
    return {
        anchor.name: _anchor_pages(anchor, memory.page_tokens, pages, tokens_per_checkpoint)
        for anchor in memory.anchors
    }


def bytes_for(
    memory: ModelMemory, pages: int, tokens_per_checkpoint: int = TOKENS_PER_CHECKPOINT
) -> int:
    """Bytes that keep `pages` pages of tokens, and the checkpoints among them."""
    counts = pages_per_anchor(memory, pages, tokens_per_checkpoint)
    return sum(memory.slot_bytes(anchor) * count for anchor, count in counts.items())


# -- requests that run together --------------------------------------------------------------


def running_bytes(memory: ModelMemory, requests: int, pages: int) -> int:
    """Device bytes with which so many requests of `pages` pages run; they share no prefix."""
    resident, page = memory.in_device_pages, memory.page_tokens
    each = sum(
        resident.slot_bytes(anchor.name) * _request_pages(anchor, page, pages)
        for anchor in resident.anchors
    )
    return requests * each + hot_bytes(memory, requests, pages)


def longest_context(memory: ModelMemory, device_bytes: int) -> int | None:
    """Tokens of the longest request that runs alone; None: it takes no more when it grows."""
    pages = _largest(lambda pages: running_bytes(memory, 1, pages) <= device_bytes)
    return None if pages is None else pages * memory.page_tokens


def largest_batch(memory: ModelMemory, tokens: int, device_bytes: int) -> int | None:
    """How many requests of so many tokens run at once; None: they take nothing."""
    pages = -(-tokens // memory.page_tokens)
    return _largest(lambda requests: running_bytes(memory, requests, pages) <= device_bytes)


def requests_in(memory: ModelMemory, pages: Mapping[str, int], tokens: int) -> int:
    """How many requests of so many tokens run in these device pages; they share no prefix.

    Of windows a request takes no more than its own pages, and two for the steps after.
    """
    page = memory.page_tokens
    own = -(-tokens // page)
    return min(
        pages[anchor.name] // min(_request_pages(anchor, page, own), own + 2)
        for anchor in memory.in_device_pages.anchors
    )


_UNBOUNDED = 1 << 40


def _largest(fits: Callable[[int], bool]) -> int | None:
    """The largest number that fits, where every smaller one does; None: any does."""
    beyond = 1
    while fits(beyond):
        beyond *= 2
        if beyond > _UNBOUNDED:
            return None
    fitting = beyond // 2
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        fitting, beyond = (middle, beyond) if fits(middle) else (fitting, middle)
    return fitting


# -- proportions ------------------------------------------------------------------------------


def _anchor_pages(
    anchor: PoolSpec, page_tokens: int, pages: int, tokens_per_checkpoint: int
) -> int:
    """Pages in proportion to the reach, but never less than one request needs to run."""
    needed = _request_pages(anchor, page_tokens, pages)
    reach = anchor.reuse.reach_pages(page_tokens)
    if reach is None:
        return needed
    return max(needed, pages * page_tokens * reach // tokens_per_checkpoint)


def _request_pages(anchor: PoolSpec, page_tokens: int, pages: int) -> int:
    """Pages of an anchor with which a request of `pages` pages of tokens runs.

    Of windows and states it needs the pages it resumes from, and twice as many for the steps after:
    one step writes its pages while those of the step before are still read.
    """
    reach = anchor.reuse.reach_pages(page_tokens)
    return pages if reach is None else 3 * reach


def _beyond(memory: ModelMemory, total_bytes: int, tokens_per_checkpoint: int) -> int:
    """A number of pages that surely does not fit: counts are rounded down by less than a slot."""
    page = memory.page_tokens
    scaled = rounding = 0
    for anchor in memory.anchors:
        reach = anchor.reuse.reach_pages(page)
        slot = memory.slot_bytes(anchor.name)
        scaled += slot * (tokens_per_checkpoint if reach is None else page * reach)
        rounding += 0 if reach is None else slot
    return (total_bytes + rounding) * tokens_per_checkpoint // scaled + 2


def _check(memory: ModelMemory, tokens_per_checkpoint: int) -> None:
    if tokens_per_checkpoint < 1:
        raise SpecError(
            f"a checkpoint every {tokens_per_checkpoint} tokens; use a distance of at least 1"
        )
    if not any(memory.slot_bytes(anchor.name) for anchor in memory.anchors):
        raise SpecError(
            f"{memory.model}: no pool keeps a byte, so any number of pages fits; "
            "size a memory that has layers"
        )
