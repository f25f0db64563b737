"""The `kvtide` command: reads the arguments, calls one room, prints what it says."""

from __future__ import annotations

import argparse
import os
import sys

from kvtide import __version__
from kvtide.cli import (
    bench_command,
    chat_command,
    memory_command,
    plan_command,
    serve_command,
    storage_command,
)
from kvtide.engine.state_check import EngineError
from kvtide.models.model_errors import CheckpointError
from kvtide.planner.charts import ChartError
from kvtide.planner.traces import TraceError
from kvtide.server.command_error import CommandError
from kvtide.server.rank_processes import WorkerLostError
from kvtide.spec import SpecError
from kvtide.storage import StoreError
from kvtide.tiers import TierError

_COMMANDS = (
    serve_command,
    chat_command,
    plan_command,
    memory_command,
    storage_command,
    bench_command,
)
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
