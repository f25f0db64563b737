"""Servers hand prompts over by every transport: the same answers, and bytes that it wrote."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvtide.transfer.peer.transport import TransportUnavailableError
from kvtide.transfer.peer.transport_registry import TRANSPORTS, open_transport
from tests.server.handoff.server_pairs import COMMON, ServerPair, answer, ask, handoff_of
from tests.server.serving import PAGE, VOCABULARY


@pytest.mark.full
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_servers_hand_over_by_every_transport(transport: str, model_folder: Path) -> None:
    try:
        open_transport(transport).close()
    except TransportUnavailableError as missing:
        pytest.skip(str(missing))
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
