"""An engine whose store is killed, frozen, full or damaged serves on, and says the same.

Stores and troubles are real: servers that get signals, a file system without room, bytes that are
changed in the store's files.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvtide.cache import CacheConfig, FetchPatience, TieredCache, Tokens
from kvtide.engine import Engine, RequestParams
from kvtide.spec import Tier
from kvtide.storage import Store, open_store
from tests.engine.restoring import FAMILIES, PAGE, model_of
from tests.models.tiny import VOCABULARY
from tests.storage import servers
from tests.storage.mooncake_pool import Master, Member, apart

PATIENCE = FetchPatience("timeout", base_s=0.5, per_1k_s=0.0, min_tokens=1)
LONGEST_S = 30.0
"""What a request may take here, however its store is: the store's time-out is a second."""


def text(number: int) -> tuple[int, ...]:
    chance = torch.Generator().manual_seed(number)
    return tuple(torch.randint(0, VOCABULARY, (10 * PAGE + 3,), generator=chance).tolist())


class Life:
    """An engine over a store. Nothing stays on device and host from one question to the next."""

    def __init__(self, url: str) -> None:
        model = model_of(FAMILIES[0].name)
        config = CacheConfig(Tokens(40 * PAGE), host_size=Tokens(80 * PAGE), patience=PATIENCE)
        self.cache = TieredCache(model.memory, config)
        self.store: Store = open_store(url, self.cache.storage.space)
        self.cache.storage.attach(self.store)
        self.engine = Engine(model, self.cache)

    def say(self, number: int) -> tuple[list[int], int]:
        """What it answers, and how many tokens storage brought for it."""
        began = time.monotonic()
        request = self.engine.submit(RequestParams(text(number), 5))
        while request.finish is None:
            self.engine.step()
        assert time.monotonic() - began < LONGEST_S
        return [one.token for one in request.output], request.by_tier.get(Tier.STORAGE, 0)

    def forget(self) -> None:
        """Write what is in line, as far as that works, and leave pages to the store alone."""
        self.cache.drain(LONGEST_S)
        for tier in (Tier.DEVICE, Tier.HOST):
            self.cache.flush(tier)

    def until_it_brings(self, number: int, timeout_s: float = 60.0) -> int:
        """Ask until storage has it again; what is asked meanwhile is computed, and stored."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.forget()
            _, brought = self.say(number)
            if brought == 10 * PAGE or time.monotonic() > deadline:
                return brought

    def errors(self) -> int:
        stats = self.cache.storage.stats()
        assert stats is not None
        return stats.objects.get("errors", 0) + stats.objects.get("spared", 0)

    def end(self) -> None:
        assert self.cache.validate() == []
        self.cache.close(5.0)


def converse(url: str, harm: Callable[[], None], mend: Callable[[], None]) -> None:
    """Before the trouble, in it, and after it: the same answers, with and without storage."""
    life = Life(url)
    right, _ = life.say(1)
    life.forget()
    assert life.say(1) == (right, 10 * PAGE)
    harm()
    for _ in range(3):
        life.forget()
        assert life.say(1) == (right, 0)
        life.say(2)
    assert life.errors() > 0
    mend()
    assert life.until_it_brings(1) == 10 * PAGE
    assert life.say(1)[0] == right
    life.end()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[servers.Server]:
    server = servers.redis(tmp_path)
    server.start()
    yield server
    server.thaw()
    server.stop()


@pytest.mark.full
def test_redis_frozen_and_thawed(redis: servers.Server) -> None:
    converse(f"redis://127.0.0.1:{redis.port}/0?timeout=1", redis.freeze, redis.thaw)


@pytest.mark.full
def test_redis_killed_and_started_again(redis: servers.Server) -> None:
    converse(f"redis://127.0.0.1:{redis.port}/0?timeout=1", redis.kill, redis.start)


@pytest.mark.full
@apart
def test_mooncake_s_master_killed_and_started_again() -> None:
    master = Master()
    Member(master)

    def start_again() -> None:
        master.start()
        Member(master)

    converse(master.url(timeout=1), master.kill, start_again)


@pytest.mark.full
@apart
def test_mooncake_s_master_frozen_and_thawed() -> None:
    master = Master()
    Member(master)
    converse(master.url(timeout=1), master.freeze, master.thaw)


# -- files ----------------------------------------------------------------------------------


def test_bytes_that_changed_in_the_store_s_files_are_computed_again(tmp_path: Path) -> None:
    life = Life(f"file://{tmp_path}/pages?cap=64MB")
    right, _ = life.say(1)
    life.forget()
    for segment in (tmp_path / "pages" / "segments").iterdir():
        with segment.open("r+b") as file:
            for at in range(100, segment.stat().st_blocks * 512, 4096):
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))
    assert life.say(1) == (right, 0)
    stats = life.cache.storage.stats()
    assert stats is not None and stats.objects["corrupt"] > 0
    assert life.until_it_brings(1) == 10 * PAGE
    assert life.say(1)[0] == right
    life.end()


def test_a_folder_that_is_deleted_costs_what_was_in_it(tmp_path: Path) -> None:
    life = Life(f"file://{tmp_path}/pages?cap=64MB")
    right, _ = life.say(1)
    life.forget()
    shutil.rmtree(tmp_path / "pages")
    for _ in range(2):
        assert life.say(1) == (right, 0)
        life.forget()
    life.end()


def test_a_full_disk_keeps_what_it_has_and_takes_more_when_there_is_room(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(tmp_path)]
    made = subprocess.run(mount, capture_output=True, text=True)
    assert made.returncode == 0, f"this test needs to mount a tmpfs, as root: {made.stderr}"
    try:
        life = Life(f"file://{tmp_path}/pages?cap=4MB&floor=0&segment=64KiB")
        right, _ = life.say(1)
        life.forget()
        ballast = tmp_path / "ballast"
        filled = subprocess.run(
            ["dd", "if=/dev/zero", f"of={ballast}", "bs=4k"], capture_output=True, text=True
        )
        assert "No space left" in filled.stderr
        others = [life.say(number)[0] for number in range(2, 12)]
        life.forget()
        stats = life.cache.storage.stats()
        assert stats is not None and stats.failed_pages > 0
        assert life.say(1)[0] == right
        ballast.unlink()
        assert life.until_it_brings(11) == 10 * PAGE
        assert [life.say(number)[0] for number in range(2, 12)] == others
        life.end()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
