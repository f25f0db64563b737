"""Servers hand prompts over by every transport: the same answers, and bytes that it wrote."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from kvtide.transfer.peer.transport_registry import TRANSPORTS
from tests.server.handoff.server_pairs import COMMON, ServerPair, answer, ask, handoff_of
from tests.server.serving import PAGE, VOCABULARY, InProcess
from tests.transfer.peer.libraries import needs


class FakeEngine:
    """Mooncake's engine without a network. `opened`: what each was initialized with."""

    opened: ClassVar[list[tuple[str, ...]]] = []

    def initialize(self, *given: str) -> int:
        self.opened.append(given)
        return 0

    def get_rpc_port(self) -> int:
        return 15000

    def register_memory(self, address: int, size: int) -> int:
        return 0

    def unregister_memory(self, address: int) -> int:
        return 0


def test_the_library_sees_protocol_and_devices(
    serve: Callable[..., InProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = SimpleNamespace(TransferEngine=FakeEngine)
    monkeypatch.setitem(sys.modules, "mooncake.engine", fake)
    monkeypatch.setattr(FakeEngine, "opened", [])
    serve(
        role="prefill",
        handoff_transport="mooncake",
        handoff_protocol="rdma",
        handoff_devices="mlx5_0,mlx5_1",
    )
    assert FakeEngine.opened == [("127.0.0.1", "P2PHANDSHAKE", "rdma", "mlx5_0,mlx5_1")]


@pytest.mark.full
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_servers_hand_over_by_every_transport(transport: str, model_folder: Path) -> None:
    needs(transport)
    rng = random.Random(11)
    common = (*COMMON, "--handoff-transport", transport)
    with ServerPair(model_folder, common=common) as pair:
        for pages in (3, 9, 20):
            prompt = [rng.randrange(5, VOCABULARY - 5) for _ in range(pages * PAGE + 5)]
            found = ask(pair.decode.client, prompt)
            assert handoff_of(found)["state"] == "decoding", handoff_of(found)
            assert handoff_of(found)["tokens"] == pages * PAGE
            assert answer(found) == answer(ask(pair.prefill.client, prompt, recompute=True))
            again = ask(pair.decode.client, prompt)
            assert answer(again) == answer(found) and not handoff_of(again).get("tokens")
        sender = pair.prefill.handoff()["sender"]
        assert sender["written_bytes"] > 0 and not sender["jobs_failed"]
        pair.settled()
