"""`kvtide serve`: a model behind OpenAI's API, until told to stop.

SIGTERM and SIGINT drain: no new requests are taken, those that run may finish, then the process
exits with 0. A second signal does not wait.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from typing import Any

from aiohttp import web

from kvtide.server import settings
from kvtide.server.app import App
from kvtide.server.console import CommandError, format_bytes
from kvtide.server.opening import Serving, open_engine
from kvtide.server.service import Service
from kvtide.server.settings import Settings
from kvtide.spec import Tier

_POLL_S = 0.02


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model through the cache, with OpenAI's API",
        description="Every flag is also a KVTIDE_… variable and a key of the --config file.",
        allow_abbrev=False,
    )
    settings.add_flags(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    chosen = settings.read(vars(args), os.environ)
    began = time.monotonic()
    serving = open_engine(chosen)
    _tell(serving, time.monotonic() - began)
    return asyncio.run(_serve(chosen, serving))


def _tell(serving: Serving, seconds: float) -> None:
    cache = serving.engine.cache
    memory = cache.memory
    tiers = {
        tier: sum(
            memory.slot_bytes(anchor) * count.capacity
            for (where, anchor), count in cache.stats().pages.items()
            if where is tier
        )
        for tier in (Tier.DEVICE, Tier.HOST)
    }
    print(
        f"{serving.name} on {cache.config.device}: pages of {memory.page_tokens} tokens, "
        f"{format_bytes(tiers[Tier.DEVICE])} on the device "
        f"(sequences of up to {serving.engine.most_tokens:,} tokens), "
        f"{format_bytes(tiers[Tier.HOST])} on the host; ready after {seconds:.1f} s",
        file=sys.stderr,
        flush=True,
    )


async def _serve(chosen: Settings, serving: Serving) -> int:
    service = Service(serving.engine, chosen.most_requests)
    app = App(chosen, serving, service)
    told = _Told()
    runner = app.runner()
    await runner.setup()
    try:
        site = web.TCPSite(runner, chosen.address, chosen.port)
        try:
            await site.start()
        except OSError as error:
            raise CommandError(
                f"cannot listen on {chosen.address}:{chosen.port} ({error.strerror}); choose "
                "another --port, or 0 for any"
            ) from None
        print(f"listening on {_url(runner)}", file=sys.stderr, flush=True)
        await _serve_until(told, app, service, chosen.drain_seconds)
    finally:
        await service.close()  # Streams that are still open end with an error.
        await runner.cleanup()
    serving.engine.cache.close()
    return 1 if service.broken is not None else 0


def _url(runner: web.AppRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _Told:
    """How often a signal has asked for the end."""

    def __init__(self) -> None:
        self.times = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._again)

    def _again(self) -> None:
        self.times += 1


async def _serve_until(told: _Told, app: App, service: Service, drain_s: float) -> None:
    """Serve until a signal, then until nobody is left; or until the engine breaks."""
    while not told.times and service.broken is None:
        await asyncio.sleep(_POLL_S)
    app.draining = True
    deadline = time.monotonic() + drain_s
    while app.open and told.times < 2 and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
