"""Channels between the leader and other ranks: who is taken, and what the leader hears."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvtide.server.ranks.rank_channels import LeaderChannel, MeetingPlace, RankChannels
from kvtide.server.ranks.step_watch import StuckStep
from kvtide.transfer.peer.channel import ChannelError, WireMessage

WITHIN_S = 60.0


class Heard:
    """What the leader heard, and the reasons for which ranks ended."""

    def __init__(self) -> None:
        self.news: list[tuple[object, ...]] = []
        self.ends: list[str] = []

    def on_stuck(self, rank: int, step: StuckStep) -> None:
        self.news.append(("stuck", rank, step))

    def on_signal(self, number: int) -> None:
        self.news.append(("signal", number))

    def on_lost(self, rank: int, reason: str, blameless: bool) -> None:
        self.news.append(("lost", rank, reason, blameless))

    def until(self, *news: tuple[object, ...]) -> None:
        deadline = time.monotonic() + WITHIN_S
        while self.news != list(news):
            assert time.monotonic() < deadline, self.news
            time.sleep(0.005)


def answer(hello: WireMessage) -> WireMessage:
    if "odd" in hello:
        raise ChannelError("it is odd")
    return {"to": hello["rank"]}


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def channels(heard: Heard) -> Iterator[RankChannels]:
    place = MeetingPlace("127.0.0.1", 0, b"0123456789abcdef")
    made = RankChannels(place, range(1, 3), WITHIN_S, answer, heard)
    yield made
    made.close(0.0)


def joined(place: MeetingPlace, heard: Heard, rank: int, **more: object) -> LeaderChannel:
    hello = {"rank": rank, **more}
    return LeaderChannel(place, hello, WITHIN_S, WITHIN_S, heard.ends.append)


def test_each_rank_is_taken_once(channels: RankChannels, heard: Heard) -> None:
    assert channels.missing(0.0) == [1, 2]
    first = joined(channels.place, heard, 1)
    assert first.hello == {"to": 1}
    strangers = [(1, {}, "rank 1 is not awaited"), (7, {}, "rank 7 is not awaited")]
    for rank, more, says in [*strangers, (2, {"odd": True}, "it is odd")]:
        with pytest.raises(ChannelError, match=f"refused by the peer: {says}"):
            joined(channels.place, heard, rank, **more)
    with pytest.raises(ChannelError, match="the secrets differ"):
        joined(replace(channels.place, secret=b"another one, as long"), heard, 2)
    assert channels.missing(0.0) == [2]
    second = joined(channels.place, heard, 2)
    assert channels.missing(WITHIN_S) == []
    for one in (first, second):
        one.leave("done")


def test_the_leader_hears_of_steps_signals_and_ends(channels: RankChannels, heard: Heard) -> None:
    first, second = (joined(channels.place, heard, rank) for rank in (1, 2))
    step = StuckStep(601.5, "TensorRanks.all_reduce (tensor_ranks.py:34)", True)
    first.report_stuck(step)
    heard.until(("stuck", 1, step))
    second.pass_on(15)
    heard.until(("stuck", 1, step), ("signal", 15))
    heard.news.clear()
    first.leave("its GPU is gone")
    heard.until(("lost", 1, "closed by the peer: its GPU is gone", False))
    second.leave("rank 1 is gone", blameless=True)
    gone = ("lost", 1, "closed by the peer: its GPU is gone", False)
    heard.until(gone, ("lost", 2, "closed by the peer: rank 1 is gone", True))
    assert heard.ends == [], "they left by themselves"


def test_ranks_hear_of_the_leaders_end(channels: RankChannels, heard: Heard) -> None:
    ranks = [joined(channels.place, heard, rank) for rank in (1, 2)]
    assert channels.missing(WITHIN_S) == []
    channels.close(0.0)
    deadline = time.monotonic() + WITHIN_S
    while len(heard.ends) < len(ranks):
        assert time.monotonic() < deadline, heard.ends
        time.sleep(0.005)
    assert set(heard.ends) == {"closed by the peer: the server has ended"}


def test_a_rank_waits_for_a_leader_that_starts_later(heard: Heard) -> None:
    import socket
    import threading

    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = int(reserved.getsockname()[1])
    place, made = MeetingPlace("127.0.0.1", port, b"0123456789abcdef"), list[RankChannels]()

    def start() -> None:
        made.append(RankChannels(place, {1}, WITHIN_S, answer, heard))

    threading.Timer(0.5, start).start()
    rank = joined(place, heard, 1)
    assert rank.hello == {"to": 1}
    rank.leave("done")
    made[0].close(0.0)
    with pytest.raises(ChannelError, match="no connection"):
        LeaderChannel(place, {"rank": 1}, WITHIN_S, 0.3, heard.ends.append)
