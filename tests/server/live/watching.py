"""Viewers of a server: the frames of its stream, as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.server.serving import InProcess

Json = Any


@contextmanager
def frames(server: InProcess) -> Iterator[Iterator[Json]]:
    """What one viewer gets; hangs up at the end, and waits until the server knows."""
    publisher = server.app.live.publisher
    before = publisher.viewers
    viewer = server.client.open("GET", "/admin/live")
    until(lambda: publisher.viewers > before)
    events = viewer.events()
    try:
        yield events
    finally:
        viewer.leave()
        events.close()
        until(lambda: publisher.viewers <= before)


def frame(server: InProcess, wanted: Callable[[Json], bool] = lambda frame: True) -> Json:
    """The first frame that is as wanted."""
    deadline = time.monotonic() + 60
    with frames(server) as events:
        for one in events:
            if wanted(one):
                return one
            assert time.monotonic() < deadline, f"never came to be: {one}"
    raise AssertionError("the stream ended")


def until(wanted: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not wanted():
        assert time.monotonic() < deadline, "never came to be"
        time.sleep(0.005)


def hybrid(watched: Callable[..., Any], folder: Path) -> InProcess:
    """A server of DeepSeek-V4: two anchors with sidecars, and one whose pages are on the host."""
    from tests.models.tiny import oracle, prompt

    oracle("deepseek_v4").save_pretrained(folder)
    sizes = {"device_tokens": 256, "host_tokens": 1024, "max_running": 3}
    server: InProcess = watched(model=str(folder), storage="memory:", resident="hot:24", **sizes)
    for seed in (1, 2):
        server.client.complete(prompt(70, seed), max_tokens=3)
    server.settled()
    return server
