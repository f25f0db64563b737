"""A server's publisher of KV events, which follows its engine's index."""

from __future__ import annotations

from kvtide.engine import Engine
from kvtide.server.kv_events.kv_event_settings import KVEventSettings
from kvtide.server.kv_events.open_publisher import EventPublisher, open_publisher
from kvtide.server.service import Service


def publish_kv_events(
    settings: KVEventSettings | None, service: Service, engine: Engine
) -> EventPublisher | None:
    """Begin to publish, or raise `SettingsError`; None without settings.

    All ranks have the same tree, so the one with HTTP publishes for all.
    """
    if settings is None:
        return None

    def read_anew() -> None:
        service.call_from_thread(lambda engine: publisher.begin(engine.cache.index))

    publisher = open_publisher(settings, engine.cache.index, read_anew)
    read_anew()
    return publisher
