"""`kvtide serve`: a model behind OpenAI's API, until a signal.

SIGTERM and SIGINT drain: the server refuses new requests, finishes the running ones, writes the
pages queued for storage, and exits with 0. A second signal does not wait.
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
from kvtide.server import setting_sources
from kvtide.server.app import App
from kvtide.server.engine_commands import CloseCache, DetachStore, Leader
from kvtide.server.handoff.server_handoff import ServerHandoff
from kvtide.server.kv_events.publishing import publish_kv_events
from kvtide.server.ranks.node_processes import NodeProcesses
from kvtide.server.ranks.rank_nodes import RankNodes
from kvtide.server.ranks.rank_processes import RankProcesses, WorkerLostError, freeze_gc
from kvtide.server.service import Service, ServiceEndedError
from kvtide.server.setting_values import SettingsError
from kvtide.server.settings import Settings
from kvtide.server.setup import engine_setup
from kvtide.server.setup.engine_setup import Serving, check_ranks, open_engine
from kvtide.spec import Tier
from kvtide.transfer.peer.channel import ChannelError

_POLL_S = 0.02
CLOSE_S = 1.0
"""Storage gets this long to close, beyond the time to drain."""
STEP_S, HURRIED_STEP_S = 60.0, 5.0
"""The last step of several ranks gets this long; and this long after a second signal."""

REFUSALS = (*engine_setup.REFUSALS, CommandError, WorkerLostError)

log = logging.getLogger("kvtide")


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = "Every flag is also a KVTIDE_… variable and a key of the --config file."
    parser.allow_abbrev = False
    setting_sources.add_flags(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    chosen = setting_sources.read(vars(args), os.environ)
    began = time.monotonic()
    check_ranks(chosen)
    nodes = RankNodes.of(chosen)
    if nodes.node > 0:
        return NodeProcesses(chosen, nodes).run()
    with RankProcesses(chosen) as workers:
        serving = _open(chosen, workers)
        freeze_gc()
        _print_ready(serving, time.monotonic() - began)
        code, closed = asyncio.run(_serve(chosen, serving, workers))
    if not closed:
        sys.stderr.flush()
        os._exit(code)  # The interpreter would wait for the store's threads.
    return code


def _open(chosen: Settings, workers: RankProcesses) -> Serving:
    """The engine, once all ranks are ready; raises the reason of a rank that fails."""
    try:
        return open_engine(*workers.topology(chosen))
    except RuntimeError:
        workers.check()
        raise


def _print_ready(serving: Serving, seconds: float) -> None:
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
    tiers[Tier.DEVICE] += sum(hot.shape.bytes for hot in cache.hardware.hot.values())
    sentences = (
        *(serving.storage, serving.speculation, serving.residency, serving.batch),
        serving.formats.remark,
    )
    ranks = serving.rank.topology.ranks
    each = f" of each of {ranks} ranks" if ranks > 1 else ""
    print(
        f"{serving.name} on {cache.config.device}: pages of {memory.page_tokens} tokens, "
        f"{format_bytes(tiers[Tier.DEVICE])} on the device "
        f"(sequences of up to {serving.engine.max_sequence_tokens:,} tokens), "
        f"{format_bytes(tiers[Tier.HOST])} on the host{each}; ready after {seconds:.1f} s\n"
        + "\n".join(filter(None, sentences)),
        file=sys.stderr,
        flush=True,
    )


async def _serve(chosen: Settings, serving: Serving, workers: RankProcesses) -> tuple[int, bool]:
    """The exit code, and whether the store has closed."""
    leader = Leader(serving.rank)
    workers.watch_steps(serving.rank.clock)
    service = Service(leader, chosen.max_waiting)
    try:
        handoff = ServerHandoff(service, serving.rank, chosen.handoff)
    except ChannelError as error:
        await service.close()
        raise CommandError(f"{error}; choose another --handoff-host or --handoff-port") from None
    try:
        events = publish_kv_events(chosen.kv_event_settings, service, serving.rank)
    except SettingsError:
        handoff.close()
        await service.close()
        raise
    app = App(chosen, serving, service, handoff, events)
    signals = _Signals()
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
        for part in (handoff, events):
            if part is not None and part.sentence:
                print(part.sentence, file=sys.stderr)
        print(f"listening on {_url(runner)}", file=sys.stderr, flush=True)
        await _serve_until(signals, app, service, chosen.drain_seconds, workers)
    finally:
        await asyncio.to_thread(handoff.close)
        if events is not None:
            await asyncio.to_thread(events.close)
        closed = await _close(leader, service, runner, workers, signals)
    return 1 if service.broken is not None else 0, closed


async def _close(
    leader: Leader,
    service: Service,
    runner: web.AppRunner,
    workers: RankProcesses,
    signals: _Signals,
) -> bool:
    """Close everything; False if a store, or ranks that have diverged, remain open."""
    began, several = time.monotonic(), leader.topology.ranks > 1

    def patient() -> bool:
        limit_s = STEP_S if signals.count < 2 else HURRIED_STEP_S
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
    _warn_unwritten(leader.engine)
    workers.closing = True
    closed = leader.run(CloseCache(CLOSE_S if signals.count < 2 else 0.0))
    if not closed:
        log.warning("storage has not closed in time; the process exits without it")
    return closed


def _warn_unwritten(engine: Engine) -> None:
    stats = engine.cache.storage.stats()
    if stats is not None and stats.waiting_pages:
        log.warning("%s pages were still queued for storage", f"{stats.waiting_pages:,}")


def _url(runner: web.AppRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _Signals:
    """Counts SIGTERM and SIGINT."""

    def __init__(self) -> None:
        self.count = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._received)

    def _received(self) -> None:
        self.count += 1


async def _serve_until(
    signals: _Signals, app: App, service: Service, drain_s: float, workers: RankProcesses
) -> None:
    """Serve until a signal, then drain; or until the engine fails."""

    def healthy() -> bool:
        return service.broken is None and workers.lost is None

    while not signals.count and healthy():
        await asyncio.sleep(_POLL_S)
    if not healthy():
        await asyncio.to_thread(workers.settle)
    app.draining = True
    deadline = time.monotonic() + drain_s

    def in_time() -> bool:
        return signals.count < 2 and healthy() and time.monotonic() < deadline

    # The engine may be in a step that never ends, so the loop does not wait for it.
    drained = asyncio.ensure_future(_drain(app, service, deadline))
    while in_time() and not drained.done():
        await asyncio.sleep(_POLL_S)
    drained.cancel()
    with suppress(ServiceEndedError, asyncio.CancelledError):
        await drained


async def _drain(app: App, service: Service, deadline: float) -> None:
    """Wait until all requests have finished and all queued pages are stored."""
    while app.open_requests:
        await asyncio.sleep(_POLL_S)
    while await service.call(_copying):
        await asyncio.sleep(_POLL_S)
    await service.command(DetachStore(deadline - time.monotonic()))
    while await service.call(_has_store):
        await asyncio.sleep(_POLL_S)


def _copying(engine: Engine) -> bool:
    """Whether pages are being copied to the host or to storage."""
    return engine.cache.busy or engine.cache.storage.at_work


def _has_store(engine: Engine) -> bool:
    return engine.cache.storage.stats() is not None
