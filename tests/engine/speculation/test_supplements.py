"""Prefixes that are kept without draft pages get them where another tier has them.

A request that does not speculate leaves such pages. The next one that does is answered at once, and
accepts as much as after prefill from the moment on at which they have come.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.engine import RequestParams
from kvtide.engine.speculation.accept_length_stats import PrefixOrigin
from kvtide.spec import Tier
from kvtide.storage import Store, open_store
from tests.cache.gated import Gated
from tests.engine.speculation.lookup_pair import ANSWER, PAGE, LookupServer, alone, walks
from tests.grids import everything

KEPT, FALLEN = 0.98, 0.8
FILL = 2
"""Tokens of an answer that is asked for to have the prompt's pages."""
PROMPTS = [one.prompt for one in walks(4 if everything() else 2)]
PREFIX = (len(PROMPTS[0]) - 1) // PAGE * PAGE


@pytest.fixture(scope="module")
def cold() -> float:
    """The accept length where every prompt is computed."""
    opened = LookupServer()
    served = opened.serve(PROMPTS)
    assert served.origins == {PrefixOrigin.COMPUTED} and served.accept_length >= 2.5
    opened.close()
    return served.accept_length


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A folder with the prompts' pages and their drafts."""
    server = LookupServer(tmp_path)
    server.serve(PROMPTS, count=FILL)
    server.settle()
    server.close()
    return tmp_path


@pytest.fixture
def server() -> Iterator[LookupServer]:
    """Whose device and host have the prompts without drafts; there is no store yet."""
    opened = LookupServer()
    opened.serve(PROMPTS, count=FILL, speculate=False)
    opened.settle()
    yield opened
    opened.settle()
    opened.close()


def attach(server: LookupServer, folder: Path) -> Store:
    store = open_store(f"file://{folder}", server.cache.storage.space)
    server.cache.storage.attach(store)
    return store


def recomputed(server: LookupServer) -> None:
    """Have the prompts on the device without drafts, and on the host with them."""
    server.serve(PROMPTS, count=FILL)
    server.settle()
    server.cache.flush(Tier.DEVICE)
    for prompt in PROMPTS:
        request = server.engine.submit(RequestParams(prompt, FILL, speculate=False))
        request.slowest_tier = Tier.DEVICE
        while not server.engine.idle:
            server.engine.step()
        assert not request.by_tier
    server.settle()


def loaded(server: LookupServer) -> int:
    """Draft pages that were copied to device pages without them."""
    return server.cache.stats().moved_pool_pages.get(("load", "draft"), 0)


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST], ids=["device", "host"])
def test_drafts_of_a_store_keep_the_accept_length(
    tier: Tier, server: LookupServer, filled: Path, cold: float
) -> None:
    attach(server, filled)
    if tier is Tier.HOST:
        server.cache.flush(Tier.DEVICE)
    server.serve(PROMPTS, count=FILL)
    server.settle()
    stats = server.cache.stats().storage
    assert stats is not None and stats.supplements == len(PROMPTS) * PREFIX // PAGE
    again = server.serve(PROMPTS)
    assert again.origins == {PrefixOrigin.DEVICE}
    assert all(request.by_tier == {Tier.DEVICE: PREFIX} for request in again.requests)
    assert again.accept_length >= KEPT * cold


def test_drafts_of_the_host_come_before_a_request_s_first_draft(cold: float) -> None:
    server = LookupServer()
    recomputed(server)
    before = loaded(server)
    for prompt in PROMPTS:
        waiting = server.engine.submit(RequestParams(prompt, 1))
        server.settle()
        server.engine.abort(waiting)
    assert loaded(server) - before == len(PROMPTS) * PREFIX // PAGE, "without a step"
    served = server.serve(PROMPTS)
    assert served.origins == {PrefixOrigin.DEVICE}
    assert served.accept_length >= KEPT * cold
    server.close()


def test_a_request_is_answered_while_its_drafts_are_read(
    server: LookupServer, filled: Path, cold: float
) -> None:
    """And drafts as well as ever from the step on behind which they have come."""
    (prompt, *_) = PROMPTS
    store = open_store(f"file://{filled}", server.cache.storage.space)
    server.cache.storage.attach(gated := Gated(store, ("read",)))
    request = server.engine.submit(RequestParams(prompt, ANSWER))
    while len(request.output) < ANSWER // 4:
        server.engine.step()
    assert gated.asked["read"] == 1 and not gated.gate.is_set()
    gated.gate.set()
    server.settle()
    server.engine.step()  # These drafts were proposed before.
    steps, given = 0, 0
    while not server.engine.idle:
        steps += len(request.drafts) == 3
        given += len(server.engine.step()) * (len(request.drafts) == 3)
    assert tuple(one.token for one in request.output) == alone(prompt, ANSWER)
    assert given >= KEPT * cold * (steps - 1)


@pytest.mark.parametrize("source", ["host", "storage"])
def test_without_supplements_the_accept_length_falls(
    source: str, filled: Path, cold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: what lies in another tier is of no use by itself."""
    server = LookupServer()
    monkeypatch.setattr(server.cache.supplements, "begin", lambda prompt: None)
    if source == "host":
        recomputed(server)
    else:
        server.serve(PROMPTS, count=FILL, speculate=False)
        attach(server, filled)
    server.serve(PROMPTS, count=FILL)
    server.settle()
    again = server.serve(PROMPTS)
    assert again.origins == {PrefixOrigin.DEVICE} and loaded(server) == 0
    assert again.accept_length <= FALLEN * cold
    server.close()
