"""Blocks on STORAGE: what the server's own folder has, and nothing that it has not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtide.server.kv_events.kv_event_settings import KVEventSettings
from kvtide.storage import open_store
from tests.cache.memories import ALL_MEMORIES
from tests.processes import free_port
from tests.server.kv_events.consuming import Consumer, until
from tests.server.kv_events.stocking import Stocked


@contextmanager
def stocked(
    folder: Path, name: str = "full", seed: int = 0, **options: str
) -> Iterator[tuple[Stocked, Consumer]]:
    made = Stocked(ALL_MEMORIES[name], folder, seed, **options)
    publisher = made.publisher
    try:
        with Consumer(publisher.endpoint, publisher.replay_endpoint) as consumer:
            consumer.connected()
            yield made, consumer
    finally:
        made.close()


@pytest.mark.quick(name=["full", "drafted"])
@pytest.mark.parametrize("name", ["full", "window", "window_and_state", "drafted", "hot"])
def test_a_consumer_knows_what_the_folder_has(name: str, tmp_path: Path) -> None:
    """Whatever it evicts for its cap, loses, has in quarantine or is cleared of."""
    with stocked(tmp_path, name) as (made, consumer):
        for _ in range(8):
            made.go(15)
            made.known_to(consumer)
        assert made.publisher.counts.dropped == made.publisher.counts.read_anew == 0
        media = {event["medium"] for event in consumer.events if event["type"] == "BlockRemoved"}
        assert media == {"GPU", "CPU", "STORAGE"}


@pytest.mark.parametrize("codec", ["none", "lossless"])
def test_pages_that_only_the_store_has_stay_known(codec: str, tmp_path: Path) -> None:
    with stocked(tmp_path, codec=codec) as (made, consumer):
        made.remember()
        made.forget_pages()
        made.known_to(consumer)
        assert set(consumer.known) == {("STORAGE", 0)}


def test_what_an_earlier_life_stored_is_known_once_a_prompt_asks_for_it(tmp_path: Path) -> None:
    first = Stocked(ALL_MEMORIES["full"], tmp_path, seed=1)
    first.go(20)
    prompts = list(first.seen)
    first.close()
    with stocked(tmp_path) as (made, consumer):
        made.known_to(consumer)
        assert not consumer.known, "no tokens of it are known"
        for asked in prompts:
            made.ask(asked)
            made.known_to(consumer)
        made.forget_pages()
        made.known_to(consumer)
        assert len(consumer.known["STORAGE", 0]) > 5


def test_a_killed_server_is_known_to_have_nothing(tmp_path: Path) -> None:
    made = Stocked(ALL_MEMORIES["full"], tmp_path, seed=0)
    with Consumer(made.publisher.endpoint, made.publisher.replay_endpoint) as consumer:
        consumer.connected()
        made.remember()
        made.known_to(consumer)
        made.kill()
        consumer.until(dict)


def test_a_detached_folder_has_no_blocks_and_an_attached_one_has_its_own(tmp_path: Path) -> None:
    with stocked(tmp_path) as (made, consumer):
        made.remember()
        made.known_to(consumer)
        assert ("STORAGE", 0) in consumer.known
        made.cache.storage.detach(5.0)
        consumer.until(lambda: {k: v for k, v in made.wanted().items() if k[0] != "STORAGE"})
        made.settle()
        made.attach()
        made.known_to(consumer)
        assert ("STORAGE", 0) in consumer.known


def test_a_store_that_drops_objects_unseen_is_not_claimed_to_have_any(tmp_path: Path) -> None:
    with stocked(tmp_path) as (made, consumer):
        made.cache.storage.attach(open_store("memory:unseen", made.cache.storage.space))
        made.settle()
        made.remember()
        made.settle()
        made.forget_pages()
        consumer.until(dict)


def test_a_folder_that_cannot_be_read_is_not_claimed_to_have_blocks(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    with stocked(folder) as (made, consumer):
        made.remember()
        made.known_to(consumer)
        assert ("STORAGE", 0) in consumer.known
        unreadable = folder / "journals" / f"{7:016x}.journal"
        unreadable.mkdir()
        consumer.until(lambda: {k: v for k, v in made.wanted().items() if k[0] != "STORAGE"})
        unreadable.rmdir()
        made.known_to(consumer)
        assert ("STORAGE", 0) in consumer.known


def test_objects_that_another_process_removes_are_gone(tmp_path: Path) -> None:
    with stocked(tmp_path) as (made, consumer):
        made.remember()
        made.known_to(consumer)
        other = open_store(f"file://{tmp_path}?cap=1GB&floor=0", made.cache.storage.space)
        other.clear()
        made.forget_pages()
        consumer.until(dict)
        other.close()


def test_a_process_that_dies_is_replaced_and_learns_what_is_here(tmp_path: Path) -> None:
    """It forgets pages that only the folder has, until they are asked for again."""
    with stocked(tmp_path) as (made, consumer):
        made.go(20)
        made.forget_pages()
        made.known_to(consumer)
        asked = list(made.seen)
        made.seen.clear()
        made.remember()
        killed = made.publisher.process_id
        os.kill(killed, 9)
        until(lambda: made.publisher.process_id != killed)
        made.known_to(consumer)
        assert set(consumer.known) == {("GPU", 0), ("CPU", 0), ("STORAGE", 0)}
        assert made.publisher.counts.read_anew == 1
        for each in asked:
            made.ask(each)
        made.known_to(consumer)


def test_a_restarted_server_may_use_its_ports_at_once(tmp_path: Path) -> None:
    one, two = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    settings = KVEventSettings(one, two)
    made = Stocked(ALL_MEMORIES["full"], tmp_path, 0, settings)
    with Consumer(one, two) as consumer:
        made.remember()
        made.known_to(consumer)
        made.kill()
        again = Stocked(ALL_MEMORIES["full"], tmp_path, 0, settings)
        again.ask(next(iter(made.seen)))
        again.known_to(consumer)
        assert ("STORAGE", 0) in consumer.known
        again.close()
