"""Facades hold: the index alone reads its tree, the cache alone reads an index lease."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvtide

PACKAGE = Path(kvtide.__file__).parent
PRIVATE = {
    "index": re.compile(r"index\.tree\b"),
    "cache": re.compile(r"\b_index_lease\b"),
}


@pytest.mark.parametrize("room", PRIVATE)
def test_nothing_outside_a_room_reads_what_is_private_to_it(room: str) -> None:
    roots = [PACKAGE, PACKAGE.parent / "bench", PACKAGE.parent / "examples"]
    files = [path for root in roots for path in root.rglob("*.py")]
    outside = [path for path in files if not path.is_relative_to(PACKAGE / room)]
    assert len(outside) > 100
    for path in outside:
        found = PRIVATE[room].search(path.read_text())
        assert found is None, f"{path.relative_to(PACKAGE.parent)} reads {found.group()}"


def test_what_is_private_is_recognised() -> None:
    assert PRIVATE["index"].search("size = self._index.tree.page_bytes")
    assert PRIVATE["index"].search("cache.index.tree.tick")
    assert PRIVATE["cache"].search("lease._index_lease.number")
