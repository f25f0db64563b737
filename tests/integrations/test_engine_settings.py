"""Settings of plug-ins: a store is named, unknown ones are refused, weights are fingerprinted."""

from __future__ import annotations

import logging

import pytest

from kvtide.integrations.engine_settings import fingerprint_of, refuse_unknown, require_store
from kvtide.storage import StoreError

WHERE = "the tier"


def test_the_url_of_the_store_is_returned() -> None:
    assert require_store({"url": "memory:"}, WHERE) == "memory:"


@pytest.mark.parametrize("settings", [{}, {"url": None}, {"url": ""}, {"url": 5}])
def test_settings_without_a_store_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(StoreError, match='the tier names no store; add "url", such as "file:'):
        require_store(settings, WHERE)


def test_unknown_settings_are_refused_by_name() -> None:
    refuse_unknown({"url": "", "theirs": 1}, {"url", "theirs"}, WHERE)
    with pytest.raises(StoreError, match="the tier has cap, size; kvtide knows url and fingerpr"):
        refuse_unknown({"url": "", "size": 1, "cap": 2}, {"url"}, WHERE)


@pytest.mark.parametrize(
    ("settings", "fingerprint", "warned"),
    [({"fingerprint": "r1"}, "r1", False), ({"fingerprint": 7}, "7", False), ({}, "", True)],
)
def test_a_missing_fingerprint_is_a_warning(
    caplog: pytest.LogCaptureFixture, settings: dict[str, object], fingerprint: str, warned: bool
) -> None:
    with caplog.at_level(logging.WARNING, "kvtide"):
        assert fingerprint_of(settings, WHERE, "the model's name") == fingerprint
    assert ("known by the model's name alone" in caplog.text) == warned
