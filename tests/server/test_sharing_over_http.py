"""Two servers that are alive at the same time and share one store: each restores the other's pages.

The conversations go from one server to the other with every turn, and both serve some at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtide.cli.client import serving
from tests.models.tiny import oracle
from tests.server.conversing import FLAGS, PAGE, Talks, acknowledged
from tests.storage.mooncake_pool import Master

FAMILIES = {"file": "falcon_h1", "mooncake": "llama"}


@pytest.fixture(params=FAMILIES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/pages?cap=1GB&floor=1MB"
        return
    master = Master()
    yield master.url("64MB", timeout=5)
    master.kill()


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_two_servers_restore_what_the_other_computed(family: str, url: str, tmp_path: Path) -> None:
    oracle(family).save_pretrained(tmp_path)
    talks = Talks(family, tmp_path)
    with ExitStack() as stack:
        clients = stack.enter_context(ThreadPoolExecutor(3))
        arguments = [str(tmp_path), *FLAGS, "--storage", url]
        one, other = (stack.enter_context(serving(arguments)) for _ in range(2))
        stored = []
        for server in (one, other, one):
            before = talks.found["storage"]
            talks.round(server.url, clients)
            assert acknowledged(server.url)["violations"] == []
            stored.append(talks.found["storage"] - before)
        # A server that has read nothing yet does not know whether it pays, and asks for all.
        assert stored[0] == 0 and stored[1] >= 9 * PAGE and stored[2] >= PAGE
    assert one.process.returncode == other.process.returncode == 0
    talks.close()
