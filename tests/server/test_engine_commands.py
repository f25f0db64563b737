"""Engine commands arrive on a rank as the leader sent them."""

from __future__ import annotations

import dataclasses

import pytest

from kvtide.cache import Namespace
from kvtide.engine import CheckedRequest, RequestParams, SamplingParams
from kvtide.engine.grammar.grammar import Grammar
from kvtide.engine.handoff.handoff_source import HandoffSource, HandoffTarget
from kvtide.index.keys import pack
from kvtide.server.engine_commands import (
    COMMANDS,
    Abort,
    AttachStore,
    OpenStore,
    RunStep,
    Submit,
    decode,
    encode,
)
from kvtide.server.handoff.peer_commands import PairWith, PeerSaid
from kvtide.server.sessions.session_commands import BeginPrefetch, EndPrefetch, ReleaseSession
from kvtide.server.settings import Settings

PARAMS = RequestParams(
    tokens=(5, 0, 319),
    max_tokens=7,
    sampling=SamplingParams(
        *(0.1 + 0.2, 0.9, 40, 0.05, 2**62 - 1, 0.5, -0.5, 1.1, 3, ((5, -100.0), (7, 0.5)))
    ),
    stop_ids=frozenset({4, 2}),
    stop=("é\ud800", '"\n'),
    keep_special=frozenset({7, 3}),
    recompute=True,
    score=5,
    namespace=Namespace("adapter", "salt"),
    priority=-(1 << 40),
    session="mine",
    session_ttl_s=0.1 + 0.2,
    speculate=False,
    grammar=Grammar("regex", 'é\n"'),
    handoff_from=HandoffSource("[::1]:9000", "room ü", asks=True),
    handoff_to=HandoffTarget("another", asked=True),
)


def checked(params: RequestParams) -> CheckedRequest:
    return CheckedRequest(params, pack(params.tokens))


@pytest.mark.parametrize(
    "command",
    [
        Submit(checked(PARAMS), 1e-5 / 3, 1e9 / 3),
        Submit(checked(RequestParams((1,), 1)), 0.0),
        Abort(12),
        RunStep(0.1 + 0.2),
        ReleaseSession('["", "ü", "a"]', 1 / 3),
        BeginPrefetch(7, "AAAA", "ü", '["", "ü", "a"]', -1, 0.1, 0.2, 1 / 3),
        EndPrefetch(7),
        OpenStore(3, "redis://me:secret@host/0?a=ü"),
        AttachStore(3, 0.1),
        PeerSaid("peer/1", {"kind": "done", "room": "room ü", "epoch": 3}),
        PairWith("peer/1", [{"areas": []}], [{"transport": "shm"}]),
    ],
    ids=lambda command: type(command).__name__,
)
def test_a_command_is_decoded_as_it_was_encoded(command: object) -> None:
    assert decode(encode(command)) == command


def test_every_field_of_a_request_is_tried() -> None:
    usual = RequestParams((1,), 1)
    for row in dataclasses.fields(RequestParams):
        assert getattr(PARAMS, row.name) != getattr(usual, row.name), row.name
    for row in dataclasses.fields(SamplingParams):
        assert getattr(PARAMS.sampling, row.name) != getattr(SamplingParams(), row.name), row.name


def test_every_command_can_be_decoded() -> None:
    for name, command in COMMANDS.items():
        values = {row.name: 1 for row in dataclasses.fields(command)}
        if name != "Submit":
            assert decode(encode(command(**values))) == command(**values)


def test_settings_reach_a_worker_as_they_are() -> None:
    settings = Settings(model="m", tp=2, host_ratio=1.5, deterministic=True)
    assert Settings(**dataclasses.asdict(settings)) == settings
