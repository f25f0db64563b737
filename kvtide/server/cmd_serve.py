"""`kvtide serve`: a model behind OpenAI's API, until told to stop.

SIGTERM and SIGINT drain: no new requests are taken, those that run may finish, what is in line
for storage is written, then the process exits with 0. A second signal does not wait.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any

from aiohttp import web

from kvtide.engine import Engine
from kvtide.server import settings
from kvtide.server.app import App
from kvtide.server.console import CommandError, format_bytes
from kvtide.server.opening import Serving, open_engine
from kvtide.server.service import Service, ServiceEndedError
from kvtide.server.settings import Settings
from kvtide.spec import Tier

_POLL_S = 0.02
CLOSE_S = 1.0
"""What storage gets beyond the time to drain: a moment to let go."""

log = logging.getLogger("kvtide")


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
    # What is here stays. To look for garbage in it would stop the engine for 70 ms now and then.
    gc.collect()
    gc.freeze()
    _tell(serving, time.monotonic() - began)
    code, ended = asyncio.run(_serve(chosen, serving))
    if not ended:
        log.warning("storage has not let go in time; leaving it behind")
        sys.stderr.flush()
        os._exit(code)  # A store may have threads that the interpreter would wait for.
    return code


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
        f"{format_bytes(tiers[Tier.HOST])} on the host; ready after {seconds:.1f} s\n"
        f"{serving.stored}",
        file=sys.stderr,
        flush=True,
    )


async def _serve(chosen: Settings, serving: Serving) -> tuple[int, bool]:
    """The exit code, and whether nothing is left of storage."""
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
        _tell_unwritten(serving)
        ended = serving.engine.cache.close(CLOSE_S if told.times < 2 else 0.0)
    return 1 if service.broken is not None else 0, ended


def _tell_unwritten(serving: Serving) -> None:
    stats = serving.engine.cache.storage.stats()
    if stats is not None and stats.waiting_pages:
        log.warning("%s pages were still in line for storage", f"{stats.waiting_pages:,}")


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

    def in_time() -> bool:
        return told.times < 2 and service.broken is None and time.monotonic() < deadline

    while app.open and in_time():
        await asyncio.sleep(_POLL_S)
    with suppress(ServiceEndedError):
        while in_time() and await service.call(_at_work):
            await asyncio.sleep(_POLL_S)
        if in_time():
            left_s = deadline - time.monotonic()
            await service.call(lambda engine: engine.cache.storage.detach(left_s))
        while in_time() and await service.call(_stores):
            await asyncio.sleep(_POLL_S)


def _at_work(engine: Engine) -> bool:
    """Whether pages are on their way to the host or to storage."""
    return engine.cache.busy or engine.cache.storage.at_work


def _stores(engine: Engine) -> bool:
    return engine.cache.storage.stats() is not None
