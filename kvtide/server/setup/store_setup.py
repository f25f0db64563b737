"""The server's store: which one, opening it, attaching it, and its report.

A store may take long to open and may never answer. So every call to a store has a timeout, and
none runs on the engine thread or the event loop.
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
from kvtide.server.setting_values import SettingsError
from kvtide.server.settings import NO_STORAGE, Settings
from kvtide.storage import StoreError, open_store
from kvtide.storage.url import StoreURL
from kvtide.transfer.store_link import StoreLink

T = TypeVar("T")
Json = dict[str, Any]

DEFAULT_CAP = "20GB"
CLOSE_S = 10.0


# -- opening ----------------------------------------------------------------------------------


def attach(settings: Settings, cache: TieredCache, environment: Mapping[str, str]) -> str:
    """Attach the store of the settings, or the default one; the outcome as a sentence.

    A named store that cannot be opened is refused. Without the default store the server runs on.
    """
    if settings.storage == NO_STORAGE:
        return "pages are not stored"
    if settings.host_size is None:
        return "pages are not stored: there is no host tier"
    named = settings.storage
    opening = in_thread(lambda: open_link(named or default_url(environment), cache))
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


def default_folder(environment: Mapping[str, str]) -> Path:
    """Where pages are stored unless a setting names a store: in the user's cache directory."""
    caches = Path(environment.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():
        home = Path(environment.get("HOME", ""))
        if not home.is_absolute():
            raise StoreError("there is no home directory; name a folder with --storage")
        caches = home / ".cache"
    return caches / "kvtide" / "pages"


def default_url(environment: Mapping[str, str]) -> str:
    """The default folder, made so that only the user can read it."""
    folder = default_folder(environment)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be made ({error.strerror}); name another folder with --storage"
        ) from None
    return f"file://{quote(str(folder))}?cap={DEFAULT_CAP}"


def open_link(url: str, cache: TieredCache) -> StoreLink:
    """Open a store for this cache's pages, ready to be attached; any thread may call it."""
    with refusing(url):
        store = open_store(url, cache.storage.space)
        try:
            return cache.storage.link(store)
        except BaseException:
            store.close()
            raise


@contextmanager
def refusing(url: str) -> Iterator[None]:
    """Turn any error into a `StoreError` without the URL's password: a store may be the user's
    own class."""
    shown = StoreURL.parse(url)
    try:
        yield
    except (StoreError, TierError):
        raise
    except Exception as error:
        cause = str(error).replace(shown.password, "…") if shown.password else str(error)
        raise StoreError(
            f"storage {shown}: cannot be opened ({type(error).__name__}: {cause})"
        ) from None


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Run a function on a daemon thread of its own, which does not delay the process's exit."""
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="kvtide-storage", daemon=True).start()
    return future


def close_when_open(opening: Future[StoreLink]) -> None:
    """Close a store as soon as its opening has succeeded."""

    def close(opened: Future[StoreLink]) -> None:
        if opened.exception() is None:
            in_thread(lambda: opened.result().close(CLOSE_S))

    opening.add_done_callback(close)


# -- reporting --------------------------------------------------------------------------------


def storage_report(stats: StorageStats | None) -> Json:
    """The store's state and counters as JSON; histograms are for `/metrics` alone."""
    if stats is None:
        return {"attached": False}
    counters = asdict(stats)
    del counters["seconds"]
    return {"attached": stats.state == "attached", **counters}
