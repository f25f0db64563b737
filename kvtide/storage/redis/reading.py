"""Reading objects: commands, read-ahead, and the lengths that the replies add up to.

A server copies its replies into a buffer first, and is half as fast once that no longer fits its
processor's cache. So the read-ahead is short, and large objects come in pieces. Their length is
read first: an object that the server evicted between two pieces is found to be incomplete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.storage.redis.resp import Connection, ErrorReply, command
from kvtide.storage.store import MISSING

PIECE_BYTES = 1 << 20
AHEAD_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class ReadCommand:
    """A request, and the target of its reply; None for the length of a large object."""

    request: bytes
    target: memoryview | None

    @property
    def bytes(self) -> int:
        return 0 if self.target is None else len(self.target)


def commands_for(name: bytes, target: memoryview) -> list[ReadCommand]:
    if len(target) <= PIECE_BYTES:
        return [ReadCommand(command(b"GET", name), target)]
    commands = [ReadCommand(command(b"STRLEN", name), None)]
    for start in range(0, len(target), PIECE_BYTES):
        piece = target[start : start + PIECE_BYTES]
        ends = (b"%d" % start, b"%d" % (start + len(piece) - 1))
        commands.append(ReadCommand(command(b"GETRANGE", name, *ends), piece))
    return commands


def read(
    connection: Connection, batch: Sequence[list[ReadCommand]], deadline: float
) -> tuple[list[int], ErrorReply | None]:
    """The length of every object, or MISSING; and an error reply, if there was one."""
    replies = _answers(connection, [one for commands in batch for one in commands], deadline)
    lengths, start, fault = [], 0, None
    for commands in batch:
        answers = replies[start : start + len(commands)]
        start += len(commands)
        lengths.append(_length(commands, answers))
        error = next((one for one in answers if isinstance(one, ErrorReply)), None)
        if error is not None and error.code != "WRONGTYPE":
            fault = error
    return lengths, fault


def _length(commands: list[ReadCommand], answers: Sequence[int | ErrorReply | None]) -> int:
    sizes = [one for one in answers if isinstance(one, int)]
    if len(sizes) < len(answers):
        return MISSING
    if len(sizes) == 1:
        return sizes[0]
    whole, *pieces = sizes
    # An object that is not there has the length 0, and so have its pieces.
    return whole if 0 < whole == sum(pieces) else MISSING


def _answers(
    connection: Connection, commands: Sequence[ReadCommand], deadline: float
) -> list[int | ErrorReply | None]:
    """One window of requests is always in flight while another is being answered."""
    windows = _windows([one.bytes for one in commands])
    answers: list[int | ErrorReply | None] = []
    _send(connection, commands[windows[0]], deadline)
    for window, following in zip(windows, [*windows[1:], None], strict=True):
        if following is not None:
            _send(connection, commands[following], deadline)
        for one in commands[window]:
            if one.target is None:
                answers.append(connection.reply(deadline))
            else:
                answers.append(connection.object_into(one.target, deadline))
    return answers


def _send(connection: Connection, commands: Sequence[ReadCommand], deadline: float) -> None:
    connection.send([b"".join(one.request for one in commands)], deadline)


def _windows(sizes: Sequence[int]) -> list[slice]:
    """Cut a batch so that no part asks for more than AHEAD_BYTES."""
    cuts, size = [0], 0
    for n, one in enumerate(sizes):
        if size and size + one > AHEAD_BYTES:
            cuts.append(n)
            size = 0
        size += one
    return [slice(a, b) for a, b in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]
