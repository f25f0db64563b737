"""`kvtide top URL`: what a server does, live in the terminal; Ctrl-C ends.

It reads the stream of the live page, and goes on when the server was restarted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress

from rich.console import Console
from rich.live import Live

from kvtide.cli.client import AbsentError, Json, RequestRefusedError, ServerClient, ServerError
from kvtide.cli.console import CommandError
from kvtide.cli.top.top_view import screen

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "KVTIDE_ADMIN_KEY"
PATH = "/admin/live"
RETRY_S = 1.0
KEPT = 240
"""Snapshots whose token rates are remembered."""

REFUSALS = (CommandError,)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = "Tiers, flows, requests and misses of a running server, once a second."
    parser.allow_abbrev = False
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, metavar="URL", help=DEFAULT_URL)
    parser.add_argument(
        "--admin-key", metavar="KEY", help=f"the server's admin key; else {KEY_VARIABLE}"
    )
    parser.add_argument("--once", action="store_true", help="print one snapshot and end")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    console = Console()
    once = args.once or not console.is_terminal
    client = ServerClient(args.url, args.admin_key or os.environ.get(KEY_VARIABLE))
    with suppress(KeyboardInterrupt):
        try:
            asyncio.run(_print_one(client, console) if once else _watch(client, console))
        except AbsentError:
            raise CommandError(
                f"no server answers at {client.url}; run `kvtide serve`, or name another URL"
            ) from None
        except ServerError as error:
            raise CommandError(str(error)) from None
    return 0


async def _print_one(client: ServerClient, console: Console) -> None:
    """The second snapshot: the first one knows no rates."""
    history: list[Json] = []
    async with client:
        async for snapshot in _snapshots(client):
            history.append(snapshot["token_rates"])
            if len(history) == 2:
                console.print(screen(snapshot, history, console.width))
                return


async def _watch(client: ServerClient, console: Console) -> None:
    """Draw every snapshot. Only a server that never answered ends it."""
    history: deque[Json] = deque(maxlen=KEPT)
    last: Json | None = None
    async with client:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                try:
                    async for last in _snapshots(client):
                        history.append(last["token_rates"])
                        live.update(screen(last, [*history], console.width), refresh=True)
                except RequestRefusedError:
                    raise
                except ServerError:
                    if last is None:
                        raise
                    lost = "no answer; trying again"
                    live.update(screen(last, [*history], console.width, lost), refresh=True)
                    await asyncio.sleep(RETRY_S)


async def _snapshots(client: ServerClient) -> AsyncIterator[Json]:
    try:
        async for snapshot in client.stream(PATH):
            yield snapshot
    except RequestRefusedError as error:
        if error.status != 401:
            raise
        raise RequestRefusedError(
            401, f"the server needs its admin key; pass it with --admin-key or in {KEY_VARIABLE}"
        ) from None
