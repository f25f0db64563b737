"""Orders arrive as they were given, and are carried out by whoever hears them."""

from __future__ import annotations

import dataclasses

import pytest

from kvtide.cache import Namespace
from kvtide.engine import RequestParams, SamplingParams
from kvtide.server.engine_commands import (
    ORDERS,
    Abort,
    Attach,
    Open,
    RunStep,
    Submit,
    read,
    written,
)
from kvtide.server.settings import Settings

ASK = RequestParams(
    tokens=(5, 0, 319),
    max_tokens=7,
    sampling=SamplingParams(0.1 + 0.2, 0.9, 40, 0.05, 2**62 - 1, 0.5, -0.5, 1.1, 3),
    stop_ids=frozenset({4, 2}),
    stop=("é\ud800", '"\n'),
    recompute=True,
    score=5,
    namespace=Namespace("adapter", "salt"),
    priority=-(1 << 40),
    session="mine",
)


@pytest.mark.parametrize(
    "order",
    [
        Submit(ASK, 1e-5 / 3),
        Submit(RequestParams((1,), 1), 0.0),
        Abort(12),
        RunStep(),
        Open(3, "redis://me:secret@host/0?a=ü"),
        Attach(3, 0.1),
    ],
    ids=lambda order: type(order).__name__,
)
def test_what_is_heard_is_what_was_said(order: object) -> None:
    assert read(written(order)) == order


def test_every_field_of_an_ask_is_tried() -> None:
    usual = RequestParams((1,), 1)
    for row in dataclasses.fields(RequestParams):
        assert getattr(ASK, row.name) != getattr(usual, row.name), row.name
    for row in dataclasses.fields(SamplingParams):
        assert getattr(ASK.sampling, row.name) != getattr(SamplingParams(), row.name), row.name


def test_every_order_can_be_read() -> None:
    for name, order in ORDERS.items():
        said = {row.name: 1 for row in dataclasses.fields(order)}
        if name != "Submit":
            assert read(written(order(**said))) == order(**said)


def test_settings_reach_a_worker_as_they_are() -> None:
    settings = Settings(model="m", tp=2, host_ratio=1.5, deterministic=True)
    assert Settings(**dataclasses.asdict(settings)) == settings
