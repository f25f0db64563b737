"""A server is killed between the two objects of a page: its target is there, its draft is not.

The next server finds every target page, none of them with a draft that was not stored whole. Once
the pages are computed again, their drafts are added to the store.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtide.engine.speculation.accept_length_stats import PrefixOrigin
from kvtide.spec import Tier
from kvtide.storage import open_store
from kvtide.transfer.store_link import StoreLink
from tests.engine.speculation.killed_serving import PROMPTS
from tests.engine.speculation.lookup_pair import PAGE, LookupServer

KEPT = 0.98
DRAFTS = 2
"""Draft objects that were stored before the kill."""
PREFIX = (len(PROMPTS[0]) - 1) // PAGE


@pytest.fixture(scope="module")
def cold() -> float:
    server = LookupServer()
    served = server.serve(PROMPTS)
    server.close()
    return served.accept_length


def stored(folder: Path, pool: str) -> list[bool]:
    """Which pages of all prompts the folder has an object of this pool of, prompt by prompt."""
    server = LookupServer()
    index, (link,) = server.cache.index, [_link(server, folder)]
    keys = [
        one.key(page.key, page.after)
        for prompt in PROMPTS
        for page in index.page_keys(server.cache.prompt(prompt), PREFIX)
        for one in link._formats["kv"]
        if one.pool == pool
    ]
    there = link.store.exists(keys)
    assert link.close(10)
    server.close()
    return there


def _link(server: LookupServer, folder: Path) -> StoreLink:
    return server.cache.storage.link(open_store(f"file://{folder}", server.cache.storage.space))


def carried(server: LookupServer) -> list[bool]:
    """Which pages of all prompts have a draft on the device."""
    found: list[bool] = []
    for prompt in PROMPTS:
        lease = server.cache.reserve(server.cache.match(server.cache.prompt(prompt)))
        assert lease is not None and lease.cached_tokens == PREFIX * PAGE
        found += server.cache.carries(lease, "draft").tolist()
        server.cache.release(lease)
    return found


@pytest.mark.full
@pytest.mark.quick(moment=["within"])
@pytest.mark.parametrize("moment", ["before", "within"])
def test_a_kill_between_target_and_draft(tmp_path: Path, moment: str, cold: float) -> None:
    module = "tests.engine.speculation.killed_serving"
    killed = subprocess.run([sys.executable, "-m", module, tmp_path, moment, str(DRAFTS)])
    assert killed.returncode == -signal.SIGKILL
    targets, drafts = stored(tmp_path, "kv"), stored(tmp_path, "draft")
    assert sum(targets) == DRAFTS + 1 and sum(drafts) == DRAFTS, "killed in between"
    assert not np.any(np.greater(drafts, targets)), "a draft without its target"

    second = LookupServer(tmp_path)
    served = second.serve(PROMPTS)
    by_tier = [request.by_tier for request in served.requests]
    assert by_tier == [{Tier.STORAGE: (DRAFTS + 1) * PAGE}, {}, {}]
    assert carried(second) == [n != DRAFTS for n in range(len(targets))]
    second.settle()
    assert _counts(second)["draftless"] == 1 and "corrupt" not in _counts(second)
    second.close()
    assert all(stored(tmp_path, "kv")), "the rest was added"
    assert stored(tmp_path, "draft") == [n != DRAFTS for n in range(len(targets))]

    third = LookupServer(tmp_path)
    third.cache.storage.fetch = lambda *_: None  # type: ignore[method-assign, assignment]
    assert third.serve(PROMPTS).origins == {PrefixOrigin.COMPUTED}
    third.settle()
    assert _counts(third)["written"] == 1, "the draft alone"
    third.close()

    fourth = LookupServer(tmp_path)
    again = fourth.serve(PROMPTS)
    assert again.origins == {PrefixOrigin.STORAGE} and all(carried(fourth))
    assert again.accept_length >= KEPT * cold
    fourth.close()


def _counts(server: LookupServer) -> dict[str, int]:
    stats = server.cache.storage.stats()
    assert stats is not None
    return dict(stats.objects)
