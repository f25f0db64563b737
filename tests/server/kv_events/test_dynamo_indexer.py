"""Dynamo's indexer answers for any prompt what the index has, tier by tier."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.index import Namespace
from kvtide.server.kv_events.kv_event_settings import KVEventSettings
from kvtide.spec import Tier
from tests.index.memories import PAGE
from tests.processes import free_port
from tests.server.kv_events.consuming import until
from tests.server.kv_events.following import LOCAL, Followed
from tests.server.kv_events.indexing import MAX_S, Indexer, LossyRoute, install

pytestmark = pytest.mark.full
MEMORIES = ("full", "window", "recurrent", "window and state", "two histories", "v4")
Answer = tuple[int, int, int]


@pytest.fixture(scope="session")
def folder() -> Path:
    return install()


@pytest.fixture
def indexer(folder: Path, tmp_path: Path) -> Iterator[Indexer]:
    with Indexer(folder, tmp_path) as started:
        yield started


def in_index(made: Followed, tokens: list[int], namespace: Namespace) -> Answer:
    """The cached tokens of a prompt, tier after tier, by the pages of its history: those that a
    request reuses, and with several anchors perhaps more."""
    anchor = made.traffic.memory.anchors[0].name
    keys = made.traffic.naive.page_keys(tokens, namespace)
    pages, found = 0, []
    for tier in Tier:
        readable = made.traffic.naive.readable[tier, anchor]
        while pages < len(keys) and keys[pages] in readable:
            pages += 1
        found.append(pages * PAGE)
    device, host, storage = found
    prompt = made.index.prompt([*tokens, 0], namespace)
    reused = [made.index.match(prompt, tier).boundary * PAGE for tier in Tier]
    assert all(one <= answer for one, answer in zip(reused, found, strict=True))
    assert reused == found or len(made.traffic.memory.anchors) > 1
    return device, host, storage


def agree(made: Followed, indexer: Indexer, instance: int = 1) -> set[Answer]:
    """Wait until the indexer answers like the index, for all prompts; these answers."""
    prompts = [*made.traffic.seen[-60:], ([7] * 8, Namespace())]
    wanted = [in_index(made, *prompt) for prompt in prompts]
    deadline = time.monotonic() + MAX_S
    while (found := [indexer.cached(instance, *prompt) for prompt in prompts]) != wanted:
        made.between_steps()
        wrong = [row for row in zip(prompts, found, wanted, strict=True) if row[1] != row[2]]
        assert time.monotonic() < deadline, f"{wrong[:3]}\n{indexer.printed[-3000:]}"
        time.sleep(0.05)
    return set(wanted)


def follow(indexer: Indexer, made: Followed, instance: int = 1) -> None:
    publisher = made.publisher
    indexer.register(instance, publisher.endpoint, publisher.replay_endpoint, PAGE)


@pytest.mark.parametrize("name", MEMORIES)
def test_its_answers_are_the_indexs(name: str, indexer: Indexer) -> None:
    answers: set[Answer] = set()
    for seed in range(4):
        made = Followed(name, seed=seed)
        try:
            follow(indexer, made, instance=seed)
            for _ in range(8):
                made.go(40)
                answers |= agree(made, indexer, instance=seed)
            for tier in (Tier.DEVICE, Tier.HOST):
                made.index.clear(tier)
                answers |= agree(made, indexer, instance=seed)
        finally:
            made.publisher.close()
    assert any(device for device, _, _ in answers), "else the answers do not say much"
    assert any(device < host for device, host, _ in answers)
    assert any(host < storage for _, host, storage in answers)


@pytest.mark.parametrize("batches", [10_000, 2], ids=["replayed", "lost for good"])
@pytest.mark.parametrize("name", ["full", "window and state"])
def test_a_missed_stretch_is_made_up(name: str, batches: int, indexer: Indexer) -> None:
    made = Followed(name, KVEventSettings(LOCAL, LOCAL, replay_batches=batches))
    publisher = made.publisher
    try:
        with LossyRoute(publisher.endpoint) as route:
            indexer.register(1, route.endpoint, publisher.replay_endpoint, PAGE)
            made.go(100)
            agree(made, indexer)
            for _ in range(3):
                route.loses = True
                dropped = route.dropped
                for lost in range(dropped, dropped + 5):
                    made.go(30)
                    until(lambda lost=lost: route.dropped > lost)  # type: ignore[misc]
                route.loses = False
                agree(made, indexer)
        source = "buffer" if batches > 2 else "state"
        until(lambda: publisher.counts.replays[source] >= 3)
    finally:
        publisher.close()


def test_a_restarted_server_is_followed_without_registering_again(indexer: Indexer) -> None:
    endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    settings = KVEventSettings(*endpoints)
    for life in range(3):
        made = Followed("window", settings, seed=life)
        try:
            if life == 0:
                follow(indexer, made)
            for _ in range(3):
                made.go(60)
                agree(made, indexer)
        finally:
            made.publisher.close()


def test_a_restarted_indexer_learns_everything(folder: Path, tmp_path: Path) -> None:
    made = Followed("window", KVEventSettings(LOCAL, LOCAL, replay_batches=5))
    try:
        for _ in range(3):
            with Indexer(folder, tmp_path) as indexer:
                follow(indexer, made)
                agree(made, indexer)
                made.go(100)
                agree(made, indexer)
    finally:
        made.publisher.close()


def test_a_full_queue_is_made_up(indexer: Indexer) -> None:
    made = Followed("window", queue_events=4)
    try:
        follow(indexer, made)
        for _ in range(20):
            made.go(40)
        agree(made, indexer)
        assert made.publisher.counts.read_anew > 0
    finally:
        made.publisher.close()
