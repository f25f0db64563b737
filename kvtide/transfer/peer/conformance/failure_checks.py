"""Checks with peers that are killed or frozen, and with bytes that come late."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from kvtide.transfer.peer.conformance.conformance_peer import (
    Memory,
    Outcome,
    PeerDiedError,
    ReceiverProcess,
    Trial,
    TrialRows,
    WritePair,
    until,
)
from kvtide.transfer.peer.conformance.sound_checks import LATE_S
from kvtide.transfer.peer.process_watch import ProcessWatch

MIB = 1 << 20
TIMEOUT_S = 3.0
"""Of writes to peers that are killed or frozen."""
FILL_S = 0.5
"""So long a sender writes to a frozen receiver: what lies between them takes bytes."""
LATER_S = 10.0
"""So much later a write must have ended, however busy the machine."""
FREE_WRITES = 3
"""More than these end after the receiver froze only if the receiver has no part in them."""
_ORDER = np.random.default_rng(27).permutation(1024) * (16 << 10)
WHOLE = TrialRows.of(_ORDER, _ORDER[::-1], 16 << 10)
"""All memory in rows that no transport can join, so that peers are stopped between two of them."""


class NotApplicableError(Exception):
    """A check that has no meaning for a transport; the message names the reason."""


def _running(trial: Trial) -> tuple[WritePair, int]:
    """A pair whose sender writes the whole memory again and again, and has begun."""
    pair = trial.pair(16 * MIB, source_bytes=16 * MIB)
    number: int = pair.sender.ask("write_for_ever", pair.link, WHOLE, TIMEOUT_S)
    until(lambda: bool(pair.receiver.memory.any()), "the first bytes land")
    return pair, number


def _ended(pair: WritePair, number: int) -> Outcome | None:
    """How a write ended that must have ended by now."""
    outcome: Outcome | None = pair.sender.ask("ended", number, TIMEOUT_S + LATER_S)
    return outcome


def _written(pair: WritePair, rows: TrialRows) -> Outcome | None:
    """The same of a single write."""
    pair.sender.tell("write", pair.link, rows, TIMEOUT_S)
    try:
        outcome: Outcome = pair.sender.answer(TIMEOUT_S + LATER_S)
    except PeerDiedError:
        return None
    return outcome


def _no_byte_lands(
    receiver: ReceiverProcess, when: str, before: Memory | None = None
) -> Iterator[str]:
    """From now on, or since a snapshot."""
    before = receiver.snapshot() if before is None else before
    deadline = time.monotonic() + LATE_S
    while time.monotonic() < deadline:
        if changed := int((receiver.memory != before).sum()):
            yield f"{changed:,} bytes landed {when}"
            return
        time.sleep(0.05)


# -- receivers ------------------------------------------------------------------------------


def a_killed_receiver_fails_writes(trial: Trial) -> Iterator[str]:
    pair = trial.pair(16 * MIB, source_bytes=16 * MIB)
    yield from pair.land(TrialRows.of([0], [0], [100]), "a first write")
    pair.receiver.kill()
    outcome = _written(pair, WHOLE)
    if outcome is None:
        yield "a write to a killed receiver does not end"
    elif not outcome.error:
        yield "a write to a killed receiver succeeds"
    elif pair.sender.ask("alive", pair.link):
        yield "the link to a killed receiver is alive after a failed write"


def a_receiver_killed_during_a_write_fails_it(trial: Trial) -> Iterator[str]:
    pair, number = _running(trial)
    pair.receiver.kill()
    if _ended(pair, number) is None:
        yield "a write does not end when its receiver is killed"


def a_frozen_receiver_holds_no_write_past_its_deadline(trial: Trial) -> Iterator[str]:
    pair = trial.pair(16 * MIB, source_bytes=16 * MIB)
    yield from pair.land(TrialRows.of([0], [0], [100]), "a first write")
    pair.receiver.freeze()
    outcome = _written(pair, WHOLE)
    if outcome is None:
        yield f"a write to a frozen receiver does not end, with a time-out of {TIMEOUT_S:g} s"
        return
    if not outcome.error:
        pair.receiver.expect(pair.sources, WHOLE)
        if wrong := pair.receiver.difference():
            yield f"a write to a frozen receiver succeeds, but {wrong}"
    yield from _true_to_its_word(pair, outcome)


def a_receiver_frozen_during_a_write_is_reported_truly(trial: Trial) -> Iterator[str]:
    pair, number = _running(trial)
    pair.receiver.freeze()
    first, deadline = pair.sender.ask("written", number), time.monotonic() + TIMEOUT_S + LATER_S
    while (outcome := pair.sender.ask("ended", number, 0.1)) is None:
        if pair.sender.ask("written", number) > first + FREE_WRITES:
            raise NotApplicableError("it writes to a frozen receiver as to any other")
        if time.monotonic() > deadline:
            yield f"a write does not end, with a time-out of {TIMEOUT_S:g} s"
            return
    yield from _true_to_its_word(pair, outcome)


def _true_to_its_word(pair: WritePair, outcome: Outcome) -> Iterator[str]:
    """A write that failed silently writes no more; after any other failure the link is dead."""
    if outcome.error and not outcome.silent and pair.sender.ask("alive", pair.link):
        yield "a link is alive after a write that failed and is not silent"
    before = pair.receiver.snapshot()
    pair.receiver.resume()
    pair.receiver.ask("identity")
    if outcome.silent:
        yield from _no_byte_lands(pair.receiver, "after a write was over, and silent", before)


def a_link_may_be_closed_during_a_write(trial: Trial) -> Iterator[str]:
    pair, number = _running(trial)
    pair.sender.ask("close_link", pair.link)
    outcome = _ended(pair, number)
    if outcome is None:
        yield "a write goes on over a closed link"
    elif outcome.silent:
        yield from _no_byte_lands(pair.receiver, "after a write was over, and silent")


def a_frozen_receiver_holds_up_no_other(trial: Trial) -> Iterator[str]:
    frozen = trial.pair(16 * MIB, source_bytes=16 * MIB)
    yield from frozen.land(TrialRows.of([0], [0], [100]), "a first write")
    other = trial.receiver(16 * MIB)
    links = [frozen.link, frozen.sender.ask("connect", other.descriptor)]
    frozen.receiver.freeze()
    first, second = frozen.sender.ask("send", links, [WHOLE, WHOLE], TIMEOUT_S, None)
    other.expect(frozen.sources, WHOLE)
    if second.error or (wrong := other.difference()):
        yield f"a write beside one to a frozen receiver fails: {second.error or wrong}"
    elif first.error and second.seconds > 0.75 * first.seconds:
        yield (
            f"a write took {second.seconds:.1f} s beside one to a frozen receiver, which took "
            f"{first.seconds:.1f} s"
        )


# -- senders --------------------------------------------------------------------------------


def a_killed_sender_leaves_a_sound_receiver(trial: Trial) -> Iterator[str]:
    pair, _ = _running(trial)
    watch = ProcessWatch(pair.sender.ask("identity"))
    pair.sender.kill()
    until(lambda: not watch.alive(), "the sender's death is seen")
    watch.close()
    descriptor = pair.receiver.ask("revoke") or pair.receiver.descriptor
    yield from _no_byte_lands(pair.receiver, "after the sender was killed and revoked")
    yield from _next_sender(trial, pair.receiver, descriptor)


def no_byte_of_a_killed_sender_lands_once_it_is_silent(trial: Trial) -> Iterator[str]:
    """The receiver is frozen while the sender writes and is killed. It revokes when it continues;
    where it cannot, the sender's death alone has to end the writes."""
    pair = trial.pair(16 * MIB, source_bytes=16 * MIB)
    yield from pair.land(TrialRows.of([0], [0], [100]), "a first write")
    watch = ProcessWatch(pair.sender.ask("identity"))
    pair.receiver.freeze()
    pair.sender.tell("write", pair.link, WHOLE, TIMEOUT_S)
    time.sleep(FILL_S)
    pair.sender.kill()
    until(lambda: not watch.alive(), "the sender's death is seen")
    watch.close()
    before = pair.receiver.snapshot()
    pair.receiver.tell("revoke")
    pair.receiver.resume()
    descriptor = pair.receiver.answer()
    if descriptor is None:
        yield from _no_byte_lands(pair.receiver, "after the sender was dead", before)
    else:
        yield from _no_byte_lands(pair.receiver, "after a killed sender was revoked")
    yield from _next_sender(trial, pair.receiver, descriptor or pair.receiver.descriptor)


def _next_sender(
    trial: Trial, receiver: ReceiverProcess, descriptor: dict[str, object]
) -> Iterator[str]:
    receiver.descriptor = descriptor
    pair = trial.link(receiver, trial.sender(), 16 * MIB)
    yield from pair.land(WHOLE, "a new sender")


# -- revocation -----------------------------------------------------------------------------


def _revoked(pair: WritePair) -> dict[str, object]:
    descriptor: dict[str, object] | None = pair.receiver.answer()
    if descriptor is None:
        raise NotApplicableError("it declares that it cannot revoke")
    return descriptor


def no_byte_of_a_failed_write_lands_after_a_revocation(trial: Trial) -> Iterator[str]:
    """The receiver is frozen, the sender gives up, and the receiver revokes when it continues."""
    pair = trial.pair(16 * MIB, source_bytes=16 * MIB)
    yield from pair.land(TrialRows.of([0], [0], [100]), "a first write")
    pair.receiver.freeze()
    outcome = _written(pair, WHOLE)
    pair.receiver.tell("revoke")
    pair.receiver.resume()
    descriptor = _revoked(pair)
    yield from _no_byte_lands(pair.receiver, "after the revocation")
    if outcome is None:
        yield "the write did not end"
        return
    yield from _next_sender(trial, pair.receiver, descriptor)


def no_byte_of_a_frozen_sender_lands_after_a_revocation(trial: Trial) -> Iterator[str]:
    """The sender is frozen in the middle of a write, and continues after the revocation."""
    pair, number = _running(trial)
    pair.sender.freeze()
    pair.receiver.tell("revoke")
    descriptor = _revoked(pair)
    before = pair.receiver.snapshot()
    pair.sender.resume()
    when = "after the revocation, of a sender that was frozen"
    yield from _no_byte_lands(pair.receiver, when, before)
    if _ended(pair, number) is None:
        yield "a write goes on after the revocation"
    yield from _next_sender(trial, pair.receiver, descriptor)


def an_old_link_is_dead_after_a_revocation(trial: Trial) -> Iterator[str]:
    pair = trial.pair(16 * MIB, source_bytes=16 * MIB)
    yield from pair.land(TrialRows.of([0], [0], [100]), "a first write")
    pair.receiver.tell("revoke")
    descriptor = _revoked(pair)
    outcome = _written(pair, WHOLE)
    if outcome is None or not outcome.error:
        yield "a write over a revoked link " + ("succeeds" if outcome else "does not end")
    if wrong := pair.receiver.difference():
        yield f"a write over a revoked link changed memory: {wrong}"
        return
    yield from _next_sender(trial, pair.receiver, descriptor)


FAILURE_CHECKS = (
    a_killed_receiver_fails_writes,
    a_receiver_killed_during_a_write_fails_it,
    a_frozen_receiver_holds_no_write_past_its_deadline,
    a_receiver_frozen_during_a_write_is_reported_truly,
    a_link_may_be_closed_during_a_write,
    a_frozen_receiver_holds_up_no_other,
    a_killed_sender_leaves_a_sound_receiver,
    no_byte_of_a_killed_sender_lands_once_it_is_silent,
    no_byte_of_a_failed_write_lands_after_a_revocation,
    no_byte_of_a_frozen_sender_lands_after_a_revocation,
    an_old_link_is_dead_after_a_revocation,
)
