"""The storage benchmark: its drivers keep what they are given, and it leaves nothing behind."""

from __future__ import annotations

import json
import secrets
import sys
from contextlib import closing

import pytest

from kvtide.bench import store_speed
from kvtide.bench.storage_drivers import others
from kvtide.bench.store_speed import MemoryBlocks, Ours, StoreCase
from kvtide.cli.main import main
from kvtide.storage import StoreError, open_store
from kvtide.storage.memory_store import MemoryStore
from kvtide.storage.trial import new_keys, new_space
from kvtide.storage.url import StoreURL
from tests.storage import servers

KEYS = "accesskey:secretkey"


@pytest.fixture
def urls(tmp_path):
    """A URL of every kind that has something to be measured beside."""
    (tmp_path / "redis").mkdir()
    (tmp_path / "s3").mkdir()
    redis = servers.redis(tmp_path / "redis")
    s3 = servers.s3_in_memory(tmp_path / "s3", "pages", *KEYS.split(":"))
    redis.start()
    yield {
        "file": f"file://{tmp_path}",
        "redis": f"redis://127.0.0.1:{redis.port}/0",
        "s3": f"s3://{KEYS}@pages/here?endpoint=http://127.0.0.1:{s3.port}&timeout=20",
    }
    redis.stop()
    s3.stop()


def _no_progress(items, total, label):
    return items


def test_other_drivers_return_what_they_were_given(urls):
    case, found = StoreCase("some", 3 << 20, 5), []
    blocks = MemoryBlocks(case.bytes)
    for url in urls.values():
        drivers, notes = others(StoreURL.parse(url), blocks, case.bytes)
        assert not notes
        for driver in drivers:
            sources, targets = blocks.cut(blocks.source, case), blocks.cut(blocks.target, case)
            blocks.target[:] = bytes(case.bytes)
            keys = new_keys(case.objects)
            driver.write(keys, sources)
            driver.read(keys, targets)
            if driver.name != "socket copy":
                assert blocks.source == blocks.target, driver.name
            driver.remove(keys)
            driver.close()
            found.append(driver.name)
    assert found[0] in ("O_DIRECT, 8 threads", "page cache, 8 threads")
    assert found[1:] == ["redis-py[hiredis]", "socket copy", "obstore", "socket copy"]


def test_the_command_measures_and_leaves_nothing(urls, tmp_path, capsys):
    for url in (urls["redis"], f"memory:{secrets.token_hex(8)}"):
        file = tmp_path / "found.json"
        arguments = ["--bytes", "2MB", "--turns", "2", "--models", "deepseek-v4-flash"]
        assert main(["bench", "storage", url, *arguments, "--json", str(file)]) == 0
        printed = capsys.readouterr().out
        assert "10,000 keys are looked for in" in printed and "deepseek-v4-flash swa" in printed
        found = json.loads(file.read_text())
        assert {row["way"] for row in found["cases"]} == {"read", "write"}
        assert all(row["gb_s"] > 0 for row in found["cases"])
        assert "pages of one shape" in printed
        whole, half, cold = found["shapes"]
        assert whole["prompt_pages"] == whole["stored_pages"] == half["prompt_pages"] // 2
        assert (cold["prompt_pages"], cold["stored_pages"]) == (whole["prompt_pages"], 0)
        assert all(row["ratio"] > 0 for row in found["shapes"])
    with closing(open_store(urls["redis"], new_space())) as store:
        assert "the database holds 0 keys of all users" in store.status().notes


class Asked(MemoryStore):
    """Counts the keys it is asked for, by call."""

    def __init__(self, url, space):
        super().__init__(url, space)
        self.asked = []

    def exists(self, keys):
        self.asked.append(len(keys))
        return super().exists(keys)


def test_pages_of_the_same_shape_are_asked_for_once_and_marks_by_a_short_call_now_and_then():
    store = Asked(StoreURL.parse("memory:"), space := new_space())
    costs = store_speed.shape_costs(store, space, "qwen3-8b", 20 << 20, 1, _no_progress)
    assert [(cost.prompt_pages, cost.stored_pages) for cost in costs] == [(2, 2), (4, 2), (2, 0)]
    of_write, *asked = store.asked
    assert (of_write, asked[:6]) == (2, [2] * 6), "all pages are there"
    marks = [count for count in asked[6:] if count not in (2, 4)]
    assert asked[6:].count(4) == asked[6:].count(2) == 6
    assert len(marks) == 2 + 1 + 2, "each turn of a link that always looks, and once of the other"
    assert all(count <= 31 for count in marks)


def test_opening_is_measured_in_a_new_process(urls, capsys):
    arguments = ["--bytes", "1MB", "--turns", "1", "--models", "", "--opening", "12000"]
    assert main(["bench", "storage", urls["redis"], *arguments]) == 0
    assert "with 12,000 objects a new process opens it in" in capsys.readouterr().out


class Wrong(MemoryStore):
    def _read(self, key, target):
        length = super()._read(key, target)
        target[-1] ^= 1
        return length


class Refuses(MemoryStore):
    def write(self, keys, sources):
        return [*super().write(keys, sources)[:-1], False]


@pytest.mark.parametrize(
    ("kind", "message"), [(Wrong, "other bytes"), (Refuses, "raise its capacity")]
)
def test_a_store_that_is_wrong_is_not_measured(kind, message):
    case = StoreCase("some", 8192, 4)
    blocks = MemoryBlocks(case.bytes)
    ours = Ours(kind(StoreURL.parse("memory:"), new_space()), blocks)
    with pytest.raises(StoreError, match=message):
        store_speed.measure(case, [ours], blocks, 1, _no_progress)


def test_ratios_are_taken_within_a_turn():
    rates = {("read", "ours"): [4.0, 1.0, 2.0], ("read", "theirs"): [2.0, 1.0, 4.0]}
    found = store_speed._measured(StoreCase("some", 1, 1), "read", rates, ["ours", "theirs"])
    assert (found.gb_s, found.beside, found.ratio) == (2.0, {"theirs": 2.0}, {"theirs": 1.0})


def test_a_library_that_is_not_installed_is_noted(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    drivers, notes = others(StoreURL.parse("redis://localhost"), MemoryBlocks(4096), 4096)
    assert [driver.name for driver in drivers] == ["socket copy"]
    assert "redis" in notes[0]
