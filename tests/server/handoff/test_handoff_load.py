"""Many handoffs: the server stays responsive, and nothing is left of them in either process."""

from __future__ import annotations

import gc
import itertools
import os
import random
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.grids import everything
from tests.server.handoff.server_pairs import (
    COMMON,
    ServerPair,
    ServerProcess,
    ask,
    handoff_of,
)
from tests.server.serving import PAGE, VOCABULARY, InProcess, save_model

ROOMS = ("kvtide.engine.handoff", "kvtide.server.handoff", "kvtide.transfer.peer", "kvtide.cache")
"""Rooms whose objects are counted."""
BOUNDED = ("_unwanted", "_gone", "_counts", "ended", "hello")
"""Names and counters of what has ended: as many as there is room for, or one of each kind; and the
fields of one message."""
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""That the event loop's pool may have; it starts them when it needs them."""

_rng = random.Random(31)


def prompt(pages: int) -> list[int]:
    return [_rng.randrange(5, VOCABULARY - 5) for _ in range(pages * PAGE + 3)]


# -- /health --------------------------------------------------------------------------------------

HEALTH_S = 0.1
"""What `/health` may take while handoffs saturate the link."""
SLOWER = 3
"""Or so many times what a server beside them takes that does nothing, for one probe in a hundred:
other processes may have the machine. Nine in ten probes have no such excuse."""
PROBES = 300
PAGES, PROMPTS, CLIENTS = 30, 12, 4
PAGE_BYTES = 128 << 10
"""Of the model below."""


class Waits(NamedTuple):
    """How long `/health` takes: of a half, of nine tenths, and of all but one in a hundred."""

    p50_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, times: list[float]) -> Waits:
        found = statistics.quantiles(times, n=100)
        return cls(found[49], found[89], found[98])


def probed(servers: Sequence[ServerProcess]) -> list[Waits]:
    """All of them in turns, so that the machine is as busy for each."""
    times: list[list[float]] = [[] for _ in servers]
    for _ in range(PROBES):
        for server, mine in zip(servers, times, strict=True):
            began = time.perf_counter()
            assert server.client.get("/health").status == 200
            mine.append(time.perf_counter() - began)
        time.sleep(0.002)
    return [Waits.of(each) for each in times]


@contextmanager
def saturated(pair: ServerPair, prompts: list[list[int]]) -> Iterator[Counter[str]]:
    """Clients ask for prompts that the prefill server has, and the decode server no longer."""
    ends: Counter[str] = Counter()
    over = threading.Event()

    def client(number: int) -> None:
        for tokens in itertools.cycle(prompts[number::CLIENTS]):
            if over.is_set():
                return
            found = ask(pair.decode.client, tokens, max_tokens=1)
            ends[handoff_of(found).get("state", "none")] += 1

    with ThreadPoolExecutor(CLIENTS) as clients:
        working = [clients.submit(client, number) for number in range(CLIENTS)]
        try:
            yield ends
        finally:
            over.set()
    for each in working:
        each.result()


@pytest.mark.full
def test_health_is_answered_while_handoffs_saturate_the_link(tmp_path: Path) -> None:
    model = save_model(
        tmp_path / "model", num_hidden_layers=4, num_key_value_heads=8, num_attention_heads=8,
        hidden_size=128, head_dim=32,
    )  # fmt: skip
    few = ("--device-tokens", str(4 * PAGES * PAGE), "--host-tokens", str(5 * PAGES * PAGE))
    with (
        ServerPair(model, decode_flags=few) as pair,
        closing(ServerProcess((str(model), *COMMON), {})) as bystander,
    ):
        prompts = [prompt(PAGES) for _ in range(PROMPTS)]
        for tokens in prompts:
            ask(pair.prefill.client, tokens, max_tokens=1)
        before = pair.prefill.handoff()["sender"]["written_bytes"]
        assert bystander.client.get("/health").status == 200
        with saturated(pair, prompts) as ends:
            *busy, beside = probed((pair.prefill, pair.decode, bystander))
        written = pair.prefill.handoff()["sender"]["written_bytes"] - before
        print(f"{ends['decoding']} handoffs of {written / 1e6:.0f} MB: {busy}, beside {beside}")
        assert ends["decoding"] >= 10 and not ends["failed"], ends
        assert written >= ends["decoding"] * PAGES * PAGE_BYTES
        for waits in busy:
            assert waits.p50_s <= waits.p90_s <= HEALTH_S
            assert waits.p99_s <= max(HEALTH_S, SLOWER * beside.p99_s)
        pair.settled()


# -- what is left ---------------------------------------------------------------------------------


class Footprint(NamedTuple):
    """What a process has of the system."""

    threads: int
    files: int
    resident_bytes: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return cls(threads, files, pages * os.sysconf("SC_PAGE_SIZE"))


def settled_footprint(server: ServerProcess, most: Footprint | None = None) -> Footprint:
    """Once it is quiet; connections of clients take a moment to end."""
    server.settled()
    deadline = time.monotonic() + 30
    while True:
        found = Footprint.of(server.pid)
        if most is None or found.files <= most.files or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


@pytest.mark.full
def test_thousands_of_handoffs_leave_nothing_in_the_processes(model_folder: Path) -> None:
    """The caches are small, so that the first handoffs fill them."""
    count, allowed = 10_000, 24 << 20
    sizes = ("--device-tokens", "1024", "--host-ratio", "4", "--max-running", "8")
    with (
        ServerPair(model_folder, prefill_flags=sizes, decode_flags=sizes) as pair,
        ThreadPoolExecutor(8) as clients,
    ):

        def one(number: int) -> str:
            tokens = [number % 300, number // 300, *prompt(4)]
            if number % 7 == 0:  # The client hangs up.
                pair.asking(tokens, max_tokens=8).leave()
                return "left"
            return str(handoff_of(ask(pair.decode.client, tokens, max_tokens=2)).get("state"))

        list(clients.map(one, range(100)))
        servers = (pair.prefill, pair.decode)
        before = [settled_footprint(server) for server in servers]
        ends = Counter(clients.map(one, range(100, 100 + count)))
        after = [settled_footprint(s, was) for s, was in zip(servers, before, strict=True)]
        assert ends["decoding"] > 0.8 * count, ends
        for was, now in zip(before, after, strict=True):
            print(f"{count} handoffs: {was} -> {now}")
            assert now.threads <= was.threads + POOL_THREADS and now.files <= was.files
            assert now.resident_bytes - was.resident_bytes < allowed
        assert pair.decode.handoff()["free_tail_rows"] == 8


def counted() -> Counter[str]:
    """Objects of handoffs that are alive, and the sizes of all that their owners hold."""
    gc.collect()
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        if not str(kind.__module__).startswith(ROOMS):
            continue
        found[kind.__qualname__] += 1
        for name, value in getattr(each, "__dict__", {}).items():
            if name not in BOUNDED and isinstance(value, (dict, list, set, deque)):
                found[f"{kind.__qualname__}.{name}"] += len(value)
    return found


@pytest.mark.full
def test_every_end_of_a_handoff_lets_go_of_all_its_objects(
    serve: Callable[..., InProcess], model_folder: Path
) -> None:
    """Both servers in this process: handed over, refused, hung up, declined, expired."""
    sizes: dict[str, Any] = {"device_tokens": 1024, "host_ratio": 4.0, "max_running": 4}
    prefill = serve(role="prefill", deterministic=True, handoff_timeout_seconds=0.5, **sizes)
    decode = serve(
        role="decode", prefill_from=prefill.url, handoff_min_tokens=16, deterministic=True, **sizes
    )
    info = prefill.client.get("/server_info").json()["handoff"]
    rooms = itertools.count(1)

    def play() -> None:
        place = {"bootstrap_host": info["host"], "bootstrap_port": info["port"]}
        known = prompt(4)
        for _ in range(2):
            ask(decode.client, known)
        for _ in range(8):
            decode.client.start("/v1/completions", prompt=prompt(9), max_tokens=400).leave()
        for pages in (3, 5, 20):
            room = {**place, "bootstrap_room": next(rooms)}
            tokens = prompt(pages)
            ask(prefill.client, tokens, max_tokens=1, **room)
            ask(decode.client, tokens, **room)
            room = {**place, "bootstrap_room": next(rooms)}
            ask(prefill.client, prompt(pages), max_tokens=1, **room)  # No peer comes for it.
            room = {**place, "bootstrap_room": next(rooms)}
            ask(prefill.client, prompt(pages), max_tokens=1, **room)
            ask(decode.client, prompt(pages), **room)  # It has another prompt.
        prefill.until(lambda report: not report["handoff"]["outgoing"])
        for server in (prefill, decode):
            server.settled()

    play()
    before = counted()
    for _ in range(10 if everything() else 2):
        play()
    grown = counted() - before
    assert not {name: count for name, count in grown.items() if count > 2}, grown
