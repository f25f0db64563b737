"""The `kvtide` command: a table of verbs, of which the chosen one is imported and run.

A verb's module has `add`, which gives a parser the verb's arguments, and `REFUSALS`, the errors
that end the command with a sentence and exit code 2. Help and version import no verb: `serve`,
`doctor`, `draft` and `bench` import torch, which takes seconds.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from kvtide import __version__


class Verb(NamedTuple):
    module: str
    help: str


VERBS = {
    "serve": Verb("serve_command", "serve a model through the cache, with OpenAI's API"),
    "chat": Verb("chat_command", "chat with a served model, and see what its cache saves"),
    "top": Verb("top_command", "watch a running server: tiers, flows, requests, misses"),
    "plan": Verb(
        "plan_command", "replay a trace against tiers: hit rates, time saved, bytes moved, plots"
    ),
    "memory": Verb("memory_command", "show a model's pools, their sizes and what a resume needs"),
    "doctor": Verb(
        "doctor_command", "measure this machine: what fits a model, what is misconfigured"
    ),
    "draft": Verb("draft_command", "train a draft for speculative decoding"),
    "storage": Verb("storage_command", "check a store of pages"),
    "bench": Verb("bench_command", "measure what kvtide costs"),
}


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    # No option before the verb takes a value, so the first word that is no option is the verb.
    chosen = next((word for word in words if not word.startswith("-")), None)
    module = _import(chosen) if chosen in VERBS else None
    args = _parser(chosen, module).parse_args(words)
    assert module is not None, "argparse refuses a command line without a verb"
    try:
        return int(args.run(args))
    except module.REFUSALS as refusal:
        print(f"kvtide {chosen}: {refusal}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _import(verb: str) -> ModuleType:
    return importlib.import_module(f"kvtide.cli.{VERBS[verb].module}")


def _parser(chosen: str | None, module: ModuleType | None) -> argparse.ArgumentParser:
    """A parser that lists all verbs and has the arguments of the chosen one."""
    parser = argparse.ArgumentParser(
        prog="kvtide", description="A tiered KV cache for hybrid language models."
    )
    parser.add_argument("--version", action="version", version=f"kvtide {__version__}")
    verbs = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, verb in VERBS.items():
        subparser = verbs.add_parser(name, help=verb.help)
        if module is not None and name == chosen:
            module.add(subparser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
