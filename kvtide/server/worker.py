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

from kvtide.engine import EngineError
from kvtide.engine.seat import part
from kvtide.models.errors import CheckpointError
from kvtide.server.console import CommandError
from kvtide.server.opening import open_engine
from kvtide.server.orders import follow
from kvtide.server.settings import Settings
from kvtide.server.workers import CUT_OFF, freeze, outlive_nobody, take_seat
from kvtide.spec import SpecError
from kvtide.storage import StoreError
from kvtide.tiers import TierError

REFUSALS = (CheckpointError, CommandError, EngineError, SpecError, StoreError, TierError)


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
    settings, seat = take_seat(words["rank"], Path(words["folder"]), settings)
    serving = open_engine(settings, seat)
    freeze()
    ended = follow(serving.post)
    part()
    return ended


if __name__ == "__main__":
    main()
