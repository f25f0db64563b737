"""Opens the publisher of KV events, whose libraries only a server that publishes needs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Protocol, cast

from kvtide.index import Index
from kvtide.server.kv_events.kv_event_settings import KVEventSettings
from kvtide.server.kv_events.publisher_counts import PublisherCounts
from kvtide.server.setting_values import SettingsError


class EventPublisher(Protocol):
    """What a server sees of `publisher.Publisher`."""

    counts: PublisherCounts
    endpoint: str
    replay_endpoint: str

    def begin(self, index: Index) -> None: ...

    @property
    def waiting(self) -> int: ...

    @property
    def sentence(self) -> str: ...

    def close(self) -> None: ...


def open_publisher(
    settings: KVEventSettings, index: Index, read_anew: Callable[[], None]
) -> EventPublisher:
    """Bind the sockets and start the thread; raises `SettingsError`."""
    try:
        module = import_module("kvtide.server.kv_events.publisher")
    except ImportError as error:
        raise SettingsError(
            f"--kv-events needs pyzmq and msgpack ({error}); install kvtide[events]"
        ) from None
    return cast(EventPublisher, module.Publisher(settings, index, read_anew))
