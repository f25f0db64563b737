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
from pathlib import Path
from typing import Any, NoReturn

from kvtide.engine.rank_topology import leave_ranks
from kvtide.server.engine_commands import follow
from kvtide.server.ranks.rank_processes import PEER_LOST, exit_with_leader, freeze_gc, join_topology
from kvtide.server.settings import Settings
from kvtide.server.setup.engine_setup import REFUSALS, open_engine


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    config = json.loads(sys.stdin.readline())
    folder = Path(config["folder"])
    exit_with_leader(sys.stdin, folder)
    try:
        closed = _work(config)
    except REFUSALS as refusal:
        _exit(str(refusal), 2)
    except Exception as error:
        traceback.print_exc()
        peer_lost = isinstance(error, RuntimeError)
        if peer_lost:
            shutil.rmtree(folder, ignore_errors=True)  # The leader may have died.
        _exit(f"{type(error).__name__}: {error}", PEER_LOST if peer_lost else 1)
    if not closed:
        os._exit(0)  # The interpreter would wait for the store's threads.


def _exit(reason: str, code: int) -> NoReturn:
    """Exit without joining threads: they may wait for ranks that are about to exit."""
    print(reason, flush=True)
    sys.stderr.flush()
    os._exit(code)


def _work(config: dict[str, Any]) -> bool:
    """Serve up to `CloseCache`; False if the store has not closed then."""
    settings = Settings(**config["settings"])
    settings, topology = join_topology(config["rank"], Path(config["folder"]), settings)
    serving = open_engine(settings, topology)
    freeze_gc()
    closed = follow(serving.rank)
    leave_ranks()
    return closed


if __name__ == "__main__":
    main()
