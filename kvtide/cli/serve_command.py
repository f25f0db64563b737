"""`kvtide serve`: a model behind OpenAI's API, until told to stop.

SIGTERM and SIGINT drain: no new requests are taken, those that run may finish, what is in line
for storage is written, then the process exits with 0. A second signal does not wait.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from contextlib import suppress

from aiohttp import web

from kvtide.byte_sizes import format_bytes
from kvtide.cli.console import CommandError
from kvtide.engine import Engine
from kvtide.server import engine_setup, settings
from kvtide.server.app import App
from kvtide.server.engine_commands import Close, Detach, Leader
from kvtide.server.engine_setup import Serving, check_ranks, open_engine
from kvtide.server.rank_processes import RankProcesses, WorkerLostError, freeze
from kvtide.server.service import Service, ServiceEndedError
from kvtide.server.settings import Settings
from kvtide.spec import Tier

_POLL_S = 0.02
CLOSE_S = 1.0
"""What storage gets beyond the time to drain: a moment to let go."""
STEP_S, HURRIED_STEP_S = 60.0, 5.0
"""What the last step gets if it may wait for other ranks; after a second signal."""

REFUSALS = (*engine_setup.REFUSALS, CommandError, WorkerLostError)

log = logging.getLogger("kvtide")


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = "Every flag is also a KVTIDE_… variable and a key of the --config file."
    parser.allow_abbrev = False
    settings.add_flags(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    chosen = settings.read(vars(args), os.environ)
    began = time.monotonic()
    check_ranks(chosen)
    with RankProcesses(chosen) as workers:
        serving = _opened(chosen, workers)
        freeze()
        _tell(serving, time.monotonic() - began)
        code, ended = asyncio.run(_serve(chosen, serving, workers))
    if not ended:
        sys.stderr.flush()
        os._exit(code)  # A store may have threads that the interpreter would wait for.
    return code


def _opened(chosen: Settings, workers: RankProcesses) -> Serving:
    """All ranks are ready, or one of them says why it cannot be."""
    try:
        return open_engine(*workers.topology(chosen))
    except RuntimeError:
        workers.check()
        raise


def _tell(serving: Serving, seconds: float) -> None:
    cache = serving.engine.cache
    memory = cache.memory
    tiers = {
        tier: sum(
            memory.kept_in(tier).slot_bytes(anchor) * count.capacity
            for (where, anchor), count in cache.stats().pages.items()
            if where is tier
        )
        for tier in (Tier.DEVICE, Tier.HOST)
    }
    ranks = serving.post.topology.ranks
    each = f" of each of {ranks} ranks" if ranks > 1 else ""
    print(
        f"{serving.name} on {cache.config.device}: pages of {memory.page_tokens} tokens, "
        f"{format_bytes(tiers[Tier.DEVICE])} on the device "
        f"(sequences of up to {serving.engine.max_sequence_tokens:,} tokens), "
        f"{format_bytes(tiers[Tier.HOST])} on the host{each}; ready after {seconds:.1f} s\n"
        f"{serving.stored}",
        file=sys.stderr,
        flush=True,
    )


async def _serve(chosen: Settings, serving: Serving, workers: RankProcesses) -> tuple[int, bool]:
    """The exit code, and whether nothing is left of storage."""
    leader = Leader(serving.post)
    service = Service(leader, chosen.max_requests)
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
        await _serve_until(told, app, service, chosen.drain_seconds, workers)
    finally:
        ended = await _end(leader, service, runner, workers, told)
    return 1 if service.broken is not None else 0, ended


async def _end(
    leader: Leader, service: Service, runner: web.AppRunner, workers: RankProcesses, told: _Told
) -> bool:
    """Whether nothing is left. Ranks that no longer do the same are left as they are."""
    began, several = time.monotonic(), leader.topology.ranks > 1

    def patient() -> bool:
        limit_s = STEP_S if told.times < 2 else HURRIED_STEP_S
        return not several or time.monotonic() - began < limit_s

    if workers.lost is not None:
        log.error("%s", workers.lost)
        service.give_up(WorkerLostError(workers.lost))
        await runner.cleanup()
        return False
    if not await service.close(patient):  # Streams that are still open end with an error.
        log.error("a rank does not answer; all ranks end")
        service.give_up(WorkerLostError("a rank does not answer"))
    await runner.cleanup()
    if service.broken is not None and several:
        return False
    _tell_unwritten(leader.engine)
    workers.told = True
    ended = leader.do(Close(CLOSE_S if told.times < 2 else 0.0))
    if not ended:
        log.warning("storage has not let go in time; leaving it behind")
    return ended


def _tell_unwritten(engine: Engine) -> None:
    stats = engine.cache.storage.stats()
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


async def _serve_until(
    told: _Told, app: App, service: Service, drain_s: float, workers: RankProcesses
) -> None:
    """Serve until a signal, then until nobody is left; or until the engine breaks."""

    def in_order() -> bool:
        return service.broken is None and workers.lost is None

    while not told.times and in_order():
        await asyncio.sleep(_POLL_S)
    if not in_order():
        await asyncio.to_thread(workers.settle)
    app.draining = True
    deadline = time.monotonic() + drain_s

    def in_time() -> bool:
        return told.times < 2 and in_order() and time.monotonic() < deadline

    # The engine may be in a step that has no end: it is asked, and not waited for.
    drained = asyncio.ensure_future(_drained(app, service, deadline))
    while in_time() and not drained.done():
        await asyncio.sleep(_POLL_S)
    drained.cancel()
    with suppress(ServiceEndedError, asyncio.CancelledError):
        await drained


async def _drained(app: App, service: Service, deadline: float) -> None:
    """Nobody is left, and what was on its way to storage is there."""
    while app.open:
        await asyncio.sleep(_POLL_S)
    while await service.call(_at_work):
        await asyncio.sleep(_POLL_S)
    await service.order(Detach(deadline - time.monotonic()))
    while await service.call(_stores):
        await asyncio.sleep(_POLL_S)


def _at_work(engine: Engine) -> bool:
    """Whether pages are on their way to the host or to storage."""
    return engine.cache.busy or engine.cache.storage.at_work


def _stores(engine: Engine) -> bool:
    return engine.cache.storage.stats() is not None
