"""The process of a rank that is not the leader: `kvtide serve` starts it and sends it commands.

A worker that fails prints the reason on its standard output, which the leader reports.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from kvtide.engine.rank_topology import leave_ranks
from kvtide.server.engine_commands import follow
from kvtide.server.ranks.rank_channels import LeaderChannel, MeetingPlace
from kvtide.server.ranks.rank_processes import PEER_LOST, exit_with_leader, freeze_gc, join_topology
from kvtide.server.ranks.step_watch import StepWatch
from kvtide.server.settings import Settings
from kvtide.server.setup.engine_setup import REFUSALS, open_engine
from kvtide.transfer.peer.channel import ChannelError

CONNECT_S = 60.0
"""The leader listens before it starts a worker."""


class RankWorker:
    """One rank's process, from its config to its end."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._settings = Settings(**config["settings"])
        self._rank, self._folder = int(config["rank"]), Path(config["folder"])
        self._meeting = MeetingPlace.from_json(config["meeting"])
        self._channel: LeaderChannel | None = None

    def run(self) -> None:
        exit_with_leader(sys.stdin, self._folder)
        try:
            closed = self._work()
        except REFUSALS as refusal:
            self._exit(str(refusal), 2)
        except ChannelError as error:
            self._exit(str(error), 1)
        except Exception as error:
            traceback.print_exc()
            peer_lost = isinstance(error, RuntimeError)
            if peer_lost:
                shutil.rmtree(self._folder, ignore_errors=True)  # The leader may have died.
            self._exit(f"{type(error).__name__}: {error}", PEER_LOST if peer_lost else 1)
        if not closed:
            os._exit(0)  # The interpreter would wait for the store's threads.

    def _work(self) -> bool:
        """Serve up to `CloseCache`; False if the store has not closed then."""
        limit_s = self._settings.rank_timeout_seconds
        self._channel = LeaderChannel(
            self._meeting, {"rank": self._rank}, limit_s, CONNECT_S, self._lose_leader
        )
        settings, topology = join_topology(self._rank, self._folder, self._settings)
        serving = open_engine(settings, topology)
        watch = StepWatch(
            serving.rank.clock, settings.step_timeout_seconds, self._channel.report_stuck
        )
        freeze_gc()
        closed = follow(serving.rank)
        watch.close()
        self._channel.leave("the last command is done")
        leave_ranks()
        return closed

    def _lose_leader(self, reason: str) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
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
