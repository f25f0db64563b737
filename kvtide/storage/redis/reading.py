"""Reading objects: what is asked of the server, how far ahead, and what its answers amount to.

A server copies what it sends into a buffer first, and is half as fast once that no longer fits its
processor's cache. So little is asked for ahead, and large objects in pieces. Their length is asked
for before: an object that the server evicted between two pieces is found to be incomplete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.storage.redis.resp import Connection, Said, command
from kvtide.storage.store import MISSING

PIECE_BYTES = 1 << 20
AHEAD_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class ReadCommand:
    """A request, and where its answer goes; None for the length of a large object."""

    request: bytes
    target: memoryview | None

    @property
    def bytes(self) -> int:
        return 0 if self.target is None else len(self.target)


def asks_for(name: bytes, target: memoryview) -> list[ReadCommand]:
    if len(target) <= PIECE_BYTES:
        return [ReadCommand(command(b"GET", name), target)]
    asks = [ReadCommand(command(b"STRLEN", name), None)]
    for start in range(0, len(target), PIECE_BYTES):
        piece = target[start : start + PIECE_BYTES]
        ends = (b"%d" % start, b"%d" % (start + len(piece) - 1))
        asks.append(ReadCommand(command(b"GETRANGE", name, *ends), piece))
    return asks


def read(
    connection: Connection, batch: Sequence[list[ReadCommand]], deadline: float
) -> tuple[list[int], Said | None]:
    """The length of every object, or MISSING; and what the server complained of, if it did."""
    replies = _answers(connection, [ask for asks in batch for ask in asks], deadline)
    lengths, start, fault = [], 0, None
    for asks in batch:
        answers = replies[start : start + len(asks)]
        start += len(asks)
        lengths.append(_length(asks, answers))
        said = next((one for one in answers if isinstance(one, Said)), None)
        if said is not None and said.code != "WRONGTYPE":
            fault = said
    return lengths, fault


def _length(asks: list[ReadCommand], answers: Sequence[int | Said | None]) -> int:
    sizes = [one for one in answers if isinstance(one, int)]
    if len(sizes) < len(answers):
        return MISSING
    if len(sizes) == 1:
        return sizes[0]
    whole, *pieces = sizes
    # An object that is not there has the length 0, and so have its pieces.
    return whole if 0 < whole == sum(pieces) else MISSING


def _answers(
    connection: Connection, asks: Sequence[ReadCommand], deadline: float
) -> list[int | Said | None]:
    """One window of requests is always on its way while another is being answered."""
    windows = _windows([ask.bytes for ask in asks])
    answers: list[int | Said | None] = []
    _send(connection, asks[windows[0]], deadline)
    for window, following in zip(windows, [*windows[1:], None], strict=True):
        if following is not None:
            _send(connection, asks[following], deadline)
        for ask in asks[window]:
            if ask.target is None:
                answers.append(connection.reply(deadline))
            else:
                answers.append(connection.object_into(ask.target, deadline))
    return answers


def _send(connection: Connection, asks: Sequence[ReadCommand], deadline: float) -> None:
    connection.send([b"".join(ask.request for ask in asks)], deadline)


def _windows(sizes: Sequence[int]) -> list[slice]:
    """Cut a batch so that no part asks for more than AHEAD_BYTES."""
    cuts, size = [0], 0
    for n, one in enumerate(sizes):
        if size and size + one > AHEAD_BYTES:
            cuts.append(n)
            size = 0
        size += one
    return [slice(a, b) for a, b in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]
