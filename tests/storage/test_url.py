"""URLs of stores: what they are taken for, and what of them is shown."""

from __future__ import annotations

import pytest

from kvtide.storage import StoreError, open_store
from kvtide.storage.url import StoreURL


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("file:///var/kv%20tide?cap=2GB", "file:///var/kv tide"),
        ("redis://me:hidden@host:6379/0?timeout=2", "redis://host:6379/0"),
        ("redis://me:hid%23d%2Fen%40@host", "redis://host"),
        ("memory:shared", "memory:shared"),
        ("my_package.stores:Mine?token=hidden", "my_package.stores:Mine"),
    ],
)
def test_what_is_shown_of_a_url_has_no_secrets(text: str, shown: str) -> None:
    assert str(StoreURL.parse(text)) == shown
    assert "hid" not in repr(StoreURL.parse(text).host)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("redis://me:hidden", "storage redis://me: the port is not a number"),
        ("redis://me:hidden@host:port", "storage redis://host: the port is not a number"),
        ("redis://me:1#hidden@host", "the URL has a # or a late @; write %23"),
        ("redis://me:1/hidden@host", "the URL has a # or a late @; write %23"),
        ("redis://[hidden", "the URL is none"),
        ("reddis://me:hidden@host", "storage reddis://host: no such store"),
    ],
)
def test_what_is_refused_has_no_secrets_either(text: str, words: str) -> None:
    with pytest.raises(StoreError) as refusal:
        open_store(text, bytes(32))
    assert words in str(refusal.value) and "hidden" not in str(refusal.value)
