"""Dynamo's indexer answers for any prompt what index and folder have, tier by tier."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtide.server.kv_events.block_hashes import VllmHashes
from kvtide.server.kv_events.kv_event_settings import KVEventSettings
from tests.cache.memories import ALL_MEMORIES, PAGE
from tests.processes import free_port
from tests.server.kv_events.consuming import Known, block_names, published, until
from tests.server.kv_events.indexing import MAX_S, Indexer, LossyRoute, install
from tests.server.kv_events.stocking import LOCAL, Asked, Stocked

pytestmark = pytest.mark.full
Answer = tuple[int, int, int]


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[Indexer]:
    with Indexer(install(), tmp_path) as started:
        yield started


def register(indexer: Indexer, made: Stocked, endpoint: str | None = None) -> None:
    publisher = made.publisher
    indexer.register(1, endpoint or publisher.endpoint, publisher.replay_endpoint, PAGE)


def kept(made: Stocked, known: Known, asked: Asked) -> Answer:
    """The prompt's tokens on the device, with those that the host adds, and those of the folder."""
    tokens, namespace = asked
    index, hashes = made.cache.index, VllmHashes()
    packed = index.prompt(tokens, namespace).packed
    names = [published(hashes, one) for one in block_names(index, packed, namespace, hashes)]
    pages, found = 0, []
    for medium in ("GPU", "CPU", "STORAGE"):
        there = known.get((medium, 0), set())
        while pages < len(names) and names[pages] in there:
            pages += 1
        found.append(pages * PAGE)
    return found[0], found[1], found[2]


def agree(made: Stocked, indexer: Indexer) -> set[Answer]:
    """Wait until the indexer answers like index and folder, for all prompts; these answers."""
    prompts: Sequence[Asked] = list(made.seen)[-40:]
    known = made.wanted()
    wanted = [kept(made, known, asked) for asked in prompts]
    deadline = time.monotonic() + MAX_S
    while True:
        answers = [indexer.cached(1, *asked) for asked in prompts]
        if answers == wanted:
            return set(wanted)
        made.between_steps()
        wrong = [row for row in zip(prompts, answers, wanted, strict=True) if row[1] != row[2]]
        assert time.monotonic() < deadline, f"{wrong[:3]}\n{indexer.printed[-3000:]}"
        time.sleep(0.05)


@pytest.mark.parametrize("name", ["full", "window_and_state", "drafted"])
def test_its_answers_are_those_of_index_and_folder(
    name: str, indexer: Indexer, tmp_path: Path
) -> None:
    made = Stocked(ALL_MEMORIES[name], tmp_path / "pages", seed=3)
    answers: set[Answer] = set()
    try:
        register(indexer, made)
        for _ in range(8):
            made.go(15)
            answers |= agree(made, indexer)
            made.forget_device()
            answers |= agree(made, indexer)
        made.forget_pages()
        answers |= agree(made, indexer)
    finally:
        made.close()
    assert any(device for device, _, _ in answers), "else the answers do not say much"
    assert any(device < host for device, host, _ in answers)
    assert any(host < folder for _, host, folder in answers)
    assert any(not host and folder for _, host, folder in answers)


@pytest.mark.parametrize("batches", [10_000, 2], ids=["replayed", "lost for good"])
def test_a_missed_stretch_is_made_up(batches: int, indexer: Indexer, tmp_path: Path) -> None:
    settings = KVEventSettings(LOCAL, LOCAL, replay_batches=batches)
    made = Stocked(ALL_MEMORIES["full"], tmp_path / "pages", 5, settings)
    try:
        with LossyRoute(made.publisher.endpoint) as route:
            register(indexer, made, route.endpoint)
            made.go(20)
            agree(made, indexer)
            for _ in range(3):
                route.loses = True
                made.go(20)
                until(lambda: route.dropped > 0)
                route.loses, route.dropped = False, 0
                agree(made, indexer)
    finally:
        made.close()


def test_a_restarted_server_has_what_prompts_asked_its_folder_for(
    indexer: Indexer, tmp_path: Path
) -> None:
    """After a drain, and after a kill, which the publisher's process notices."""
    settings = KVEventSettings(*(f"tcp://127.0.0.1:{free_port()}" for _ in range(2)))
    before: list[Asked] = []
    for life in range(3):
        made = Stocked(ALL_MEMORIES["full"], tmp_path / "pages", life, settings)
        if life == 0:
            register(indexer, made)
        for asked in before:
            made.ask(asked)
        answers = agree(made, indexer)
        if before:
            assert any(folder for _, _, folder in answers)
        made.go(20)
        agree(made, indexer)
        before = list(made.seen)[-30:]
        if life == 1:
            made.kill()
        else:
            made.close()
    until(lambda: all(indexer.cached(1, *asked) == (0, 0, 0) for asked in before))
