"""Where a server's pages outlive it: which store, how it is opened, and how it stands.

A store may take long to open and may never answer. So everything that is asked of one has an end,
and none of it happens on the engine's thread or the event loop's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from kvtide.cache import StorageStats, TieredCache, TierError
from kvtide.server.settings import NO_STORAGE, Settings, SettingsError
from kvtide.storage import StoreError, open_store
from kvtide.storage.url import StoreURL
from kvtide.transfer.store_link import StoreLink

T = TypeVar("T")
Json = dict[str, Any]

DEFAULT_CAP = "20GB"
CLOSE_S = 10.0


# -- opening ----------------------------------------------------------------------------------


def attach(settings: Settings, cache: TieredCache, environment: Mapping[str, str]) -> str:
    """Attach the store that the settings name, or the default; what came of it, in a sentence.

    A store that was asked for and cannot be opened is refused. The default is a convenience: where
    it cannot be had, the server does without.
    """
    if settings.storage == NO_STORAGE:
        return "pages are not stored"
    if settings.host_size is None:
        return "pages are not stored: there is no host tier"
    named = settings.storage
    opening = beside(lambda: open_link(named or default_url(environment), cache))
    try:
        cache.storage.attach_opened(opening)
    except (StoreError, OSError) as error:
        if named is not None:
            raise SettingsError(str(error)) from None
        return f"pages are not stored: {error}"
    name = opening.result().store.name
    if named is not None:
        return f"pages are stored in {name}"
    return f"pages are stored in {name}, up to {DEFAULT_CAP}; --storage changes that"


def default_url(environment: Mapping[str, str]) -> str:
    """A folder in the user's cache directory, made so that nobody else looks into it."""
    caches = Path(environment.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():
        home = Path(environment.get("HOME", ""))
        if not home.is_absolute():
            raise StoreError("there is no home directory; name a folder with --storage")
        caches = home / ".cache"
    folder = caches / "kvtide" / "pages"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be made ({error.strerror}); name another folder with --storage"
        ) from None
    return f"file://{quote(str(folder))}?cap={DEFAULT_CAP}"


def open_link(url: str, cache: TieredCache) -> StoreLink:
    """A store for this cache's pages, ready to be attached; from any thread."""
    with _refusing(url):
        store = open_store(url, cache.storage.space)
        try:
            return cache.storage.link(store)
        except BaseException:
            store.close()
            raise


@contextmanager
def _refusing(url: str) -> Iterator[None]:
    """Stores are anybody's: whatever they raise when they are opened is a refusal."""
    shown = StoreURL.parse(url)
    try:
        yield
    except (StoreError, TierError):
        raise
    except Exception as error:
        said = str(error).replace(shown.password, "…") if shown.password else str(error)
        raise StoreError(
            f"storage {shown}: cannot be opened ({type(error).__name__}: {said})"
        ) from None


def beside(function: Callable[[], T]) -> Future[T]:
    """Do something on a thread of its own that nobody has to wait for, not even at the end."""
    answer: Future[T] = Future()

    def run() -> None:
        answer.set_running_or_notify_cancel()
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="kvtide-storage", daemon=True).start()
    return answer


def let_go(opening: Future[StoreLink]) -> None:
    """Close a store that is being opened as soon as it is open: nobody wants it any more."""

    def close(opened: Future[StoreLink]) -> None:
        if opened.exception() is None:
            beside(lambda: opened.result().close(CLOSE_S))

    opening.add_done_callback(close)


# -- telling ----------------------------------------------------------------------------------


def storage_report(stats: StorageStats | None) -> Json:
    """How a store is used, for people."""
    if stats is None:
        return {"attached": False}
    return {"attached": stats.state == "attached", **asdict(stats)}
