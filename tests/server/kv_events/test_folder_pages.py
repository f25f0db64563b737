"""A page is in the folder when all its objects are; the table shows it, up to a bound."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.index import Namespace
from kvtide.index.keys import pack
from kvtide.server.kv_events import block_table
from kvtide.server.kv_events.block_hashes import VllmHashes
from kvtide.server.kv_events.block_table import BlockTable
from kvtide.server.kv_events.event_encoding import TokenPacker
from kvtide.server.kv_events.folder_pages import FolderPages, FolderSource
from kvtide.server.kv_events.kv_groups import kv_groups
from kvtide.storage import open_store
from kvtide.storage.file import FileStore
from kvtide.storage.objects import object_key
from tests.index.memories import FULL, PAGE
from tests.server.kv_events.test_block_table import DEVICE, changes, removed, stored

SPACE = b"s" * 32
PAGES = [bytes([number]) * 32 for number in range(4)]
TEXT = list(range(4 * PAGE))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    opened = open_store(f"file://{tmp_path}?cap=10MB&floor=0", SPACE)
    assert isinstance(opened, FileStore)
    yield opened
    opened.close()


def write(store: FileStore, pages: list[bytes], suffix: bytes = b"kv") -> None:
    keys = [object_key(page, suffix) for page in pages]
    assert all(store.write(keys, [memoryview(b"content")] * len(keys)))


def erase(store: FileStore, pages: list[bytes], suffix: bytes = b"kv") -> None:
    store.remove([object_key(page, suffix) for page in pages])


def pages_of(store: FileStore, *suffixes: bytes) -> FolderPages:
    return FolderPages(FolderSource(store.followed, suffixes or (b"kv",)))


def test_a_page_of_several_ranks_is_there_with_the_objects_of_all(store: FileStore) -> None:
    pages = pages_of(store, b"rank 0", b"rank 1")
    assert pages.watch(PAGES) == [False] * 4
    write(store, PAGES, b"rank 0")
    assert dict(pages.look()) == dict.fromkeys(PAGES, False)
    write(store, PAGES[:2], b"rank 1")
    assert dict(pages.look()) == dict.fromkeys(PAGES[:2], True)
    erase(store, PAGES[:1], b"rank 0")
    assert pages.look() == [(PAGES[0], False)]


def test_pages_that_are_not_watched_are_not_told(store: FileStore) -> None:
    pages = pages_of(store)
    pages.watch(PAGES[:2])
    pages.forget(PAGES[1])
    write(store, PAGES)
    assert pages.look() == [(PAGES[0], True)]


def table() -> BlockTable:
    return BlockTable(kv_groups(FULL), VllmHashes(), PAGE, TokenPacker(PAGE))


def test_a_block_that_leaves_the_index_stays_if_the_folder_has_it(store: FileStore) -> None:
    made = table()
    made.follow(pages_of(store))
    made.hear(stored(DEVICE, [0, 1], TEXT[: 2 * PAGE]))
    first, second = made.blocks.values()
    write(store, [first.key])
    made.hear(removed(DEVICE, [0, 1]))
    assert changes(made) == [("appeared", "GPU", 2), ("left", "GPU", 2), ("appeared", "STORAGE", 1)]
    assert list(made.blocks.values()) == [first], second
    erase(store, [first.key])
    assert changes(made) == [("left", "STORAGE", 1)] and not made.blocks


def test_a_prompt_names_blocks_and_those_that_are_nowhere_are_forgotten(store: FileStore) -> None:
    other = table()
    other.hear(stored(DEVICE, [0, 1, 2], TEXT[: 3 * PAGE]))
    write(store, [block.key for block in other.blocks.values()][1:])
    made = table()
    made.name(Namespace(), pack(TEXT))
    assert changes(made) == [] and not made.blocks, "no folder is followed"
    made.follow(pages_of(store))
    made.name(Namespace(), pack(TEXT[: 3 * PAGE + 1]))
    assert changes(made) == [("appeared", "STORAGE", 2)] and len(made.blocks) == 2
    made.name(Namespace("lora"), pack(TEXT))
    assert changes(made) == [] and len(made.blocks) == 2


def test_reading_the_index_anew_keeps_what_the_folder_has(store: FileStore) -> None:
    made = table()
    made.follow(pages_of(store))
    made.hear(stored(DEVICE, [0, 1], TEXT[: 2 * PAGE]))
    write(store, [next(iter(made.blocks.values())).key])
    made.settle()
    made.clear()
    assert [(run.cell.medium, len(run.blocks)) for run in made.everything()] == [("STORAGE", 1)]
    made.hear(stored(DEVICE, [5], TEXT[:PAGE]))
    shown = [(run.cell.medium, len(run.blocks)) for run in made.everything()]
    assert shown == [("GPU", 1), ("STORAGE", 1)]


def test_the_first_blocks_leave_when_there_are_too_many(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_table, "MAX_STORED_BLOCKS", 3)
    made = table()
    made.follow(pages_of(store))
    made.hear(stored(DEVICE, [0, 1, 2, 3], TEXT))
    blocks = list(made.blocks.values())
    write(store, [block.key for block in blocks])
    made.hear(removed(DEVICE, [0, 1, 2, 3]))
    assert changes(made)[2:] == [("appeared", "STORAGE", 4), ("left", "STORAGE", 1)]
    assert list(made.blocks.values()) == blocks[1:]
    erase(store, [blocks[0].key])
    assert changes(made) == []
