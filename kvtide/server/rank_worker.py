"""A rank that is not the leader: `kvtide serve` starts it, tells it what it is, and leads it.

Its last words, if it cannot go on, are for the leader, who says them to people.
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
from kvtide.server.engine_setup import REFUSALS, open_engine
from kvtide.server.rank_processes import CUT_OFF, freeze, outlive_nobody, take_seat
from kvtide.server.settings import Settings


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    words = json.loads(sys.stdin.readline())
    folder = Path(words["folder"])
    outlive_nobody(sys.stdin, folder)
    try:
        ended = _work(words)
    except REFUSALS as refusal:
        _leave(str(refusal), 2)
    except Exception as error:
        traceback.print_exc()
        cut_off = isinstance(error, RuntimeError)
        if cut_off:
            shutil.rmtree(folder, ignore_errors=True)  # It may be the leader that is gone.
        _leave(f"{type(error).__name__}: {error}", CUT_OFF if cut_off else 1)
    if not ended:
        os._exit(0)  # A store may have threads that the interpreter would wait for.


def _leave(words: str, code: int) -> NoReturn:
    """Whatever else waits here waits for ranks that are about to end."""
    print(words, flush=True)
    sys.stderr.flush()
    os._exit(code)


def _work(words: dict[str, Any]) -> bool:
    settings = Settings(**words["settings"])
    settings, topology = take_seat(words["rank"], Path(words["folder"]), settings)
    serving = open_engine(settings, topology)
    freeze()
    ended = follow(serving.post)
    leave_ranks()
    return ended


if __name__ == "__main__":
    main()
