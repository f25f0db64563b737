"""The `kvtide` command: reads the arguments, calls one room, prints what it says."""

from __future__ import annotations

import argparse
import os
import sys

from kvtide import __version__
from kvtide.engine.kept import EngineError
from kvtide.models.errors import CheckpointError
from kvtide.planner.charts import ChartError
from kvtide.planner.traces import TraceError
from kvtide.server import cmd_bench, cmd_chat, cmd_memory, cmd_plan, cmd_serve, cmd_storage
from kvtide.server.console import CommandError
from kvtide.server.workers import WorkerLostError
from kvtide.spec import SpecError
from kvtide.storage import StoreError
from kvtide.tiers import TierError

_COMMANDS = (cmd_serve, cmd_chat, cmd_plan, cmd_memory, cmd_storage, cmd_bench)
_REFUSALS = (
    ChartError, CheckpointError, CommandError, EngineError, SpecError, StoreError, TierError,
    TraceError, WorkerLostError,
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvtide", description="A tiered KV cache for hybrid language models."
    )
    parser.add_argument("--version", action="version", version=f"kvtide {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add(commands)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except _REFUSALS as refusal:
        print(f"kvtide {args.command}: {refusal}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
