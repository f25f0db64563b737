"""The buffer keeps the last batches, within its bounds."""

from __future__ import annotations

from kvtide.server.kv_events.replay_buffer import ReplayBuffer


def numbered(buffer: ReplayBuffer, number: int) -> list[tuple[int, bytes]] | None:
    found = buffer.since(number)
    return None if found is None else list(found)


def test_batches_are_numbered_from_the_first_number_on() -> None:
    buffer = ReplayBuffer(100, 10)
    assert [buffer.add(payload) for payload in (b"a", b"b", b"c")] == [100, 101, 102]
    assert numbered(buffer, 101) == [(101, b"b"), (102, b"c")]
    assert numbered(buffer, 103) == []


def test_what_is_older_than_the_buffer_is_gone() -> None:
    buffer = ReplayBuffer(0, 2)
    for payload in (b"a", b"b", b"c"):
        buffer.add(payload)
    assert buffer.oldest == 1 and numbered(buffer, 0) is None
    assert numbered(buffer, 1) == [(1, b"b"), (2, b"c")]


def test_bytes_are_bounded_but_the_last_batch_stays() -> None:
    buffer = ReplayBuffer(0, 100, max_bytes=10)
    for _ in range(4):
        buffer.add(bytes(4))
    assert buffer.oldest == 2
    buffer.add(bytes(50))
    assert numbered(buffer, 4) == [(4, bytes(50))] and numbered(buffer, 3) is None


def test_an_empty_buffer_has_nothing_to_replay() -> None:
    buffer = ReplayBuffer(5, 2)
    assert numbered(buffer, 5) == [] and numbered(buffer, 4) is None
