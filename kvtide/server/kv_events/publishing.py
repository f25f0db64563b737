"""A server's publisher of KV events: it follows the engine's index and the store's folder."""

from __future__ import annotations

from kvtide.cache import TieredCache
from kvtide.index import Prompt
from kvtide.server.engine_rank import EngineRank
from kvtide.server.kv_events.folder_pages import FolderSource
from kvtide.server.kv_events.kv_event_settings import KVEventSettings
from kvtide.server.kv_events.kv_groups import kv_groups
from kvtide.server.kv_events.publisher import Publisher
from kvtide.server.service import Service
from kvtide.spec import RankShape
from kvtide.storage import Store
from kvtide.storage.codec import CodedStore
from kvtide.storage.file import FileStore


def publish_kv_events(
    settings: KVEventSettings | None, service: Service, rank: EngineRank
) -> Publisher | None:
    """Begin to publish, or raise `SettingsError`; None without settings.

    All ranks have the same tree, so the one with HTTP publishes for all.
    """
    if settings is None:
        return None

    def ask() -> None:
        service.call_from_thread(lambda engine: publisher.read(engine.cache.index))

    publisher = Publisher(settings, rank.engine.cache.index, ask)
    shape = RankShape(rank.topology.stages, rank.topology.tensor.count)
    follow = FollowStorage(publisher, rank.engine.cache, shape)
    service.call_from_thread(lambda engine: engine.cache.storage.listen(follow))
    ask()
    return publisher


class FollowStorage:
    """Has the publisher follow the folder of the attached store, where that is one.

    Other stores drop objects without a record that this server reads, so nothing is claimed to be
    in them.
    """

    def __init__(self, publisher: Publisher, cache: TieredCache, shape: RankShape) -> None:
        self._publisher = publisher
        self._cache = cache
        self._shape = shape
        self._folder: FolderSource | None = None

    def store_changed(self, store: Store | None) -> None:
        files = store.inner if isinstance(store, CodedStore) else store
        self._folder = self._source(files) if isinstance(files, FileStore) else None
        self._publisher.follow(self._folder)

    def pages_asked(self, prompt: Prompt) -> None:
        if self._folder is not None:
            self._publisher.name(prompt)

    def _source(self, store: FileStore) -> FolderSource | None:
        groups = kv_groups(self._cache.memory)
        history = next((anchor for anchor, group in groups.items() if group.history), None)
        if history is None:
            return None
        suffixes = self._cache.storage.object_suffixes(history, self._shape)
        return FolderSource(store.followed, suffixes)
