"""Rounds of one load on an engine alone and over HTTP, alternately, in one process.

The server is the one of `kvtide serve`: service, application and event loop, on the same engine
that the rounds before and after it step by themselves.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from aiohttp import web

import kvtide
from kvtide.bench.conversations import WARM_UP, Load
from kvtide.bench.http.engine_users import ask_all
from kvtide.bench.http.http_users import UserSpec
from kvtide.bench.http.turn_times import Round, TurnTimes
from kvtide.engine import Engine, RequestParams
from kvtide.server.app import App
from kvtide.server.engine_commands import Leader
from kvtide.server.handoff.server_handoff import ServerHandoff
from kvtide.server.service import Service
from kvtide.server.settings import Settings
from kvtide.server.setup.engine_setup import Serving
from kvtide.spec import Tier

DRAIN_S = 120.0
USERS_OF_A_PROCESS = 256
"""A client process reads the streams of so many users without being busy all the time."""


MAX_LINE = 1 << 28
"""Bytes of what a client process has measured."""


class LoadWay(Enum):
    ENGINE = "engine alone"
    HTTP = "over HTTP"


class ClientError(RuntimeError):
    """A client process failed; the message is what it printed."""


@dataclass(frozen=True, slots=True)
class ServedBed:
    """A server's settings and what it opened; the engine is at rest between two rounds."""

    settings: Settings
    serving: Serving

    @property
    def engine(self) -> Engine:
        return self.serving.engine


def measure(
    bed: ServedBed, load: Load, rounds: int, on_round: Callable[[], object]
) -> dict[LoadWay, list[Round]]:
    """Each round both ways, after a warm-up that is not counted."""
    found: dict[LoadWay, list[Round]] = {way: [] for way in LoadWay}
    for way in LoadWay:
        _run(bed, replace(load, users=min(8, load.users), turns=1), WARM_UP, way)
    for number in range(rounds):
        for way in reversed(LoadWay) if number % 2 else LoadWay:
            found[way].append(_run(bed, load, number, way))
            on_round()
    return found


def _run(bed: ServedBed, load: Load, round_: int, way: LoadWay) -> Round:
    """A round with an empty cache but for what all users share."""
    engine = bed.engine
    _flush(engine)
    _prefill(engine, tuple(load.system(round_)))
    steps, began = sum(engine.steps_by_kind.values()), time.process_time()
    client_cpu_s: list[float] = []
    if way is LoadWay.ENGINE:
        turns = ask_all(engine, load, round_)
    else:
        turns, client_cpu_s = asyncio.run(_over_http(bed, load, round_))
    return Round(
        tuple(turns),
        time.process_time() - began,
        tuple(client_cpu_s),
        sum(engine.steps_by_kind.values()) - steps,
    )


def _flush(engine: Engine) -> None:
    assert engine.cache.drain(DRAIN_S), "transfers do not end"
    for tier in (Tier.DEVICE, Tier.HOST):
        engine.cache.flush(tier)


def _prefill(engine: Engine, prompt: tuple[int, ...]) -> None:
    engine.submit(RequestParams(prompt, 1))
    while not engine.idle:
        engine.step()


# -- over HTTP --------------------------------------------------------------------------------


async def _over_http(
    bed: ServedBed, load: Load, round_: int
) -> tuple[list[TurnTimes], list[float]]:
    rank = bed.serving.rank
    service = Service(Leader(rank), bed.settings.max_waiting)
    handoff = ServerHandoff(service, rank, bed.settings.handoff)
    app = App(bed.settings, bed.serving, service, handoff)
    runner = app.runner()
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        specs = [
            UserSpec(
                runner.addresses[0][1],
                load,
                round_,
                first,
                min(load.users, first + USERS_OF_A_PROCESS),
            )
            for first in range(0, load.users, USERS_OF_A_PROCESS)
        ]
        return await _asked(specs)
    finally:
        await service.close()
        await runner.cleanup()


async def _asked(specs: Sequence[UserSpec]) -> tuple[list[TurnTimes], list[float]]:
    """What the users of all client processes have measured, and the CPU time of each process."""
    clients: list[asyncio.subprocess.Process] = []
    turns: list[TurnTimes] = []
    cpu_s: list[float] = []
    try:
        for spec in specs:
            clients.append(await _started(spec))
        for client in clients:
            await _line(client)  # It is connected.
        for client in clients:
            _pipe(client).write(b"go\n")
        for client in clients:
            found = json.loads(await _line(client))
            turns += [TurnTimes(*turn) for turn in found["turns"]]
            cpu_s.append(found["cpu_s"])
    finally:
        for client in clients:
            _pipe(client).close()
            if client.returncode is None and len(cpu_s) < len(clients):
                client.kill()
            await client.wait()
    return turns, cpu_s


async def _started(spec: UserSpec) -> asyncio.subprocess.Process:
    here = str(Path(kvtide.__file__).resolve().parent.parent)
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "kvtide.bench.http.http_users"),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MAX_LINE,
    )
    _pipe(client).write(spec.to_json().encode() + b"\n")
    return client


def _pipe(client: asyncio.subprocess.Process) -> asyncio.StreamWriter:
    assert client.stdin is not None
    return client.stdin


async def _line(client: asyncio.subprocess.Process) -> bytes:
    """What a client process says next; raises what went wrong there."""
    assert client.stdout is not None
    line = await client.stdout.readline()
    if not line:
        raise ClientError("a client process has ended; its traceback is above")
    if line.startswith(b'{"error"'):
        raise ClientError(json.loads(line)["error"])
    return line
