"""Checks with peers that live: bytes, order, sizes, refusals, the quota."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from kvtide.transfer.peer.conformance.conformance_peer import (
    PeerDiedError,
    Trial,
    TrialRows,
    new_sources,
)

KIB, MIB = 1 << 10, 1 << 20
LATE_S = 1.0
"""So long a check looks for late bytes."""
SIZES = (1, 7, 100, 4096, 8191, 70_001, MIB)


def bytes_arrive_in_their_place_alone(trial: Trial) -> Iterator[str]:
    pair = trial.pair(3 * MIB + 123, 2 * MIB + 1)
    for size in SIZES:
        row = TrialRows.of([3 * size % 1013], [5 * size % 997], [size], [size % 2])
        yield from pair.land(row, f"a row of {size:,} B")
    ends = TrialRows.of([0, 10], [3 * MIB + 122, 2 * MIB], [1, 1], [0, 1])
    yield from pair.land(ends, "the last byte of every region")
    whole = TrialRows.of([0, 0], [0, 0], [3 * MIB + 123, 2 * MIB + 1], [0, 1])
    yield from pair.land(whole, "whole regions")


def thousands_of_small_rows_arrive(trial: Trial) -> Iterator[str]:
    chance = np.random.default_rng(24)
    pair = trial.pair(8 * MIB, source_bytes=8 * MIB)
    slots = chance.permutation(4096)[:3000] * (2 * KIB)
    sizes = chance.choice((16, 48, 512, 1000, 1536), 3000)
    yield from pair.land(
        TrialRows.of(chance.permutation(3000) * 2048, slots, sizes), "3,000 small rows"
    )


def rows_may_lie_together_on_one_side_only(trial: Trial) -> Iterator[str]:
    chance = np.random.default_rng(25)
    pair = trial.pair(4 * MIB, source_bytes=4 * MIB)
    apart, together = chance.permutation(4096) * KIB, np.arange(4096) * KIB
    yield from pair.land(TrialRows.of(apart, together, KIB), "rows from many places to one")
    new = new_sources(pair.sender, 4 * MIB)
    pair = type(pair)(pair.receiver, pair.sender, pair.link, new)
    yield from pair.land(TrialRows.of(together, apart, KIB), "rows from one place to many")


def large_batches_arrive(trial: Trial) -> Iterator[str]:
    pair = trial.pair(40 * MIB, source_bytes=40 * MIB)
    order = np.random.default_rng(26).permutation(40) * MIB
    yield from pair.land(TrialRows.of(order, order[::-1], MIB), "40 rows of 1 MiB")
    yield from pair.land(TrialRows.of([0], [0], [40 * MIB]), "one row of 40 MiB")


def a_write_that_ended_has_landed(trial: Trial) -> Iterator[str]:
    """The check looks at the receiver's memory as soon as it hears of the end."""
    pair = trial.pair(256 * KIB, source_bytes=4 * MIB)
    for number in range(16):
        rows = TrialRows.of([number * 256 * KIB], [0], [256 * KIB])
        if found := list(pair.land(rows, f"write {number}")):
            yield from found
            return


def later_writes_win(trial: Trial) -> Iterator[str]:
    pair = trial.pair(64 * KIB, source_bytes=4 * MIB)
    for number in range(60):
        rows = TrialRows.of([number * 64 * KIB], [0], [64 * KIB])
        if (outcome := pair.write(rows)).error:
            yield f"write {number} failed: {outcome.error}"
            return
        pair.receiver.expect(pair.sources, rows)
    deadline = time.monotonic() + LATE_S
    while time.monotonic() < deadline:
        if wrong := pair.receiver.difference():
            yield f"after 60 writes to one place: {wrong}"
            return
        time.sleep(0.05)


def empty_batches_do_nothing(trial: Trial) -> Iterator[str]:
    pair = trial.pair(64 * KIB)
    nothing = np.empty(0, np.int64)
    yield from pair.land(TrialRows.of(nothing, nothing, nothing, nothing), "no rows")
    yield from pair.land(TrialRows.of([0, 5], [10, 64 * KIB], [0, 0]), "rows of no bytes")
    yield from pair.land(TrialRows.of([0, 5, 9], [10, 20, 30], [4, 0, 4]), "a row of no bytes")


def batches_outside_the_memory_are_refused_whole(trial: Trial) -> Iterator[str]:
    pair = trial.pair(64 * KIB, 32 * KIB)
    for what, target, size, region in (
        ("behind the end", 64 * KIB, 1, 0),
        ("across the end", 32 * KIB - 4, 8, 1),
        ("before the start", -8, 16, 0),
        ("of a region that does not exist", 0, 16, 2),
        ("of region -1", 0, 16, -1),
        ("of negative size", 64, -16, 0),
    ):
        outcome = pair.write(TrialRows.of([0, 0], [0, target], [64, size], [0, region]))
        if not outcome.error:
            yield f"a row {what} was written"
        elif not outcome.silent:
            yield f"a row {what} was refused, but not as silent"
        time.sleep(0.02)
        if wrong := pair.receiver.difference():
            yield f"a row {what} was refused, and yet {wrong}"
            return
    yield from pair.land(TrialRows.of([0], [0], [4 * KIB]), "a good batch after refused ones")


def wrong_descriptors_are_refused(trial: Trial) -> Iterator[str]:
    receiver, sender = trial.receiver(64 * KIB), trial.sender()
    sender.ask("sources", 1, 64 * KIB)
    name = receiver.descriptor.get("transport")
    for wrong in (
        {},
        {"transport": name},
        {"transport": name, "regions": [{}]},
        {**receiver.descriptor, "regions": [{"bytes": "many"}]},
    ):
        try:
            sender.ask("connect", wrong)
            yield f"a link was opened with {wrong}"
        except PeerDiedError:
            raise
        except RuntimeError as error:
            if "raised TransportError" not in str(error):
                yield f"a descriptor {wrong} is not refused by TransportError: {error}"


def links_do_not_mix_up_their_receivers(trial: Trial) -> Iterator[str]:
    one = trial.pair(MIB, source_bytes=MIB)
    other = trial.link(trial.receiver(MIB), trial.sender(), MIB)
    back = type(one)(
        other.receiver,
        one.sender,
        one.sender.ask("connect", other.receiver.descriptor),
        one.sources,
    )
    half = 512 * KIB
    yield from one.land(TrialRows.of([0], [0], [MIB]), "the first receiver")
    yield from other.land(TrialRows.of([0], [0], [half]), "the second receiver")
    yield from back.land(TrialRows.of([0], [half], [half]), "the second by the first sender")
    if wrong := one.receiver.difference():
        yield f"a write to the second receiver changed the first: {wrong}"


def closing_twice_is_fine(trial: Trial) -> Iterator[str]:
    pair = trial.pair(64 * KIB)
    yield from pair.land(TrialRows.of([0], [0], [100]), "a first write")
    pair.sender.ask("close_link", pair.link)
    if pair.sender.ask("alive", pair.link):
        yield "a closed link is alive"
    if not pair.write(TrialRows.of([0], [200], [100])).error:
        yield "a closed link writes"
    for process in (pair.sender, pair.receiver):
        process.ask("close")


def the_quota_holds(trial: Trial) -> Iterator[str]:
    pair = trial.pair(8 * MIB, source_bytes=8 * MIB)
    rows = TrialRows.of([0], [0], [8 * MIB])
    quota, slow = 16.0 * MIB, 0.3
    (outcome,) = pair.sender.ask("send", [pair.link], [rows], 30.0, quota)
    pair.receiver.expect(pair.sources, rows)
    if outcome.error or (wrong := pair.receiver.difference()):
        yield f"the page sender does not write: {outcome.error or wrong}"
    elif outcome.seconds < slow:
        yield f"8 MiB took {outcome.seconds:.2f} s with a quota of 16 MiB/s"


SOUND_CHECKS = (
    bytes_arrive_in_their_place_alone,
    thousands_of_small_rows_arrive,
    rows_may_lie_together_on_one_side_only,
    large_batches_arrive,
    a_write_that_ended_has_landed,
    later_writes_win,
    empty_batches_do_nothing,
    batches_outside_the_memory_are_refused_whole,
    wrong_descriptors_are_refused,
    links_do_not_mix_up_their_receivers,
    closing_twice_is_fine,
    the_quota_holds,
)
