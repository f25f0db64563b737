"""The process of a rank that is not the leader: `kvtide serve` starts it and sends it commands.

A worker that fails prints the reason on its standard output, for the process that started it, and
tells the leader.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from kvtide.engine.rank_topology import leave_ranks, reach_store
from kvtide.server.engine_commands import follow
from kvtide.server.ranks.rank_channels import LeaderChannel, MeetingPlace
from kvtide.server.ranks.rank_group import join_group
from kvtide.server.ranks.rank_nodes import shared_settings
from kvtide.server.ranks.rank_processes import JOIN_S, freeze_gc
from kvtide.server.ranks.step_watch import StepWatch
from kvtide.server.ranks.worker_processes import PEER_LOST
from kvtide.server.settings import Settings
from kvtide.server.setup.engine_setup import REFUSALS, open_engine
from kvtide.transfer.peer.channel import ChannelError


class RankWorker:
    """One rank's process, from its config to its end."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._settings = Settings(**config["settings"])
        self._rank = int(config["rank"])
        self._place = MeetingPlace.from_json(config["meeting"])
        self._channel: LeaderChannel | None = None

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=self._follow_pipe, daemon=True).start()
        try:
            closed = self._work()
        except (*REFUSALS, ChannelError) as refusal:
            self._exit(str(refusal), 2)
        except Exception as error:
            traceback.print_exc()
            peer_lost = isinstance(error, RuntimeError)
            self._exit(f"{type(error).__name__}: {error}", PEER_LOST if peer_lost else 1)
        if not closed:
            os._exit(0)  # The interpreter would wait for the store's threads.

    def _work(self) -> bool:
        """Serve up to `CloseCache`; False if the store has not closed then."""
        settings, place = self._settings, self._place
        hello = {"rank": self._rank, "settings": shared_settings(settings)}
        silence_s = settings.rank_timeout_seconds
        channel = LeaderChannel(place, hello, silence_s, JOIN_S, self._lose_leader)
        self._channel = channel
        store = reach_store(place.host, int(channel.hello["store_port"]))
        settings, topology = join_group(self._rank, settings, store, place.host, place.port)
        serving = open_engine(settings, topology)
        watch = StepWatch(serving.rank.clock, settings.step_timeout_seconds, channel.report_stuck)
        freeze_gc()
        closed = follow(serving.rank)
        watch.close()
        channel.leave("the last command is done")
        leave_ranks()
        return closed

    def _follow_pipe(self) -> None:
        """Pass on signals of the process that started this one, and exit when it is gone."""
        for line in sys.stdin:
            if self._channel is None:
                _leave("a signal came before the leader did", 1)
            self._channel.pass_on(int(line))
        os._exit(1)

    def _lose_leader(self, reason: str) -> None:
        sentence = f"the leader: {reason}"
        print(f"kvtide serve: rank {self._rank} ends: {sentence}", file=sys.stderr, flush=True)
        _leave(sentence, PEER_LOST)

    def _exit(self, reason: str, code: int) -> NoReturn:
        if self._channel is not None:
            self._channel.leave(reason, blameless=code == PEER_LOST)
        _leave(reason, code)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    RankWorker(json.loads(sys.stdin.readline())).run()


def _leave(reason: str, code: int) -> NoReturn:
    """Exit without joining threads: they may wait for ranks that are about to exit."""
    with suppress(BrokenPipeError):
        print(reason, flush=True)
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
